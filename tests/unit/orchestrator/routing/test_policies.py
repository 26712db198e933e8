from dataclasses import replace
from random import Random

import pytest

from kvcache.hashing import index_keys
from orchestrator.holdings import Holdings
from orchestrator.nodes import NodeView
from orchestrator.routing.break_even import Speeds
from orchestrator.routing.facts import RequestFacts
from orchestrator.routing.policies import POLICIES
from orchestrator.routing.reservation import SETTLES_S, Reservations
from pipelines.types.frames import BlockEvents, BlocksStored
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError
from tests.fakes.routers import StillClock, router, view

DECODE = [view(f"decode-{i}") for i in range(4)]
PREFILL = [view(f"prefill-{i}") for i in range(4)]


def prompt(blocks: int, of: int = 0, **more: object) -> RequestFacts:
    """A prompt of so many full blocks and a token; equal ones for equal `of`."""
    random = Random(of)
    keys = index_keys(random.randbytes(8) for _ in range(blocks))
    return RequestFacts(model="tiny", prompt_tokens=16 * blocks + 1, keys=keys, **more)  # type: ignore[arg-type]  # the tests' own


def holding(held: dict[str, RequestFacts]) -> Holdings:
    """Each of these nodes holds all of that prompt."""
    holdings = Holdings(1 << 24, Counters())
    for name, request in held.items():
        event = BlocksStored(None, request.keys)
        holdings.events(view(name).incarnation, BlockEvents(1, [event], snapshot=True), 0.0)
    return holdings


def tiers_of(held: dict[str, dict[str, RequestFacts]], of: Holdings | None = None) -> Holdings:
    """From each of these nodes all of that prompt could be had, by tier; "pool" is none, and holds it."""
    holdings = of or Holdings(1 << 24, Counters())
    for name, tiers in held.items():
        kept = {tier: [BlocksStored(None, request.keys)] for tier, request in tiers.items() if tier != "pool"}
        pool = [BlocksStored(None, tiers["pool"].keys)] if "pool" in tiers else []
        holdings.events(view(name).incarnation, BlockEvents(1, list(pool), snapshot=True, kept=dict(kept)), 0.0)
    return holdings


def loaded(nodes: list[NodeView], reservations: Reservations) -> list[NodeView]:
    """The same as a router sees them after what it has given out."""
    return [replace(n, queued_tokens=n.queued_tokens + reservations.tokens(n.incarnation)) for n in nodes]


def test_a_policy_that_there_is_none_of_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="kv_aware.*sticky_session"):
        router("fastest")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_with_and_without_prefill_nodes_and_obeys_a_named_one(policy: str) -> None:
    made = router(policy)
    assert made.choose(prompt(4), DECODE).prefill == ()
    assert made.choose(prompt(4), [*DECODE, *PREFILL]).choice is not None
    route = made.choose(replace(prompt(4), target_endpoint="prefill-2"), [*DECODE, *PREFILL])
    assert [target.name for target in route.prefill] == ["prefill-2"] and route.only_these


def test_round_robin_gives_each_node_its_turn() -> None:
    made = router("round_robin")
    chosen = [made.choose(prompt(1), [*DECODE, *PREFILL]) for _ in range(8)]
    assert sorted(route.decode.name for route in chosen) == sorted([node.name for node in DECODE] * 2)
    assert sorted(route.prefill[0].name for route in chosen) == sorted([node.name for node in PREFILL] * 2)


def test_random_is_even_in_the_long_run_and_replays_from_its_seed() -> None:
    def chosen(seed: int) -> list[str]:
        made = router("random", seed=seed)
        return [made.choose(prompt(1), DECODE).decode.name for _ in range(400)]

    names = chosen(1)
    assert names == chosen(1) != chosen(2)
    assert min(names.count(node.name) for node in DECODE) > 60


def test_the_same_beginning_goes_to_the_same_node_and_few_move_when_one_leaves() -> None:
    made = router("prefix_aware")
    before = {of: made.choose(prompt(64, of), DECODE).decode.name for of in range(200)}
    assert before == {of: made.choose(prompt(64, of), DECODE).decode.name for of in range(200)}
    assert len(set(before.values())) == 4
    left = [node for node in DECODE if node.name != "decode-2"]
    after = {of: made.choose(prompt(64, of), left).decode.name for of in range(200)}
    assert all(after[of] == name for of, name in before.items() if name != "decode-2")


@pytest.mark.field("production-stack#1008", "production-stack#420", "production-stack#668", "production-stack#15")
def test_a_session_stays_on_its_node_and_binds_anew_when_that_is_gone() -> None:
    made = router("sticky_session")
    request = prompt(4, session="talk")
    first = made.choose(request, DECODE).decode
    busy = [replace(node, in_flight=9) if node == first else node for node in DECODE]
    assert {made.choose(request, busy).decode.name for _ in range(3)} == {first.name}
    gone = [replace(node, unusable="silent for 3.0 s") if node == first else node for node in DECODE]
    second = made.choose(request, gone).decode.name
    assert second != first.name
    assert {made.choose(request, DECODE).decode.name for _ in range(3)} == {second}


# --- kv_aware ---------------------------------------------------------------------------------------------------------


def test_the_node_that_holds_the_prompt_computes_it() -> None:
    request = prompt(256)
    made = router("kv_aware", holdings=holding({"prefill-3": request}))
    route = made.choose(request, [*DECODE, *PREFILL])
    assert route.prefill[0].name == "prefill-3"
    assert route.held_blocks == (("prefill-3", 256),)
    assert route.choice is not None and route.choice.reuse_tokens == 16 * 256
    assert route.choice.considered[0].scores["overlap"] > 0.99


def test_a_holder_with_a_long_queue_is_passed_over() -> None:
    request = prompt(256)
    made = router("kv_aware", holdings=holding({"prefill-3": request}))
    busy = [replace(n, queued_tokens=100_000) if n.name == "prefill-3" else n for n in PREFILL]
    assert made.choose(request, [*DECODE, *busy]).prefill[0].name != "prefill-3"


def test_the_decode_node_to_which_least_has_to_travel_gets_it() -> None:
    request = prompt(256)
    made = router("kv_aware", holdings=holding({"decode-1": request}), kv_bytes_per_token=1e6, always_apart=True)
    assert made.choose(request, [*DECODE, *PREFILL]).decode.name == "decode-1"


def test_a_full_pool_and_a_crowd_are_avoided() -> None:
    made = router("kv_aware")
    full = [view("decode-0", free_blocks=2, total_blocks=1000), view("decode-1", free_blocks=900, total_blocks=1000)]
    assert {made.choose(prompt(64), full).decode.name for _ in range(4)} == {"decode-1"}
    crowded = [view("decode-0", in_flight=30), view("decode-1", in_flight=3)]
    assert {made.choose(prompt(64), crowded).decode.name for _ in range(4)} == {"decode-1"}


@pytest.mark.field("dynamo#3774", "dynamo#825")
def test_a_prompt_is_computed_apart_unless_here_is_clearly_sooner() -> None:
    made = router("kv_aware")
    idle = [view("decode-1"), view("prefill-1")]
    assert made.choose(prompt(64), idle).prefill
    queued = [view("decode-1"), view("prefill-1", queued_tokens=20_000)]
    assert not made.choose(prompt(64, 1), queued).prefill


def test_a_slow_link_keeps_a_prompt_where_it_is_decoded() -> None:
    slow = router("kv_aware", speeds=lambda _: Speeds(link_bytes_per_s=1e6), kv_bytes_per_token=65_536)
    assert not slow.choose(prompt(64), [view("decode-1"), view("prefill-1")]).prefill


def test_running_streams_speak_for_computing_apart() -> None:
    made = router("kv_aware")
    queue = view("prefill-1", queued_tokens=1500)
    assert not made.choose(prompt(256), [view("decode-1"), queue]).prefill
    assert made.choose(prompt(256, 1), [view("decode-1", in_flight=40), queue]).prefill


def test_a_decode_node_without_room_for_prompts_computes_none() -> None:
    made = router("kv_aware")
    nodes = [view("decode-1", local_prefill_room_tokens=100), view("prefill-1", queued_tokens=50_000)]
    assert made.choose(prompt(64), nodes).prefill


def test_with_always_apart_no_prompt_is_computed_on_a_decode_node() -> None:
    made = router("kv_aware", always_apart=True)
    assert made.choose(prompt(64), [view("decode-1"), view("prefill-1", queued_tokens=50_000)]).prefill


def test_what_was_given_out_counts_until_a_heartbeat_has_had_time_to_tell_it() -> None:
    reservations, clock = Reservations(), StillClock()
    made = router("kv_aware", reservations=reservations, clock=clock)
    chosen = {made.choose(prompt(64, i), [*DECODE, *loaded(PREFILL, reservations)]).prefill[0].name for i in range(4)}
    assert len(chosen) == 4
    node = PREFILL[0].incarnation
    assert reservations.tokens(node) == 64 * 16 + 1
    reservations.heard(node, SETTLES_S / 2)
    assert reservations.tokens(node) > 0
    reservations.heard(node, SETTLES_S)
    assert reservations.tokens(node) == reservations.requests(node) == 0


def test_a_session_returns_to_its_node_where_nothing_speaks_against_it() -> None:
    made = router("kv_aware")
    first = made.choose(prompt(4, session="talk"), DECODE).decode.name
    assert {made.choose(prompt(4, session="talk"), DECODE).decode.name for _ in range(5)} == {first}


@pytest.mark.field("dynamo#589", "llm-d-router#1598", "llm-d-router#2515", "vllm-project/router#178")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", ["kv_aware", "least_request"])
def test_sixteen_routers_with_a_burst_each_do_not_stampede(policy: str, shared: bool) -> None:
    """No heartbeat between the first and the last; the most that one node gets
    is at most twice the mean, on one hot prefix as on none."""
    nodes = [view(f"decode-{i}", total_blocks=10_000, free_blocks=10_000) for i in range(8)]
    hot = prompt(64, 7)
    given = dict.fromkeys((node.incarnation for node in nodes), 0)
    for number in range(16):
        reservations = Reservations()
        holdings = holding({"decode-3": hot}) if shared else None
        made = router(policy, seed=number, reservations=reservations, holdings=holdings)
        own = dict.fromkeys(given, 0)
        for i in range(64):
            seen = [replace(n, in_flight=16 * own[n.incarnation]) for n in loaded(nodes, reservations)]
            route = made.choose(hot if shared else prompt(64, 1000 * number + i), seen)
            own[route.decode.incarnation] += 1
            given[route.decode.incarnation] += 1
    mean = sum(given.values()) / len(nodes)
    assert max(given.values()) <= 2 * mean, given


# --- tiers ------------------------------------------------------------------------------------------------------------

SLOW_DISK = Speeds(host_bytes_per_s=2e9, disk_bytes_per_s=1e6)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prompt_goes_where_it_is_brought_back_from_a_tier_and_the_choice_says_so(tier: str) -> None:
    request = prompt(256)
    made = router("kv_aware", holdings=tiers_of({"prefill-2": {tier: request}}))
    route = made.choose(request, [*DECODE, *PREFILL])
    assert route.prefill[0].name == "prefill-2"
    assert route.choice is not None and route.choice.reuse_tokens == 16 * 256
    best = route.choice.considered[0].prefill
    assert best is not None and (best.reuse_tokens, best.found_tokens) == (0, 16 * 256)
    assert (best.host_tokens, best.disk_tokens) == ((16 * 256, 0) if tier == "host" else (0, 16 * 256))
    assert route.held_blocks == ()  # no other node can fetch from its tiers


@pytest.mark.parametrize(("nearer", "farther"), [("pool", "host"), ("host", "disk"), ("pool", "disk")])
def test_of_two_that_have_it_the_one_that_brings_it_back_sooner_gets_it(nearer: str, farther: str) -> None:
    request = prompt(256)
    held = {"prefill-1": {farther: request}, "prefill-3": {nearer: request}}
    for names in (held, dict(reversed(held.items()))):
        made = router("kv_aware", holdings=tiers_of(names), kv_bytes_per_token=65_536)
        chosen = {made.choose(request, [*DECODE, *PREFILL]).prefill[0].name for _ in range(3)}
        assert chosen == {"prefill-3"}


def test_what_its_tiers_have_beyond_its_pool_is_counted_once() -> None:
    request, shared = prompt(256), replace(prompt(256), keys=prompt(256).keys[: 8 * 64])
    part = replace(request, keys=request.keys[: 8 * 128])
    made = router("kv_aware", holdings=tiers_of({"prefill-1": {"pool": shared, "host": part, "disk": request}}))
    choice = made.choose(request, [*DECODE, *PREFILL]).choice
    assert choice is not None
    best = choice.considered[0].prefill
    assert best is not None
    assert (best.reuse_tokens, best.host_tokens, best.disk_tokens) == (16 * 64, 16 * 64, 16 * 128)


def test_a_tier_that_is_slower_than_computing_is_no_reason_to_go_there() -> None:
    request = prompt(256)
    held = tiers_of({"prefill-1": {"disk": request}})
    made = router("kv_aware", holdings=held, speeds=lambda _: SLOW_DISK, kv_bytes_per_token=65_536)
    route = made.choose(request, [*DECODE, *PREFILL])
    assert not route.prefill or route.prefill[0].name != "prefill-1"
    assert route.choice is not None
    other = next(p for p in PREFILL if p.name == "prefill-1")
    forced = made.choose(replace(request, target_endpoint="prefill-1"), [*DECODE, other]).choice
    assert forced is not None and forced.considered[0].scores["overlap"] == 0.0


def test_the_overlap_of_a_tier_is_what_bringing_it_back_saves() -> None:
    request = prompt(256)
    speeds = Speeds(prefill_tokens_per_s=1000.0, host_bytes_per_s=1e7)
    held = tiers_of({"prefill-1": {"host": request}})
    made = router("kv_aware", holdings=held, speeds=lambda _: speeds, kv_bytes_per_token=1000.0)
    choice = made.choose(replace(request, target_endpoint="prefill-1"), [*DECODE, *PREFILL]).choice
    assert choice is not None
    assert choice.considered[0].scores["overlap"] == pytest.approx(0.9, abs=0.01)  # 0.1 ms in place of 1 ms a token


def test_what_a_decode_node_has_in_its_tiers_has_to_travel_all_the_same() -> None:
    """It pulls from the prefill node what its pool lacks, and looks nowhere else."""
    request = prompt(256)
    held = tiers_of({"decode-1": {"host": request}, "decode-2": {"pool": request}})
    made = router("kv_aware", holdings=held, kv_bytes_per_token=1e6, always_apart=True)
    assert made.choose(request, [*DECODE, *PREFILL]).decode.name == "decode-2"


def test_a_queue_is_computed_while_a_prompt_is_brought_back() -> None:
    request = prompt(256)
    held = tiers_of({"prefill-1": {"host": request}})
    made = router("kv_aware", holdings=held, kv_bytes_per_token=65_536)
    busy = [replace(n, queued_tokens=1000) if n.name == "prefill-1" else n for n in PREFILL]
    assert made.choose(request, [*DECODE, *busy]).prefill[0].name == "prefill-1"


def test_a_large_cluster_finds_the_one_that_could_bring_it_back() -> None:
    request = prompt(256)
    many = [view(f"prefill-{i}", in_flight=i % 7) for i in range(100)]
    made = router("kv_aware", holdings=tiers_of({"prefill-98": {"host": request, "disk": request}}))
    assert made.choose(request, [*DECODE, *many]).prefill[0].name == "prefill-98"
