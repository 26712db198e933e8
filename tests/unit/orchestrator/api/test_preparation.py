import asyncio
import threading

import pytest

from orchestrator.api.preparation import Arrival, Prepared, Preparer
from orchestrator.api.workshop import Workshop
from pronghorn.deadline import Deadline
from pronghorn.errors import DeadlineExceeded, InvalidRequest, Overloaded
from tests.fakes.api_client import settings
from tests.fakes.byte_tokenizer import byte_tokenizer


def prepare(body: dict, headers: dict[str, str] | None = None, **changes) -> Prepared:
    preparer = Preparer(byte_tokenizer(), settings(**changes), [settings().model_name])
    return preparer.completion({"prompt": "hi"} | body, Arrival("r1", "/v1/completions", headers or {}, 100.0))


def test_each_prompt_of_a_request_that_its_client_has_named_has_a_key() -> None:
    named = prepare({"prompt": ["a", "b"]}, {"x-request-id": "mine"}).jobs
    assert [job.key for job in named] == ["mine", "mine#1"]
    assert [job.key for job in prepare({"prompt": ["a", "b"]}).jobs] == [None, None]


@pytest.mark.conformance(36, 44)
def test_headers_win_over_the_body() -> None:
    body = {"target_endpoint": "prefill-1", "timeout": 5, "cache_salt": "b"}
    headers = {"x-target-endpoint": "prefill-2", "x-request-timeout": "7.5", "x-cache-salt": "h"}
    (plain,) = prepare(body, use_client_cache_salt=True).jobs
    (given,) = prepare(body, headers, use_client_cache_salt=True).jobs
    assert (plain.target_endpoint, plain.context.cache_salt) == ("prefill-1", "b")
    assert (given.target_endpoint, given.context.cache_salt) == ("prefill-2", "h")
    assert plain.deadline == Deadline(105.0)
    assert given.deadline == Deadline(107.5)


def test_the_deadline_is_the_servers_unless_a_shorter_one_is_asked() -> None:
    assert prepare({}, default_deadline_s=30.0).deadline == Deadline(130.0)


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf", "601"])
def test_a_timeout_header_of_no_use_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare({}, {"x-request-timeout": value})
    assert caught.value.param == "X-Request-Timeout"


@pytest.mark.conformance(44)
def test_a_target_endpoint_stays_outside_the_context() -> None:
    (job,) = prepare({"target_endpoint": "prefill-1"}).jobs
    assert job.target_endpoint == "prefill-1"
    assert job.context.target_endpoint is None


@pytest.mark.conformance(35, 36)
def test_a_salt_is_ignored_unless_it_is_honoured_but_always_measured() -> None:
    assert prepare({"cache_salt": "b"}, {"x-cache-salt": "h"}).jobs[0].context.cache_salt is None
    assert prepare({"cache_salt": "x" * 512}, use_client_cache_salt=True).jobs[0].context.cache_salt == "x" * 512
    with pytest.raises(InvalidRequest, match="512"):
        prepare({}, {"x-cache-salt": "x" * 513})


@pytest.mark.conformance(38)
@pytest.mark.parametrize(
    ("hint", "carried"),
    [
        (None, None),
        ({"version": 1, "instances": []}, {"version": 1, "instances": []}),
        ({}, {}),
        ([1], {}),
        ("text", {}),
        ({"n": 2**80}, {}),
        ({"version": 1, "instances": ["x" * 70_000]}, {}),
    ],
)
def test_a_hint_is_carried_and_never_fails_a_request(hint, carried) -> None:
    assert prepare({"dkv_cache_hint": hint}).jobs[0].hint == carried


def test_a_short_body_is_prepared_in_place() -> None:
    async def play() -> None:
        where = await workshop.prepare(lambda raw, arrival: threading.current_thread(), b"x" * 10, ARRIVAL)
        assert where is threading.current_thread()

    workshop = Workshop(settings(offload_bytes=10))
    asyncio.run(play())


ARRIVAL = Arrival("r", "/", {}, 0.0)


async def test_a_long_body_is_prepared_off_the_loop_and_the_queue_is_bounded() -> None:
    workshop = Workshop(settings(offload_bytes=10, max_preparing=2))
    go = threading.Event()

    def wait(raw, arrival):
        assert go.wait(5)
        return threading.current_thread()

    first, second = (asyncio.ensure_future(workshop.prepare(wait, b"x" * 11, ARRIVAL)) for _ in range(2))
    await asyncio.sleep(0)  # both are begun
    with pytest.raises(Overloaded) as caught:
        await workshop.prepare(wait, b"x" * 11, ARRIVAL)
    assert caught.value.retry_after_s == 1.0
    go.set()
    assert await first is not threading.current_thread()
    assert await second is not threading.current_thread()
    workshop.close()


@pytest.mark.parametrize("body", [b'{"response_format": {}}', b'{"tools": []}', b'{"too\\u006cs": []}'])
async def test_what_may_be_compiled_is_compiled_off_the_loop(body: bytes) -> None:
    workshop = Workshop(settings())
    where = await workshop.prepare(lambda raw, arrival: threading.current_thread(), body, ARRIVAL)
    assert where is not threading.current_thread()
    workshop.close()


async def test_a_costly_grammar_holds_up_no_long_body() -> None:
    workshop = Workshop(settings(offload_bytes=10))
    go = threading.Event()
    costly = asyncio.ensure_future(workshop.prepare(lambda raw, arrival: go.wait(5), b'{"tools": [1]}', ARRIVAL))
    assert await workshop.prepare(lambda raw, arrival: "done", b"x" * 11, ARRIVAL) == "done"
    assert not costly.done()
    go.set()
    assert await costly
    workshop.close()


async def test_a_body_that_waits_too_long_to_be_prepared_is_a_504() -> None:
    workshop = Workshop(settings(offload_bytes=10, default_deadline_s=0.05))
    go = threading.Event()
    first = asyncio.ensure_future(workshop.prepare(lambda raw, arrival: go.wait(5), b"x" * 11, ARRIVAL))
    second = asyncio.ensure_future(workshop.prepare(lambda raw, arrival: None, b"x" * 11, ARRIVAL))
    with pytest.raises(DeadlineExceeded, match="prepared"):
        await second
    go.set()
    with pytest.raises(DeadlineExceeded):
        await first
    workshop.close()


def test_a_priority_reaches_the_queue_and_the_nodes_and_one_out_of_bounds_is_told_its_bound() -> None:
    (job,) = prepare({"priority": -3}).jobs
    assert job.priority == job.context.priority == -3
    assert [each.priority for each in prepare({}).jobs] == [0]
    for value, bound in ((-101, "-100"), (101, "100"), (0.5, "integer")):
        with pytest.raises(InvalidRequest, match=f"priority.*{bound}") as refused:
            prepare({"priority": value})
        assert refused.value.param == "priority"
    with pytest.raises(InvalidRequest, match="priority is -1; it must be at least 0"):
        prepare({"priority": -1}, most_urgent_priority=0)


def test_clients_are_told_apart_by_a_header_of_which_only_a_hash_is_kept() -> None:
    def share(headers: dict[str, str], **changes: object) -> str:
        (job,) = prepare({}, headers, **changes).jobs
        return job.share

    mine = share({"authorization": "Bearer sk-mine"})
    assert mine and "mine" not in mine and mine == share({"authorization": "Bearer sk-mine"})
    assert mine != share({"authorization": "Bearer sk-other"}) and share({}) == ""
    assert share({"x-tenant": "a"}, share_header="x-tenant") not in ("", mine)
