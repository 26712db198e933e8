"""A plan from a seed: a small cluster, a burst of requests, and faults at the worst moments.

Pure: the same seed gives the same plan, whatever runs it.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from cluster.simulator.canary import VOCAB_SIZE, continuation
from cluster.simulator.plan import BLOCK_TOKENS, RECEIVER, SENDER, Fault, FaultKind, NodePlan, Plan, RequestPlan

MOMENTS = ("submit", "ask", "first_token", "blocks", "commit", "outputs", "abort")
LOAD_S = 2.5
"""Within which all requests come."""
LONGEST_TOKENS = 28
"""Of an answer: long enough that most faults come in the middle of one, short enough for the smallest plain pool."""


def plan_of(seed: int) -> Plan:
    random = Random(f"plan/{seed}")
    prefill = random.choice((0, 1, 1, 1, 2, 2, 3))
    decode = random.choice((1, 2, 2, 3))
    orchestrators = [f"orchestrator-{i}" for i in range(random.choice((1, 1, 1, 2)))]
    tight = random.random() < 0.4
    nodes = [_node(random, "prefill", i, tight) for i in range(prefill)]
    nodes += [_node(random, "decode", i, tight) for i in range(decode)]
    nodes = _tiered(Random(f"tiers/{seed}"), nodes)
    requests = _requests(random, nodes, orchestrators, 12 if tight else LONGEST_TOKENS)
    requests = _hinted(Random(f"hints/{seed}"), requests, nodes)
    crowded = random.random() < 0.2
    return Plan(
        seed=seed,
        nodes=nodes,
        orchestrators=orchestrators,
        requests=requests,
        faults=_faults(random, nodes, orchestrators) + _fetch_faults(Random(f"fetch/{seed}"), requests),
        max_in_flight=random.randint(1, 4) if crowded else 64,
        max_queue=random.randint(0, 8) if crowded else 64,
        max_attempts=random.choice((1, 2, 3, 3)),
        link_delay_s=random.choice((0.0002, 0.002, 0.02)),
        link_jitter_s=random.choice((0.0, 0.001, 0.01)),
        link_bytes_per_s=random.choice((100e3, 1e6, 1e7)),
        window_bytes=random.choice((128, 512, 65536)),
        reconnect_min_s=random.choice((0.01, 0.1)),
        late_frames=random.random() < 0.5,
        perturbed=random.random() < 0.7,
        prefix_caching=random.random() < 0.8,
        directory=Random(f"directory/{seed}").random() < 0.5,
    )


def _node(random: Random, role: Any, index: int, tight: bool) -> NodePlan:
    return NodePlan(
        name=f"{role}-{index}",
        role=role,
        num_blocks=random.randint(11, 16) if tight else random.randint(16, 48),
        max_batch_size=random.randint(1, 8),
        max_waiting=random.randint(2, 6) if random.random() < 0.1 else 32,
        max_in_flight=random.randint(2, 6) if random.random() < 0.1 else 64,
        step_s=random.choice((0.002, 0.01, 0.04)),
        token_s=random.choice((0.0001, 0.0005, 0.002)),
        clock_offset_s=random.uniform(-300.0, 300.0),
        clock_rate=random.choice((1.0, 1.0, 0.999, 1.001)),
        stall_timeout_s=random.choice((1.0, 3.0)),
    )


def _tiered(random: Random, nodes: list[NodePlan]) -> list[NodePlan]:
    """Some nodes keep copies in their memory, of a few blocks or of more than their pool has."""
    if random.random() < 0.5:
        return nodes
    return [
        msgspec.structs.replace(node, host_blocks=random.randint(1, 64)) if random.random() < 0.7 else node
        for node in nodes
    ]


# --- load -------------------------------------------------------------------------------------------------------------


def _requests(
    random: Random, nodes: list[NodePlan], orchestrators: list[str], longest_tokens: int
) -> list[RequestPlan]:
    shared = [random.randrange(VOCAB_SIZE) for _ in range(24)]
    burst = random.random() < 0.4
    return [
        _request(random, f"request-{i}", shared, nodes, orchestrators, 0.1 if burst else LOAD_S, longest_tokens)
        for i in range(random.randint(3, 14))
    ]


def _request(
    random: Random,
    name: str,
    shared: list[int],
    nodes: list[NodePlan],
    orchestrators: list[str],
    within_s: float,
    longest_tokens: int,
) -> RequestPlan:
    head = shared[: random.choice((0, 0, 8, 16, 24))]
    prompt = head + [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 12))]
    new_tokens = random.randint(1, 12) if random.random() < 0.5 else random.randint(1, longest_tokens)
    prefill = [n.name for n in nodes if n.role == "prefill"]
    return RequestPlan(
        name=name,
        at_s=random.random() * within_s,
        orchestrator=random.choice(orchestrators),
        prompt=prompt,
        new_tokens=new_tokens,
        budget_s=random.uniform(0.02, 1.0) if random.random() < 0.1 else random.uniform(12.0, 16.0),
        eos=continuation(prompt, new_tokens)[-1] if random.random() < 0.15 else None,
        salt=random.choice((None, None, None, "salt")),
        target_endpoint=random.choice(prefill) if prefill and random.random() < 0.08 else None,
        cancel_after_s=random.random() * 0.4 if random.random() < 0.2 else None,
        stop_after_tokens=random.randint(1, new_tokens) if random.random() < 0.1 else None,
        read_delay_s=0.05 if random.random() < 0.05 else 0.0,
        choices=2 + prompt[-1] % 3 if prompt[-1] % 6 == 0 else 1,
    )


def _hinted(random: Random, requests: list[RequestPlan], nodes: list[NodePlan]) -> list[RequestPlan]:
    """Some requests come with word of who has their beginning: true, stale or wrong."""
    if random.random() < 0.4:
        return requests
    found = []
    if random.random() < 0.7:
        shared = [random.randrange(VOCAB_SIZE) for _ in range(24)]
        requests = [_begins_with(shared, request) for request in requests]
    for request in requests:
        blocks = len(request.prompt) // BLOCK_TOKENS
        if blocks and random.random() < 0.8:
            names = [node.name for node in nodes if random.random() < 0.8]
            depths = (blocks, blocks, blocks, random.randint(1, blocks))
            request = msgspec.structs.replace(request, hint={name: random.choice(depths) for name in names})
        found.append(request)
    return found


def _begins_with(shared: list[int], request: RequestPlan) -> RequestPlan:
    prompt = [*shared, *request.prompt[-8:]]
    eos = None if request.eos is None else continuation(prompt, request.new_tokens)[-1]
    return msgspec.structs.replace(request, prompt=prompt, eos=eos)


def _fetch_faults(random: Random, requests: list[RequestPlan]) -> list[Fault]:
    """Something happens to a holder or its asker while blocks are on their way."""
    if not any(request.hint for request in requests) or random.random() < 0.5:
        return []
    moment = random.choice(("fetch", "fetched_blocks", "fetched_commit"))
    place = random.choice((SENDER, RECEIVER))
    other = RECEIVER if place == SENDER else SENDER
    at_s, delay_s = random.random() * LOAD_S * 0.5, random.choice((0.0, random.random() * 0.02))
    kind, detail, lasts_s = random.choice(
        (
            (FaultKind.KILL, "same", 0.5),
            (FaultKind.PAUSE, "", 1.0),
            (FaultKind.PAUSE_ENGINE, "", 1.0),
            (FaultKind.CUT, "", 1.0),
            (FaultKind.BREAK, "", 0.0),
            (FaultKind.TAMPER, "corrupt", 1.0),
            (FaultKind.DROP_CACHES, "", 0.0),
        )
    )
    return [Fault(kind, at_s, place, other, moment, delay_s, lasts_s, detail)]


# --- faults -----------------------------------------------------------------------------------------------------------


def _faults(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> list[Fault]:
    count = random.choice((0, 1, 1, 1, 2, 2, 3, 4))
    makers = [
        _kill,
        _kill,
        _kill_engine,
        _pause,
        _pause,
        _drain,
        _cut,
        _cut,
        _slow,
        _break,
        _break_outputs,
        _break_outputs,
        _redis,
        _tamper,
        _rest,
    ]
    return [_timed(random, random.choice(makers)(random, nodes, orchestrators)) for _ in range(count)]


def _timed(random: Random, fault: Fault) -> Fault:
    """At a moment when something hangs in the air, three times out of four."""
    at_s = random.random() * LOAD_S * 0.6
    moment = fault.moment or (random.choice(MOMENTS) if random.random() < 0.75 else None)
    delay_s = fault.delay_s or random.choice((0.0, random.random() * 0.01, random.random() * 0.1))
    return Fault(
        fault.kind, at_s, fault.target, fault.other, moment, delay_s if moment else 0.0, fault.duration_s, fault.detail
    )


Maker = Callable[[Random, list[NodePlan], list[str]], Fault]


def _place(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> tuple[str, str | None]:
    """A host, or whoever takes part in the moment."""
    if random.random() < 0.5:
        return random.choice((SENDER, RECEIVER)), random.choice(MOMENTS)
    if random.random() < 0.1:
        return random.choice(orchestrators), None
    return random.choice(nodes).name, None


def _kill(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    target, moment = _place(random, nodes, orchestrators)
    back_s = random.choice((0.3, 1.0, 3.0))
    return Fault(
        FaultKind.KILL, 0.0, target, moment=moment, duration_s=back_s, detail=random.choice(("same", "same", "new"))
    )


def _kill_engine(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    return Fault(FaultKind.KILL_ENGINE, 0.0, random.choice(nodes).name)


def _pause(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    target, moment = _place(random, nodes, orchestrators)
    kind = random.choice((FaultKind.PAUSE, FaultKind.PAUSE, FaultKind.PAUSE_SHELL, FaultKind.PAUSE_ENGINE))
    return Fault(kind, 0.0, target, moment=moment, duration_s=random.choice((0.2, 1.0, 2.5, 5.0)))


def _drain(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    return Fault(FaultKind.DRAIN, 0.0, random.choice(nodes).name, duration_s=random.choice((0.1, 2.0)))


def _link(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> tuple[str, str, str | None]:
    if random.random() < 0.5:
        pair = [SENDER, RECEIVER]
        random.shuffle(pair)
        return pair[0], pair[1], random.choice(MOMENTS)
    names = [n.name for n in nodes] + orchestrators
    first, second = random.sample(names, 2)
    return first, second, None


def _cut(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    target, other, moment = _link(random, nodes, orchestrators)
    if random.random() < 0.15:
        target, other, moment = random.choice(nodes).name, "redis", None
    kind = random.choice((FaultKind.CUT, FaultKind.CUT, FaultKind.CUT_BOTH))
    return Fault(kind, 0.0, target, other, moment, duration_s=random.choice((0.3, 1.0, 3.0, 6.0)))


def _slow(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    target, other, moment = _link(random, nodes, orchestrators)
    return Fault(FaultKind.SLOW, 0.0, target, other, moment, duration_s=3.0, detail=str(random.choice((5, 20, 100))))


def _break(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    target, other, moment = _link(random, nodes, orchestrators)
    return Fault(FaultKind.BREAK, 0.0, target, other, moment)


def _break_outputs(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    """While tokens are on their way, an attempt's first above all."""
    if random.random() < 0.3:
        return Fault(FaultKind.BREAK, 0.0, SENDER, RECEIVER, "outputs")
    moment = random.choice(("first_token", "commit"))
    return Fault(
        FaultKind.BREAK, 0.0, RECEIVER, random.choice(orchestrators), moment, delay_s=0.001 + random.random() * 0.06
    )


def _redis(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    if random.random() < 0.3:
        return Fault(FaultKind.REDIS_FLUSHED, 0.0)
    away_s = random.choice((0.5, 2.0, 5.0))
    return Fault(FaultKind.REDIS_AWAY, 0.0, duration_s=away_s, detail=random.choice(("", "flushed")))


def _tamper(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    detail = random.choice(("corrupt", "duplicate", "truncate", "drop"))
    return Fault(FaultKind.TAMPER, 0.0, duration_s=3.0, detail=detail)


def _rest(random: Random, nodes: list[NodePlan], orchestrators: list[str]) -> Fault:
    if random.random() < 0.5:
        return Fault(FaultKind.DROP_CACHES, 0.0)
    return Fault(FaultKind.JOIN, 0.0, random.choice(nodes).name)
