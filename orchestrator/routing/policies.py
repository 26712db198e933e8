"""The policies by which a pair of nodes is picked, by name.

Pure but for what each remembers (whose turn it is, who serves a session). Candidates are usable nodes of the right
role; a policy only orders them. Only
`kv_aware` knows caches and speeds, and only it ever computes a prompt on a decode node while a prefill node could.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple, Protocol

import xxhash

from orchestrator.nodes import NodeView
from orchestrator.routing import scorers
from orchestrator.routing.break_even import (
    Speeds,
    Task,
    apart_s,
    here_s,
    here_wins,
    restore_s,
    restored_worth,
    task,
    transfer_s,
)
from orchestrator.routing.facts import Candidate, Pair, RequestFacts
from orchestrator.routing.pick import Turn, least_loaded
from pronghorn.errors import ConfigurationError
from pronghorn.ids import Incarnation

FINALISTS = 4
"""Nodes of each role of which every pair is judged."""
CONSIDERED = 3
"""Pairs that are told."""
EXPECTED_OUTPUT_TOKENS = 128
WORK_SHARE = 1.0
"""What a second of computing a prompt costs those who come to the node behind it, beside a second of waiting for it."""
CROWD_SHARE = 0.3
"""What a second that a stream takes longer weighs, beside a second of waiting for its first token."""
SHORTAGE_S = 5.0
"""What a pool without any room for a prompt costs: others are preempted, or it waits."""
SESSION_WORTH_S = 0.005
SESSIONS = 65_536
"""Remembered at most, the latest."""
PREFIX_TOKENS = 1024
"""Of a prompt, what `prefix_aware` hashes."""


class Setting(NamedTuple):
    """What a policy is made with."""

    random: Random
    speeds: Callable[[Incarnation], Speeds]
    kv_bytes_per_token: Callable[[], float]
    always_apart: bool
    """Never compute a prompt on a decode node while a prefill node could."""


class Policy(Protocol):
    name: str
    wants_all: bool
    """Whether it must see every node, or those with the least to do and those that hold most will do."""

    def pick(
        self, request: RequestFacts, decode: Sequence[Candidate], prefill: Sequence[Candidate], forced: bool
    ) -> list[Pair]:
        """At least one pair, the best first. `forced`: the one prefill node is to be used. `decode` is not empty."""


class _Blind(ABC):
    """Orders each role by itself."""

    wants_all = True

    def pick(
        self, request: RequestFacts, decode: Sequence[Candidate], prefill: Sequence[Candidate], forced: bool
    ) -> list[Pair]:
        ordered = self.order(request, prefill) if len(prefill) > 1 else prefill
        return [Pair(self.order(request, decode)[0], ordered[0] if ordered else None)]

    @abstractmethod
    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best first."""


class LeastRequest(_Blind):
    name = "least_request"
    wants_all = False

    def __init__(self, setting: Setting) -> None:
        self._turn = Turn(setting.random)

    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        turned = self._turn.rotated(candidates)
        return [min(turned, key=lambda c: (c.node.in_flight, c.node.waiting, -c.node.free_blocks))]


class RoundRobin(_Blind):
    name = "round_robin"

    def __init__(self, setting: Setting) -> None:
        self._turns = {"decode": Turn(setting.random), "prefill": Turn(setting.random)}

    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        return self._turns[candidates[0].node.role].rotated(sorted(candidates, key=lambda c: c.node.name))


class RandomPolicy(_Blind):
    name = "random"

    def __init__(self, setting: Setting) -> None:
        self._random = setting.random

    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [self._random.choice(candidates)]


class PrefixAware(_Blind):
    """A consistent hash of the prompt's beginning: the same beginning goes to the same node, whoever else comes or
    goes. Without keys, as `least_request`."""

    name = "prefix_aware"

    def __init__(self, setting: Setting) -> None:
        self._otherwise = LeastRequest(setting)

    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        blocks = min(len(request.keys) // 8, max(1, PREFIX_TOKENS // request.block_tokens))
        if not blocks:
            return self._otherwise.order(request, candidates)
        key = request.keys[8 * (blocks - 1) : 8 * blocks]
        return [max(candidates, key=lambda c: xxhash.xxh3_64_intdigest(key + c.node.name.encode()))]


class StickySession(_Blind):
    """The node that served the session before, of each role, while it is there; else the least loaded, from then on.
    Without a session, as `least_request`."""

    name = "sticky_session"

    def __init__(self, setting: Setting) -> None:
        self._otherwise = LeastRequest(setting)
        self._bound: dict[str, OrderedDict[str, Incarnation]] = {"decode": OrderedDict(), "prefill": OrderedDict()}

    def order(self, request: RequestFacts, candidates: Sequence[Candidate]) -> list[Candidate]:
        if request.session is None:
            return self._otherwise.order(request, candidates)
        bound = self._bound[candidates[0].node.role]
        before = bound.get(request.session)
        chosen = next((c for c in candidates if c.node.incarnation == before), None)
        if chosen is None:
            chosen = self._otherwise.order(request, candidates)[0]
        bound[request.session] = chosen.node.incarnation
        bound.move_to_end(request.session)
        if len(bound) > SESSIONS:
            bound.popitem(last=False)
        return [chosen]


_Way = tuple[float, Candidate, Candidate | None]
"""Predicted seconds, who decodes, who computes the prompt where that is another one."""

_seconds = itemgetter(0)


def _work_s(task: Task) -> float:
    return WORK_SHARE * task.compute_s


def _may_compute(request: RequestFacts, c: Candidate) -> bool:
    room_tokens = c.node.local_prefill_room_tokens
    return room_tokens is None or request.prompt_tokens - c.found_tokens <= room_tokens


class KvAware:
    """The pair with which the answer is predicted to flow soonest and run on least disturbed: what each node holds of
    the prompt, in its pool or in tiers that give it back, what waits before it, what has to travel, how full and
    crowded the decode node is."""

    name = "kv_aware"
    wants_all = False

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._turn = Turn(setting.random)
        self._sessions: OrderedDict[str, Incarnation] = OrderedDict()

    def pick(
        self, request: RequestFacts, decode: Sequence[Candidate], prefill: Sequence[Candidate], forced: bool
    ) -> list[Pair]:
        last = self._sessions.get(request.session) if request.session is not None else None
        apart = self._apart(request, decode, prefill, last)
        if apart and (forced or self._setting.always_apart):
            ways = apart
        else:
            here = self._here(request, decode, last, only_fit=bool(apart))
            if not apart or (here and here_wins(here[0][0], apart[0][0])):
                ways = here + apart
            else:
                ways = apart[:1] + here[:1] + apart[1:]
        self._remember(request, ways[0][1])
        return [self._judged(request, way, last) for way in ways[:CONSIDERED]]

    def _here(
        self, request: RequestFacts, decode: Sequence[Candidate], last: Incarnation | None, only_fit: bool
    ) -> list[_Way]:
        """Ways without a prefill node, the best first; `only_fit`: on nodes that have room to compute the prompt."""
        ways: list[_Way] = [
            (
                here_s(t := self._task(request, c), c.node.in_flight) + _work_s(t) + self._crowd_s(request, c, last),
                c,
                None,
            )
            for c in self._turn.rotated(decode)
            if not only_fit or _may_compute(request, c)
        ]
        return sorted(ways, key=_seconds)[:FINALISTS]

    def _apart(
        self,
        request: RequestFacts,
        decode: Sequence[Candidate],
        prefill: Sequence[Candidate],
        last: Incarnation | None,
    ) -> list[_Way]:
        """Ways with one, the best first, among the pairs of the best few of each role."""
        if not prefill:
            return []
        tasks = [(self._task(request, c), c) for c in self._turn.rotated(prefill)]
        able = sorted([(sum(t) + _work_s(t), t, c) for t, c in tasks], key=_seconds)
        near = []
        for candidate in self._turn.rotated(decode):
            moved_s, crowd_s = self._transfer_s(request, candidate), self._crowd_s(request, candidate, last)
            near.append((moved_s + crowd_s, moved_s, crowd_s, candidate))
        near = sorted(near, key=_seconds)[:FINALISTS]
        ways: list[_Way] = [
            (apart_s(share, moved_s) + _work_s(share) + crowd_s, d, p)
            for _, moved_s, crowd_s, d in near
            for _, share, p in able[:FINALISTS]
        ]
        return sorted(ways, key=_seconds)

    def _task(self, request: RequestFacts, c: Candidate) -> Task:
        speeds = self._setting.speeds(c.node.incarnation)
        if not (c.host_tokens or c.disk_tokens):
            return task(request.prompt_tokens - c.reuse_tokens, c.node.queued_tokens, speeds)
        size_bytes = self._setting.kv_bytes_per_token()
        back_s = restore_s(c.host_tokens * size_bytes, c.disk_tokens * size_bytes, speeds)
        return task(request.prompt_tokens - c.found_tokens, c.node.queued_tokens, speeds, back_s)

    def _transfer_s(self, request: RequestFacts, decode: Candidate) -> float:
        moved_bytes = (request.prompt_tokens - decode.reuse_tokens) * self._setting.kv_bytes_per_token()
        return transfer_s(moved_bytes, self._setting.speeds(decode.node.incarnation).link_bytes_per_s)

    def _crowd_s(self, request: RequestFacts, c: Candidate, last: Incarnation | None) -> float:
        """What the others there cost this request, and it them; what is missing in the pool; less what is familiar."""
        node, speeds = c.node, self._setting.speeds(c.node.incarnation)
        crowd_s = CROWD_SHARE * EXPECTED_OUTPUT_TOKENS * speeds.stream_s * node.in_flight
        if node.waiting:
            crowd_s += node.waiting * speeds.step_s
        if node.total_blocks:
            wanted = (request.prompt_tokens - c.reuse_tokens) // request.block_tokens + 1
            crowd_s += SHORTAGE_S * max(0.0, (wanted - node.free_blocks) / wanted)
        return crowd_s - (SESSION_WORTH_S if node.incarnation == last else 0.0)

    def _remember(self, request: RequestFacts, decode: Candidate) -> None:
        if request.session is None:
            return
        self._sessions[request.session] = decode.node.incarnation
        self._sessions.move_to_end(request.session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def _judged(self, request: RequestFacts, way: _Way, last: Incarnation | None) -> Pair:
        cost_s, decode, prefill = way
        computes = prefill or decode
        speeds = self._setting.speeds(computes.node.incarnation)
        moved_s = 0.0 if prefill is None else self._transfer_s(request, decode)
        return Pair(
            decode,
            prefill,
            cost_s,
            {
                "overlap": self._overlap(request, computes, speeds),
                "queue": scorers.queue(computes.node.queued_tokens / speeds.prefill_tokens_per_s),
                "kv_use": scorers.kv_use(decode.node.free_blocks, decode.node.total_blocks),
                "transfer": scorers.transfer(moved_s),
                "affinity": scorers.affinity(decode.node.incarnation == last),
            },
        )

    def _overlap(self, request: RequestFacts, c: Candidate, speeds: Speeds) -> float:
        here = (c.reuse_tokens, 1.0)
        if not (c.host_tokens or c.disk_tokens):
            return scorers.overlap(request.prompt_tokens, here)
        size_bytes = self._setting.kv_bytes_per_token()
        return scorers.overlap(
            request.prompt_tokens,
            here,
            (c.host_tokens, restored_worth(size_bytes, speeds.host_bytes_per_s, speeds)),
            (c.disk_tokens, restored_worth(size_bytes, speeds.disk_bytes_per_s, speeds)),
        )


POLICIES: dict[str, Callable[[Setting], Policy]] = {
    "kv_aware": KvAware,
    "prefix_aware": PrefixAware,
    "least_request": LeastRequest,
    "round_robin": RoundRobin,
    "random": RandomPolicy,
    "sticky_session": StickySession,
}


def make_policy(name: str, setting: Setting) -> Policy:
    """Raises ConfigurationError naming the policies that there are."""
    if name not in POLICIES:
        raise ConfigurationError(f"policy is {name!r}; it must be one of {', '.join(POLICIES)}", param="policy")
    return POLICIES[name](setting)


def shortlist(nodes: Sequence[NodeView], holders: Container[Incarnation], count: int) -> list[NodeView]:
    """Those with the least to do, `count` of them, and those that hold most of the prompt; all where they are few."""
    if len(nodes) <= 2 * count:
        return list(nodes)
    chosen = {node.incarnation: node for node in nodes if node.incarnation in holders}
    chosen |= {node.incarnation: node for node in least_loaded(nodes, count)}
    return list(chosen.values())
