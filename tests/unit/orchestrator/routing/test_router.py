from dataclasses import replace

import pytest

from orchestrator.routing.facts import RequestFacts
from orchestrator.routing.router import PolicyRouter
from pronghorn.errors import EndpointNotFound, Unavailable
from tests.fakes.routers import router as make_router
from tests.fakes.routers import view

FACTS = RequestFacts(model="tiny", prompt_tokens=8)


@pytest.fixture
def router() -> PolicyRouter:
    return make_router("least_request")


def test_the_fewest_in_flight_win_then_the_queue_then_the_free_blocks(router: PolicyRouter) -> None:
    busy, queued = view("decode-1", in_flight=2), view("decode-2", in_flight=1, waiting=1)
    full, free = view("decode-3", in_flight=1, free_blocks=3), view("decode-4", in_flight=1)
    assert router.choose(FACTS, [busy, queued, full, free]).decode == free
    assert router.choose(FACTS, [busy, queued, full]).decode == full
    assert router.choose(FACTS, [busy, queued]).decode == queued


def test_equals_take_turns_by_name(router: PolicyRouter) -> None:
    nodes = [view("decode-2"), view("decode-1"), view("decode-3")]
    chosen = [router.choose(FACTS, nodes).decode.name for _ in range(6)]
    assert sorted(chosen[:3]) == ["decode-1", "decode-2", "decode-3"]
    assert chosen[:3] == chosen[3:]


def test_prefill_candidates_are_the_best_few(router: PolicyRouter) -> None:
    nodes = [view("decode-1"), view("prefill-1", in_flight=3), view("prefill-2"), view("prefill-3", in_flight=1)]
    route = router.choose(FACTS, nodes)
    assert [target.name for target in route.prefill] == ["prefill-2", "prefill-3"]
    assert route.prefill[0].address == "10.0.0.2:70"
    assert not route.only_these


def test_without_prefill_nodes_the_decode_node_computes_the_prompt(router: PolicyRouter) -> None:
    route = router.choose(FACTS, [view("decode-1"), view("prefill-1", unusable="draining")])
    assert route.prefill == ()
    assert not route.only_these


def test_a_node_that_failed_the_request_is_avoided(router: PolicyRouter) -> None:
    nodes = [view("decode-1"), view("decode-2", in_flight=9)]
    avoid = frozenset({nodes[0].incarnation})
    assert router.choose(replace(FACTS, avoid=avoid), nodes).decode == nodes[1]


def test_without_a_usable_decode_node_it_says_why_of_each(router: PolicyRouter) -> None:
    nodes = [view("decode-1", unusable="draining"), view("decode-2"), view("prefill-1")]
    with pytest.raises(Unavailable) as refused:
        router.choose(replace(FACTS, avoid=frozenset({nodes[1].incarnation})), nodes)
    assert "decode-1: draining" in refused.value.message
    assert "decode-2: failed this request" in refused.value.message
    assert refused.value.retry_after_s == 1.5
    with pytest.raises(Unavailable, match="none is registered"):
        router.choose(FACTS, [])


def test_a_node_of_another_model_is_never_chosen(router: PolicyRouter) -> None:
    with pytest.raises(Unavailable):
        router.choose(replace(FACTS, model="other"), [view("decode-1")])


@pytest.mark.conformance(44)
@pytest.mark.parametrize("endpoint", ["prefill-2", "tcp://10.0.0.2:70"])
def test_a_named_endpoint_is_obeyed_exactly(router: PolicyRouter, endpoint: str) -> None:
    nodes = [view("decode-1"), view("prefill-1"), view("prefill-2", in_flight=9)]
    route = router.choose(replace(FACTS, target_endpoint=endpoint), nodes)
    assert [target.name for target in route.prefill] == ["prefill-2"]
    assert route.only_these


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [
        ("prefill-9", "is not registered"),
        ("tcp://evil.example:70", "is not registered"),
        ("10.0.0.2:70", "is not registered"),
        ("decode-1", "is a decode node"),
    ],
)
def test_an_endpoint_that_is_no_prefill_node_is_not_found_and_the_answer_lists_them(
    router: PolicyRouter, endpoint: str, what: str
) -> None:
    nodes = [view("decode-1"), view("prefill-2")]
    with pytest.raises(EndpointNotFound) as refused:
        router.choose(replace(FACTS, target_endpoint=endpoint), nodes)
    assert what in refused.value.message
    assert "prefill-2 (tcp://10.0.0.2:70)" in refused.value.message
    assert refused.value.param == "target_endpoint"


def test_a_named_endpoint_that_is_dead_is_unavailable(router: PolicyRouter) -> None:
    nodes = [view("decode-1"), view("prefill-1"), view("prefill-2", unusable="silent for 3.0 s")]
    with pytest.raises(Unavailable) as refused:
        router.choose(replace(FACTS, target_endpoint="prefill-2"), nodes)
    assert "silent for 3.0 s" in refused.value.message
    assert refused.value.retry_after_s == 1.5


def test_where_two_lives_share_an_address_the_living_one_is_meant(router: PolicyRouter) -> None:
    dying = view("prefill-1", unusable="ping timeout")
    living = replace(view("prefill-2"), address=dying.address)
    route = router.choose(replace(FACTS, target_endpoint=f"tcp://{dying.address}"), [view("decode-1"), dying, living])
    assert route.prefill[0].name == "prefill-2"
