"""What was done to a cluster, and how that was seen: no fault counts without its proof."""

import msgspec

from cluster.chaos.recorder import Recorder
from cluster.chaos.scenario import Fault, kind_of
from cluster.chaos.site import Process
from pronghorn.ids import Incarnation


class Fired(msgspec.Struct):
    """The proof that a fault was one. Times are seconds since the load began."""

    kind: str
    victim: str
    at_s: float
    seen: str
    """What was done and how that was seen."""
    role: str = ""
    incarnation: Incarnation | None = None
    pid: int | None = None
    seen_after_s: float = 0.0
    ended_s: float | None = None
    """When it was undone, where it lasted."""
    noticed_s: float | None = None
    """When the cluster first said that this life is not healthy, or did not name it any more."""

    @property
    def lasted_s(self) -> float:
        return (self.at_s if self.ended_s is None else self.ended_s) - self.at_s

    @property
    def is_of_node(self) -> bool:
        return self.incarnation is not None and self.role in ("prefill", "decode")


class Proofs:
    def __init__(self, recorder: Recorder) -> None:
        self.fired: list[Fired] = []
        self._recorder = recorder

    def of(self, fault: Fault, victim: Process | str, seen: str, pid: int | None = None) -> Fired:
        """Noted now, among those that fired; whoever finds that it was none removes it."""
        fired = Fired(kind_of(fault), str(victim), self._recorder.since_s(), seen, pid=pid)
        if isinstance(victim, Process):
            fired.victim, fired.role, fired.incarnation = victim.name, victim.role, victim.incarnation
        self.fired.append(fired)
        return fired
