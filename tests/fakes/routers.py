"""Routers and views for tests and simulations that bring no cluster: an index that knows nothing unless told."""

from collections.abc import Callable
from random import Random

from orchestrator.holdings import Holdings
from orchestrator.nodes import NodeView
from orchestrator.routing.break_even import Speeds
from orchestrator.routing.pick import Turn
from orchestrator.routing.policies import Setting, make_policy
from orchestrator.routing.reservation import Reservations
from orchestrator.routing.router import PolicyRouter
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName


class StillClock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def unix_s(self) -> float:
        return self.at_s


def view(
    name: str, in_flight: int = 0, waiting: int = 0, free_blocks: int = 64, unusable: str | None = None, **more: int
) -> NodeView:
    role = name.split("-")[0]
    address = f"10.0.0.{name[-1]}:70"
    life = Incarnation(f"{name}.life")
    return NodeView(NodeName(name), role, "tiny", address, life, unusable, in_flight, waiting, free_blocks, **more)


def router(
    policy: str,
    *,
    holdings: Holdings | None = None,
    reservations: Reservations | None = None,
    clock: Clock | None = None,
    seed: int = 0,
    speeds: Callable[[Incarnation], Speeds] = lambda _: Speeds(),
    kv_bytes_per_token: float = 1024.0,
    always_apart: bool = False,
    max_prefill_candidates: int = 2,
) -> PolicyRouter:
    random = Random(seed)
    return PolicyRouter(
        make_policy(policy, Setting(random, speeds, lambda: kv_bytes_per_token, always_apart)),
        holdings or Holdings(1 << 24, Counters()),
        reservations or Reservations(),
        clock or StillClock(),
        Turn(random),
        max_prefill_candidates=max_prefill_candidates,
        retry_after_s=1.5,
    )
