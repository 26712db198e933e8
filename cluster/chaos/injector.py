"""Does the faults of a scenario to a cluster, each at its moment, and proves that it did.

What is stopped goes on and what is cut heals when its time is over, and whenever the injector ends before that. A
fault that could not be done is a problem, and never passes for one that was. A victim is chosen when its fault
strikes: the busiest of its pool, the next where several are struck.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import httpx
import psutil

from cluster import drain as leaving
from cluster.chaos.client_faults import ClientFaults
from cluster.chaos.cut_proxy import BOTH, CutProxy, Way
from cluster.chaos.fired import Fired, Proofs
from cluster.chaos.load import Asking
from cluster.chaos.memory_cgroup import MemoryCgroup
from cluster.chaos.scenario import (
    BlackHole,
    Cut,
    Delay,
    Drain,
    Fault,
    FillDisk,
    Flip,
    ForgetPrefixes,
    Garbage,
    GcsKill,
    Kill,
    LeaveStorm,
    LosePackets,
    OutOfMemory,
    Overload,
    RayletKill,
    Redeploy,
    RedisFlush,
    RedisKill,
    RedisPause,
    Reset,
    Scale,
    Slow,
    Stop,
    aim_node,
    kind_of,
)
from cluster.chaos.site import Process, Site
from pronghorn.errors import ConfigurationError, ServiceError, Unavailable
from pronghorn.ids import Incarnation

SEEN_S = 10.0
"""Within which what was done must be seen to be so."""
POLL_S = 0.01
GRACE_BEYOND_S = 60.0
AIM_AGAIN_S = 0.2
AIM_S = 60.0
"""How long a victim is waited for, where its pool has none just now."""


class Injector:
    def __init__(self, site: Site, asking: Asking) -> None:
        self._proofs = Proofs(asking.recorder)
        self.fired = self._proofs.fired
        self.problems: list[str] = []
        self.gone: set[Incarnation] = set()
        """Lives that were ended on purpose."""
        self._site = site
        self._asking = asking
        self._recorder = asking.recorder
        self._clients = ClientFaults(site, asking, self._proofs, self.problems)

    async def do(self, fault: Fault) -> None:
        """Wait for its moment, do it, and undo it when it is over."""
        try:
            victim = await self._moment(fault)
            await self._strike(fault, victim)
        except (ServiceError, ConfigurationError) as error:
            self.problems.append(f"{kind_of(fault)} could not be done: {error.message}")
        except (httpx.HTTPError, psutil.Error, OSError) as error:
            self.problems.append(f"{kind_of(fault)} could not be done: {error!r}")

    async def _moment(self, fault: Fault) -> Process | None:
        """Returns at it; the victim, where its link told."""
        at, recorder = fault.at, self._recorder
        if at.s is not None:
            await asyncio.sleep(max(0.0, at.s - recorder.since_s()))
        elif (pieces := at.pieces) is not None:
            await recorder.until(lambda: recorder.pieces >= pieces)
        elif (ended := at.ended) is not None:
            await recorder.until(lambda: recorder.ended >= ended)
        elif at.link_bytes is not None:
            pool = aim_node(fault)
            assert pool is not None
            return await self._first_to_pass(pool, at.link_bytes, at.link_way)
        return None

    async def _strike(self, fault: Fault, victim: Process | None) -> None:
        match fault:
            case Kill():
                await self._kill(fault, victim)
            case Stop():
                await self._stop(fault, victim)
            case Cut() | BlackHole() | Delay() | Slow():
                await self._harm_link(fault, victim)
            case Reset() | Flip():
                await self._strike_link(fault, victim)
            case Drain():
                await self._drain(fault)
            case Redeploy():
                await self._redeploy(fault)
            case Scale():
                await self._scale(fault)
            case LeaveStorm():
                await self._clients.leave_storm(fault)
            case Overload():
                await self._clients.overload(fault)
            case Garbage():
                await self._clients.garbage(fault)
            case ForgetPrefixes():
                if await self._site.forget_prefixes():
                    self._proofs.of(fault, "every node", "the cluster said that it forgot")
                else:
                    raise Unavailable("prefix caching is off")
            case RedisKill():
                await self._signal(fault, "redis", self._site.redis_pid(), signal.SIGKILL)
            case RedisPause():
                await self._pause(fault, "redis", self._site.redis_pid(), fault.for_s)
            case RedisFlush():
                self._proofs.of(fault, "redis", f"{await self._site.flush_redis()} keys were there, and were dropped")
            case OutOfMemory():
                await self._kill_for_memory(fault, victim)
            case LosePackets():
                await self._lose_packets(fault)
            case FillDisk():
                await self._fill_disk(fault)
            case RayletKill():
                await self._kill_raylet(fault)
            case GcsKill():
                await self._kill_gcs(fault)

    # --- whom ---

    async def _first_to_pass(self, pool: str, count: int, way: str) -> Process:
        """The node of the pool on whose link so many bytes have passed first, whichever is sent the work."""
        first: asyncio.Future[Process] = asyncio.get_running_loop().create_future()

        def passed(one: Process) -> None:
            if not first.done():
                first.set_result(one)

        await self._victims(pool, 1)
        for one in await self._site.processes(pool):
            self._site.link(one).after(count, way, partial(passed, one))
        return await first

    async def _victims(self, role: str, count: int) -> list[Process]:
        """The busiest of the role; waits where there are not so many. Raises Unavailable where none comes."""
        give_up_s = time.monotonic() + AIM_S
        while True:
            found = []
            with suppress(Unavailable):
                found = [p for p in await self._site.processes(role) if p.incarnation not in self.gone]
            if len(found) >= count:
                return found[:count]
            if time.monotonic() > give_up_s:
                raise Unavailable(f"there are {len(found)} of {count} {role} processes to strike")
            await asyncio.sleep(AIM_AGAIN_S)

    async def _aimed(self, fault: Kill | Stop | OutOfMemory, victim: Process | None) -> list[tuple[Process, int]]:
        role, _, engine = fault.process.partition("-")
        victims = [victim] if victim is not None else await self._victims(role, fault.count)
        found = []
        for one in victims:
            pid = self._site.engine(one) if engine else one.pid
            if pid is None:
                raise Unavailable(f"{one.name} has no process on this machine")
            found.append((one, pid))
        return found

    # --- signals ---

    async def _kill(self, fault: Kill, victim: Process | None) -> None:
        aimed = await self._aimed(fault, victim)
        for one, _ in aimed:  # an engine's node gives itself up
            self.gone.add(one.incarnation)
        kills = [self._signal(fault, one, pid, signal.SIGKILL) for one, pid in aimed]
        await asyncio.gather(*kills)

    async def _stop(self, fault: Stop, victim: Process | None) -> None:
        aimed = await self._aimed(fault, victim)
        stops = [self._pause(fault, one, pid, fault.for_s) for one, pid in aimed]
        await asyncio.gather(*stops)

    async def _signal(self, fault: Fault, victim: Process | str, pid: int, number: signal.Signals) -> Fired:
        """Sends it, and waits until the operating system says what it does."""
        process = psutil.Process(pid)
        process.send_signal(number)
        fired = self._proofs.of(fault, victim, "", pid=pid)
        await self._see(
            fired, process, psutil.STATUS_STOPPED if number is signal.SIGSTOP else psutil.STATUS_ZOMBIE, number.name
        )
        return fired

    async def _see(
        self, fired: Fired, process: psutil.Process, wanted: str, what: str, within_s: float = SEEN_S
    ) -> None:
        """Returns when the operating system says that it is so, or that there is no such process."""
        began_s = time.monotonic()
        while (state := _state(process)) not in (wanted, "gone"):
            if time.monotonic() - began_s > within_s:
                raise Unavailable(f"pid {process.pid} is {state} {within_s:g} s after {what}")
            await asyncio.sleep(POLL_S)
        fired.seen_after_s = time.monotonic() - began_s
        fired.seen = f"{what} to pid {process.pid}, which was {state} after {fired.seen_after_s:.3f} s"

    async def _pause(self, fault: Fault, victim: Process | str, pid: int, for_s: float) -> None:
        fired: Fired | None = None
        try:
            fired = await self._signal(fault, victim, pid, signal.SIGSTOP)
            await asyncio.sleep(for_s)
        finally:
            with suppress(ProcessLookupError):  # it was replaced meanwhile
                os.kill(pid, signal.SIGCONT)
            if fired is not None:
                fired.ended_s = self._recorder.since_s()

    # --- the kernel ---

    async def _kill_for_memory(self, fault: OutOfMemory, victim: Process | None) -> None:
        aimed = await self._aimed(fault, victim)
        for one, _ in aimed:
            self.gone.add(one.incarnation)
        await asyncio.gather(*[self._take_room(fault, one, psutil.Process(pid)) for one, pid in aimed])

    async def _take_room(self, fault: OutOfMemory, one: Process, process: psutil.Process) -> None:
        cgroup = MemoryCgroup(f"pronghorn-chaos-{process.pid}")
        try:
            cgroup.take(process.pid)
            fired = self._proofs.of(fault, one, "", pid=process.pid)
            await self._see(fired, process, psutil.STATUS_ZOMBIE, "no more memory", AIM_S)
            if cgroup.kills() == 0:
                self.fired.remove(fired)
                raise Unavailable(f"pid {process.pid} ended, and the kernel did not kill it for its memory")
        finally:
            await asyncio.to_thread(cgroup.remove)

    async def _lose_packets(self, fault: LosePackets) -> None:
        network = self._site.network
        network.lose(fault.percent)
        fired = self._proofs.of(fault, "every connection", "")
        lost = 0
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            lost = network.heal()
            fired.ended_s = self._recorder.since_s()
            fired.seen = f"{lost} packets were dropped in {fired.lasted_s:.1f} s"
        if lost == 0:
            self.fired.remove(fired)
            raise Unavailable("no packet was lost")

    async def _fill_disk(self, fault: FillDisk) -> None:
        disk, before = self._site.disk, await self._failed_writes()
        try:
            size_bytes = await asyncio.to_thread(disk.fill)
            fired = self._proofs.of(fault, "every node", "")
            await asyncio.sleep(fault.for_s)
        finally:
            disk.free()
        fired.ended_s = self._recorder.since_s()
        failed = await self._failed_writes() - before
        fired.seen = (
            f"{size_bytes} bytes filled it for {fired.lasted_s:.1f} s, and {failed} blocks could not be written"
        )
        if failed == 0:
            self.fired.remove(fired)
            raise Unavailable("no node wanted to write a block meanwhile")

    async def _failed_writes(self) -> int:
        return sum(node.counters.get("tier_write_failed", 0) for node in (await self._site.status()).nodes)

    # --- Ray ---

    async def _kill_raylet(self, fault: RayletKill) -> None:
        [one] = await self._victims(fault.node, 1)
        raylet = self._site.raylet(one)
        for role in ("prefill", "decode", "orchestrator"):
            self.gone |= {p.incarnation for p in await self._site.processes(role) if p.host == one.host}
        fired = await self._signal(fault, one, raylet.pid, signal.SIGKILL)
        await asyncio.sleep(fault.another_after_s)
        joined = await self._site.add_machine()
        fired.ended_s = self._recorder.since_s()
        fired.seen = f"the raylet at {one.host} had {fired.seen}, and {joined} joined after {fired.lasted_s:.1f} s"

    async def _kill_gcs(self, fault: GcsKill) -> None:
        gcs = self._site.gcs
        fired: Fired | None = None
        try:
            fired = await self._signal(fault, "gcs", gcs.unwatched().pid, signal.SIGKILL)
            await asyncio.sleep(fault.for_s)
        finally:
            if fired is not None:
                gcs.start()
        await asyncio.to_thread(gcs.wait_until_it_answers)
        fired.ended_s = self._recorder.since_s()
        fired.seen += f", and answered again after {fired.lasted_s:.1f} s"

    # --- links ---

    async def _linked(self, fault: Fault, victim: Process | None) -> tuple[Process, CutProxy]:
        pool = aim_node(fault)
        assert pool is not None
        one = victim or (await self._victims(pool, 1))[0]
        return one, self._site.link(one)

    async def _harm_link(self, fault: Cut | BlackHole | Delay | Slow, victim: Process | None) -> None:
        one, proxy = await self._linked(fault, victim)
        ways = _ways(fault.ways)
        count = _touched(fault, proxy, ways)
        before = count()
        match fault:
            case Cut():
                proxy.hold(*ways)
            case BlackHole():
                proxy.drop(*ways)
            case Delay():
                proxy.delay(fault.by_s, *ways)
            case Slow():
                proxy.slow(fault.bytes_per_s, *ways)
        fired = self._proofs.of(fault, one, "")
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            proxy.heal()
            fired.ended_s = self._recorder.since_s()
            fired.seen = f"{count() - before} bytes of {proxy.address} were met by it, way {fault.ways}"
        if count() == before:
            self.fired.remove(fired)
            raise Unavailable(f"nothing passed on the link of {one.name} meanwhile")

    async def _strike_link(self, fault: Reset | Flip, victim: Process | None) -> None:
        one, proxy = await self._linked(fault, victim)
        if isinstance(fault, Reset):
            there = proxy.connections
            if there == 0:
                raise Unavailable(f"nobody was connected to {one.name}")
            proxy.reset()
            self._proofs.of(fault, one, f"{there} connections to {proxy.address} ended with RST")
            return
        way = proxy.ways[fault.ways]
        before = way.flipped
        proxy.corrupt(fault.offset, fault.ways)
        give_up_s = time.monotonic() + AIM_S
        while way.flipped == before:
            if time.monotonic() > give_up_s:
                proxy.heal()
                raise Unavailable(f"{fault.offset} bytes did not pass on the link of {one.name} within {AIM_S:g} s")
            await asyncio.sleep(POLL_S)
        self._proofs.of(
            fault, one.name, f"the byte {fault.offset} bytes on was flipped on {proxy.address}, way {fault.ways}"
        )

    # --- whatever any operator can do ---

    async def _drain(self, fault: Drain) -> None:
        [one] = await self._victims(fault.node, 1)
        status = await self._site.status()
        report = next((node for node in status.nodes if node.incarnation == one.incarnation), None)
        if report is None:
            raise Unavailable(f"{one.name} has gone by itself")
        self.gone.add(one.incarnation)
        began_s = time.monotonic()
        fired = self._proofs.of(fault, one, "")
        await leaving.drain(report, fault.grace_s, fault.grace_s + GRACE_BEYOND_S, lambda _: None)
        fired.seen_after_s = time.monotonic() - began_s
        fired.ended_s = self._recorder.since_s()
        fired.seen = f"its server at {one.address} was gone after {fired.seen_after_s:.1f} s"

    async def _redeploy(self, fault: Redeploy) -> None:
        before = (await self._site.status()).lives()
        fired = self._proofs.of(fault, "every process", "")
        self.gone |= before
        await self._site.command("redeploy")
        fired.ended_s = self._recorder.since_s()
        left = before & (await self._site.status()).lives()
        fired.seen = (
            f"{len(before) - len(left)} of {len(before)} nodes are new after {fired.ended_s - fired.at_s:.0f} s"
        )
        if left:
            raise Unavailable(f"{len(left)} nodes are the old ones still")

    async def _scale(self, fault: Scale) -> None:
        was = (await self._site.lives())[fault.node]
        fired = self._proofs.of(fault, f"every {fault.node}", "")
        flag = "--orchestrators" if fault.node == "orchestrator" else f"--{fault.node}"
        await self._site.command("scale", f"{flag}={fault.to}")
        there = (await self._site.lives())[fault.node]
        await self._site.command("scale", f"{flag}={was}")
        fired.ended_s = self._recorder.since_s()
        fired.seen = f"{was} became {there} and then {(await self._site.lives())[fault.node]}"
        if there != fault.to:
            raise Unavailable(f"there were {there} {fault.node} nodes, and not {fault.to}")


def _ways(ways: str) -> tuple[str, ...]:
    return BOTH if ways == "both" else (ways,)


def _touched(fault: Cut | BlackHole | Delay | Slow, proxy: CutProxy, ways: tuple[str, ...]) -> Callable[[], int]:
    def of(way: Way) -> int:
        match fault:
            case Cut():
                return way.held_bytes
            case BlackHole():
                return way.dropped_bytes
            case _:
                return way.slowed_bytes

    return lambda: sum(of(proxy.ways[way]) for way in ways)


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"
