"""Ray's GCS dies under load on a cluster of three raylets, and a node dies while nobody can replace it: requests do not
notice, and the pool heals when the GCS is back. `pronghorn chaos` has the long versions."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.chaos.local_site import LocalSite
from cluster.chaos.own_cluster import own_cluster
from cluster.chaos.recorder import Verdict
from cluster.chaos.runner import Runner
from cluster.chaos.scenario import Cluster, read
from tests.fakes.running_cluster import ROOT, command_line
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PLACE = "cluster: {prefill: 2, decode: 2, machines: 3}"
LOAD = "load: {streams: 8, requests: 16, prompts: 8, prompt_words: [30], new_tokens: [150], deadline_s: 240}"
CHECKS = "checks: {recovered_within_s: 240}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[LocalSite]:
    with command_line(PYTHONPATH=str(ROOT)) as pronghorn:
        home = pronghorn.home / "p"
        settings = {"PRONGHORN_HOME": str(home), "PYTHONPATH": str(ROOT)}
        model = write_tiny_model(pronghorn.home / "tiny")
        size = Cluster(prefill=2, decode=2, machines=3)
        async with own_cluster(home, size, print, f"--model={model}", settings=settings) as running:
            yield running


@pytest.fixture(scope="module")
def runner(site: LocalSite) -> Runner:
    return Runner(site, seed=1, say=print)


async def play(runner: Runner, faults: str) -> None:
    """With everything that must hold: nothing lost, wrong, said twice or left over, and pools as large as before."""
    scenario = read("\n".join(("about: x", PLACE, LOAD, CHECKS, f"faults: [{faults}]")), "played")
    outcome = await runner.run(scenario)
    assert outcome.refused is None
    assert outcome.failures == [], [fired.seen for fired in outcome.fired]
    assert set(outcome.requests) == {Verdict.ANSWERED}
    assert outcome.recovered_s is not None


@pytest.mark.cells("F13 P10")
async def test_requests_do_not_notice_that_the_gcs_dies_and_the_pool_heals_when_it_is_back(runner: Runner) -> None:
    await play(
        runner, "{kind: gcs-kill, for_s: 5, at: {pieces: 200}}, {kind: kill, process: decode, at: {pieces: 500}}"
    )
