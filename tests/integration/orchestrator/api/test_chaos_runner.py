"""A scenario is run against a real HTTP server by its URL: the API that the harness speaks is the one that there is."""

from collections.abc import Callable, Sequence

import msgspec

from cluster.chaos.runner import Runner
from cluster.chaos.scenario import read
from cluster.chaos.site import Site
from orchestrator.ports import GenerationJob
from pipelines.types.frames import NodeReport
from pipelines.types.status import GenerationStatus
from pronghorn.ids import Incarnation, NodeName
from tests.fakes.api_client import MODEL, Served
from tests.fakes.http_server import served_on_loopback
from tests.fakes.scripted_generator import Tokens

TEXT = b"abcdefgh"
NODE = NodeReport(
    name=NodeName("decode-1"), role="decode", model=MODEL, address="127.0.0.1:1", incarnation=Incarnation("life"),
    healthy=True, in_flight=0, total_blocks=1, free_blocks=1, held_blocks=0, cached_blocks=0, waiting=0, running=0,
    awaiting_blocks=0,
)  # fmt: skip
SCENARIO = """
about: What any client can do.
load: {streams: 2, requests: 4, prompts: 2, prompt_words: [2], new_tokens: [8]}
faults:
  - {kind: garbage, requests: 9, at: {pieces: 4}}
  - {kind: forget-prefixes, at: {ended: 1}}
  - {kind: overload, times: 2, for_s: 0.2, at: {pieces: 4}}
"""


def right(_: GenerationJob) -> list[Tokens]:
    return [*(Tokens([byte]) for byte in TEXT[:-1]), Tokens([TEXT[-1]], GenerationStatus.MAXIMUM_LENGTH)]


def served(script: Callable[[GenerationJob], Sequence[Tokens]] = right) -> Served:
    found = Served(script)
    found.view.reports = [NODE, msgspec.structs.replace(NODE, role="prefill", incarnation=Incarnation("other"))]
    found.view.in_flight = lambda: 0  # type: ignore[method-assign]
    return found


async def test_a_scenario_that_needs_only_the_api_runs_by_url_and_all_is_counted() -> None:
    cluster = served()
    async with served_on_loopback(cluster.app) as port:
        site = Site(f"http://127.0.0.1:{port}")
        await site.connect()
        runner = Runner(site, seed=3)
        outcome = await runner.run(read(SCENARIO, "mine"))
        await site.close()
    assert outcome.failures == []
    assert sorted(fired.kind for fired in outcome.fired) == ["forget-prefixes", "garbage", "overload"]
    assert outcome.requests["answered"] >= 4 and outcome.extra_requests["answered"] > 0
    assert all(request.tries[-1].text == TEXT.decode() for request in runner.requests)
    assert cluster.view.resets == 2


async def test_a_server_that_says_something_else_under_a_load_is_found_out() -> None:
    texts = iter([TEXT] * 2)

    def script(_: GenerationJob) -> list[Tokens]:
        return [Tokens(next(texts, b"abXdefgh"), GenerationStatus.MAXIMUM_LENGTH)]

    cluster = served(script)
    async with served_on_loopback(cluster.app) as port:
        site = Site(f"http://127.0.0.1:{port}")
        await site.connect()
        load = "load: {streams: 1, prompts: 2, prompt_words: [2], requests: 2, new_tokens: [8]}"
        outcome = await Runner(site, seed=3).run(read(f"about: x\n{load}\nfaults: []", "x"))
        await site.close()
    assert outcome.requests["wrong"] >= 2
    assert outcome.failures[0].endswith("requests were wrong")
