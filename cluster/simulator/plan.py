"""A scenario as data: the cluster, the load and the faults of one simulation. Nothing in it is drawn at random any
more, so that it can be printed, replayed, and made smaller piece by piece.
"""

from enum import StrEnum
from typing import Literal

import msgspec

BLOCK_TOKENS = 4


class NodePlan(msgspec.Struct, frozen=True):
    name: str
    role: Literal["prefill", "decode"]
    num_blocks: int
    max_batch_size: int
    max_waiting: int
    max_in_flight: int
    step_s: float
    token_s: float
    clock_offset_s: float
    clock_rate: float
    stall_timeout_s: float
    """Decode: how long a hand-over may be silent."""
    host_blocks: int = 0
    """That its tier in memory has room for; 0: it has none."""


class RequestPlan(msgspec.Struct, frozen=True):
    name: str
    at_s: float
    orchestrator: str
    prompt: list[int]
    new_tokens: int
    budget_s: float
    eos: int | None = None
    salt: str | None = None
    target_endpoint: str | None = None
    hint: dict[str, int] = {}
    """Who is said to hold how many of the prompt's first blocks, true or not."""
    cancel_after_s: float | None = None
    """The client goes away, wherever the request is then."""
    stop_after_tokens: int | None = None
    """The client has all that it wants after so many tokens."""
    read_delay_s: float = 0.0
    """A slow client waits so long between two outputs."""
    choices: int = 1


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL of a host's processes; back after `duration_s` (0: never), under `detail`: the same or a new name."""
    KILL_ENGINE = "kill engine"
    PAUSE = "pause"
    """SIGSTOP of a node, shell and engine, or of an orchestrator."""
    PAUSE_SHELL = "pause shell"
    PAUSE_ENGINE = "pause engine"
    DRAIN = "drain"
    CUT = "cut"
    """Nothing passes from `target` to `other`."""
    CUT_BOTH = "cut both ways"
    SLOW = "slow"
    BREAK = "break connections"
    REDIS_AWAY = "redis away"
    REDIS_FLUSHED = "redis flushed"
    TAMPER = "tamper"
    """`detail` is done to a frame of blocks."""
    DROP_CACHES = "drop caches"
    JOIN = "join"
    """Another node like `target`."""


SENDER, RECEIVER = "sender", "receiver"
"""In place of a host: whoever sent, or will get, the message that the fault waited for."""


class Fault(msgspec.Struct, frozen=True):
    kind: FaultKind
    at_s: float
    target: str = ""
    other: str = ""
    moment: str | None = None
    """Not at `at_s`, but `delay_s` after the next (`nth`) message of this kind."""
    delay_s: float = 0.0
    duration_s: float = 0.0
    detail: str = ""
    nth: int = 1
    """Of the messages of its moment, counted from `at_s`."""

    def __str__(self) -> str:
        when = f"{self.at_s:.3f} s" + (
            f", at {self._which} {self.moment} + {self.delay_s:.3f} s" if self.moment else ""
        )
        where = f" {self.target}" + (f" -> {self.other}" if self.other else "")
        more = f" for {self.duration_s:.2f} s" if self.duration_s else ""
        return f"{self.kind}{where}{more} {self.detail}".rstrip() + f" ({when})"

    @property
    def _which(self) -> str:
        return "the next" if self.nth == 1 else f"the {self.nth}th"


class Plan(msgspec.Struct, frozen=True):
    seed: int
    nodes: list[NodePlan]
    orchestrators: list[str]
    requests: list[RequestPlan]
    faults: list[Fault]
    max_in_flight: int
    max_queue: int
    max_attempts: int
    link_delay_s: float
    link_jitter_s: float
    link_bytes_per_s: float
    window_bytes: int
    """What may be unread on a stream before its writer waits."""
    reconnect_min_s: float
    late_frames: bool
    perturbed: bool
    """Whether callbacks of different processes that are due at once run in a random order."""
    prefix_caching: bool
    directory: bool = False
    """Whether nodes ask the directory of blocks where a request comes without a hint."""

    def describe(self) -> list[str]:
        nodes = ", ".join(f"{n.name} ({n.num_blocks} blocks)" for n in self.nodes)
        return [
            f"seed {self.seed}: {nodes}; {', '.join(self.orchestrators)}; {len(self.requests)} requests",
            *(f"  fault: {fault}" for fault in self.faults),
        ]
