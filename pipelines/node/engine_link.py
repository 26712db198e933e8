"""The engine as its node's shell holds it: one task reads the reports, commands go straight through.

Knows the port, the time of the last report and the engine's last word. Must not know what the reports are about.
Invariants: reports are handed on in order, synchronously, from one task; after `on_death` none is handed on.
"""

import asyncio
from collections.abc import Callable

from kvcache.memory import BlockMemory
from pipelines.node.health import unhealthy_reason
from pipelines.runtime.messages import EngineCommand, EngineLoad, EngineReady, Release, StepReport, Stock, TakeStock
from pipelines.runtime.port import EnginePort
from pronghorn.clock import Clock
from pronghorn.errors import EngineDied, Overloaded, PronghornError
from pronghorn.ids import Fence
from pronghorn.ledger import Held
from pronghorn.tasks import Owner

NO_LOAD = EngineLoad(
    total_blocks=0, free_blocks=0, held_blocks=0, cached_blocks=0, waiting=0, running=0, awaiting_blocks=0
)


class EngineLink:
    ready: EngineReady
    """What the engine said at its start; from `start` on."""

    def __init__(self, engine: EnginePort, clock: Clock, stall_timeout_s: float) -> None:
        self.load = NO_LOAD
        self._engine = engine
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._started = False
        self._death: PronghornError | None = None
        self._last_report_s = clock.now_s()
        self._stock: Stock | None = None
        self._stock_number = 0
        self._stocked = asyncio.Event()

    @property
    def memory(self) -> BlockMemory:
        return self._engine.memory

    @property
    def quiet_s(self) -> float:
        """Seconds since the engine's last word."""
        return self._clock.now_s() - self._last_report_s

    async def start(
        self,
        owner: Owner,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[PronghornError], None],
    ) -> EngineReady:
        """Start the engine and, under `owner`, the task that reads it. Raises what `EnginePort.start` raises."""
        self.ready = await self._engine.start()
        self._started = True
        self._last_report_s = self._clock.now_s()
        owner.start(self._read(on_report, on_death), "engine-reports")
        return self.ready

    async def _read(self, on_report: Callable[[StepReport], None], on_death: Callable[[PronghornError], None]) -> None:
        try:
            while True:
                report = await self._engine.receive()
                self._last_report_s = self._clock.now_s()
                self.load = report.load
                if report.stock is not None:
                    self._stock = report.stock
                    self._stocked.set()
                on_report(report)
        except EngineDied as error:
            self._death = error
            on_death(error)

    def send(self, command: EngineCommand) -> None:
        """Raises Overloaded where the engine's queue is full, EngineDied after its death."""
        if self._death is not None:
            raise EngineDied(self._death.message)
        self._engine.send(command)

    async def stock(self, within_s: float) -> list[Held] | None:
        """What the engine holds, asked now; None where it does not answer within `within_s`."""
        try:
            number = self.ask_stock()
            async with asyncio.timeout(within_s):
                while self._stock is None or self._stock.number < number:
                    self._stocked.clear()
                    await self._stocked.wait()
        except (TimeoutError, Overloaded, EngineDied):
            return None
        return self._stock.held

    def ask_stock(self) -> int:
        """Have it said in a report; its number. Raises as `send`."""
        self._stock_number += 1
        self.send(TakeStock(self._stock_number))
        return self._stock_number

    def release(self, fence: Fence) -> None:
        """End `fence` in the engine. A dead engine holds nothing, so that its death is no fault here."""
        try:
            self.send(Release(fence))
        except EngineDied:
            return

    def unhealthy_reason(self) -> str | None:
        return unhealthy_reason(
            started=self._started,
            ended=None if self._death is None else self._death.message,
            report_age_s=self.quiet_s,
            stall_timeout_s=self._stall_timeout_s,
        )

    async def stop(self, grace_s: float) -> None:
        await self._engine.stop(grace_s)
