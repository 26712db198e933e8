"""What an engine computes next that makes one image or one sound at a time: the oldest request, and only that.

Pure; generic over contexts and outputs. A request that is cancelled while it waits is never begun. `jobs.py` says what
becomes of one that is cancelled, late or without a result.
"""

from collections.abc import Mapping
from typing import Generic

from pipelines.runtime.jobs import ContextT, Done, Jobs, OutputT
from pipelines.runtime.messages import Failed
from pronghorn.errors import PronghornError
from pronghorn.ids import Fence, RequestID


class OneShotScheduler(Generic[ContextT, OutputT]):
    def __init__(self, *, max_waiting: int) -> None:
        """ValueError where the bound is below 1."""
        if max_waiting < 1:
            raise ValueError(f"max_waiting: {max_waiting} is not above 0")
        self._jobs: Jobs[ContextT, OutputT] = Jobs(max_waiting)

    def submit(self, fence: Fence, context: ContextT, budget_s: float, now_s: float) -> None:
        self._jobs.submit(fence, context, budget_s, now_s)

    def cancel(self, fence: Fence) -> None:
        self._jobs.cancel(fence)

    def sweep(self, now_s: float) -> None:
        self._jobs.sweep(now_s)

    def next_batch(self, now_s: float) -> dict[RequestID, ContextT] | None:
        """The one request to compute, as `PixelGenerationInputs` and its like take it; None where nothing waits."""
        self._jobs.sweep(now_s)
        return {job.fence.request_id: job.context for job in self._jobs.start(1)} or None

    def complete(self, outputs: Mapping[RequestID, OutputT], failures: Mapping[RequestID, PronghornError]) -> None:
        """The last request was computed."""
        self._jobs.settle(outputs, failures)

    def take_answers(self) -> list[Done[OutputT] | Failed]:
        """Since the last call, in order: one for every fence that was submitted."""
        return self._jobs.take_answers()

    @property
    def has_work(self) -> bool:
        return self._jobs.waiting > 0

    def check(self) -> None:
        self._jobs.check()
