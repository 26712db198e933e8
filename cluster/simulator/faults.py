"""Faults, armed for a time or for a moment, done, and undone.

Knows how each kind is done to hosts and network. Invariant: whatever lasts is undone by itself; `open` counts what is
not undone yet.
"""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import msgspec

from cluster.simulator.hosts import Hosts, SimNode, SimOrchestrator
from cluster.simulator.plan import RECEIVER, SENDER, Fault, FaultKind
from cluster.simulator.process import ProcessState, SimProcess

MOMENT_PATIENCE_S = 5.0


class Faults:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._loop = hosts.loop
        self.open = 0
        self.fired: list[Fault] = []
        self._closed = False

    def arm(self, fault: Fault, start_s: float) -> None:
        self.open += 1
        self._at(start_s + fault.at_s, self._wait_for_moment if fault.moment else self._fire, fault)

    def close(self) -> None:
        """What has not begun does not begin any more."""
        self._closed = True

    def _at(self, when_s: float, function: Callable[..., Any], *args: Any) -> None:
        """As nobody: no process's death or pause holds a fault up."""
        self._loop.call_at(when_s, function, *args, context=Context())

    def _later(self, delay_s: float, function: Callable[..., Any], *args: Any) -> None:
        self._at(self._loop.time() + delay_s, function, *args)

    def _wait_for_moment(self, fault: Fault) -> None:
        assert fault.moment is not None
        watchers = self._hosts.network.moments.watchers.setdefault(fault.moment, [])
        state = {"to come": fault.nth}

        def come(source: str, target: str) -> None:
            state["to come"] -= 1
            if state["to come"]:
                return
            watchers.remove(come)
            place = {SENDER: source, RECEIVER: target}
            found = msgspec.structs.replace(
                fault, target=place.get(fault.target, fault.target), other=place.get(fault.other, fault.other)
            )
            self._later(fault.delay_s, self._fire, found)

        def give_up() -> None:
            if state["to come"]:
                watchers.remove(come)
                self.open -= 1

        watchers.append(come)
        self._later(MOMENT_PATIENCE_S, give_up)

    def _fire(self, fault: Fault) -> None:
        if self._closed:
            self.open -= 1
            return
        self.fired.append(fault)
        self._hosts.story.tell(f"FAULT {fault}")
        undo = self._do(fault)
        if undo is None:
            self.open -= 1
        else:
            self._later(fault.duration_s, self._undo, fault, undo)

    def _undo(self, fault: Fault, undo: Callable[[], None]) -> None:
        self._hosts.story.tell(f"the end of {fault.kind} {fault.target}")
        undo()
        self.open -= 1

    # --- each kind ----------------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> Callable[[], None] | None:
        """Do it; what undoes it later, if anything does."""
        network = self._hosts.network
        match fault.kind:
            case FaultKind.KILL:
                return self._kill(fault)
            case FaultKind.KILL_ENGINE:
                if (node := self._hosts.node(fault.target)) is not None:
                    node.engine.process.enter(node.engine.crash)
                return None
            case FaultKind.PAUSE | FaultKind.PAUSE_SHELL | FaultKind.PAUSE_ENGINE:
                return self._pause(fault)
            case FaultKind.DRAIN:
                return self._drain(fault)
            case FaultKind.CUT:
                network.block(fault.target, fault.other)
                return lambda: network.unblock(fault.target, fault.other)
            case FaultKind.CUT_BOTH:
                return self._cut_both(fault.target, fault.other)
            case FaultKind.SLOW:
                factor = float(fault.detail)
                network.slow(fault.target, fault.other, factor)
                return lambda: network.slow(fault.target, fault.other, 1 / factor)
            case FaultKind.BREAK:
                for stream in network.between(fault.target, fault.other):
                    network.cut(stream, "connection reset")
                return None
            case FaultKind.TAMPER:
                network.tampering.append(fault.detail)
                return lambda: network.tampering.clear()
            case FaultKind.REDIS_AWAY | FaultKind.REDIS_FLUSHED:
                return self._redis(fault)
            case FaultKind.DROP_CACHES:
                for orchestrator in [o for o in self._hosts.orchestrators if not o.gone]:
                    orchestrator.process.enter(orchestrator.replica.dispatcher.drop_prefix_caches)
                return None
            case FaultKind.JOIN:
                if (node := self._hosts.node(fault.target)) is not None:
                    self._hosts.start_node(self._hosts.successor(node.plan))
                return None

    def _kill(self, fault: Fault) -> Callable[[], None] | None:
        if (node := self._hosts.node(fault.target)) is not None:
            self._hosts.kill_node(node)
            if not fault.duration_s:
                return None
            plan = node.plan if fault.detail == "same" else self._hosts.successor(node.plan)
            return lambda: self._start_again(plan)
        if (orchestrator := self._hosts.orchestrator(fault.target)) is not None:
            self._hosts.kill_orchestrator(orchestrator)
            return lambda: self._start_orchestrator_again(fault.target)
        return None

    def _start_again(self, plan: Any) -> None:
        if self._hosts.node(plan.name) is None:
            self._hosts.start_node(plan)

    def _start_orchestrator_again(self, name: str) -> None:
        if self._hosts.orchestrator(name) is None:
            self._hosts.start_orchestrator(name)

    def _pause(self, fault: Fault) -> Callable[[], None] | None:
        host: SimNode | SimOrchestrator | None = self._hosts.node(fault.target)
        if host is None:
            host = self._hosts.orchestrator(fault.target)
        if host is None:
            return None
        processes = self._processes(host, fault.kind)
        processes = [p for p in processes if p.state is ProcessState.RUNNING]
        for process in processes:
            process.pause()
            self._hosts.network.paused(process)
        if isinstance(host, SimOrchestrator):
            host.paused_s += fault.duration_s
        return lambda: self._resume(processes)

    def _processes(self, host: SimNode | SimOrchestrator, kind: FaultKind) -> list[SimProcess]:
        if isinstance(host, SimOrchestrator):
            return [host.process]
        match kind:
            case FaultKind.PAUSE_SHELL:
                return [host.process]
            case FaultKind.PAUSE_ENGINE:
                return [host.engine.process]
            case _:
                return list(host.processes)

    def _resume(self, processes: list[SimProcess]) -> None:
        for process in processes:
            self._loop.resume(process)

    def _drain(self, fault: Fault) -> Callable[[], None] | None:
        node = self._hosts.node(fault.target)
        if node is None:
            return None
        node.process.start(self._hosts.drain(node), "drain")
        plan = self._hosts.successor(node.plan)
        return lambda: self._start_again(plan)

    def _cut_both(self, a: str, b: str) -> Callable[[], None]:
        network = self._hosts.network
        network.block(a, b)
        network.block(b, a)

        def heal() -> None:
            network.unblock(a, b)
            network.unblock(b, a)

        return heal

    def _redis(self, fault: Fault) -> Callable[[], None] | None:
        redis = self._hosts.redis
        if fault.kind is FaultKind.REDIS_FLUSHED:
            redis.flush()
            return None
        redis.away = True

        def back() -> None:
            redis.away = False
            if fault.detail == "flushed":
                redis.flush()

        return back
