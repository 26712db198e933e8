"""What an embeddings engine computes next: as many texts as fit, each of which one step answers.

Takes whatever waits, in order of arrival, and deals it out over the replicas. Pure; generic over contexts and outputs.
`jobs.py` says what becomes of a request that is cancelled, late or missing from the result.
"""

from collections.abc import Mapping, Sequence
from typing import Generic

from pipelines.runtime.jobs import ContextT, Done, Jobs, OutputT
from pipelines.runtime.messages import Failed
from pronghorn.errors import PronghornError
from pronghorn.ids import Fence, RequestID


class EmbeddingsScheduler(Generic[ContextT, OutputT]):
    def __init__(self, *, max_batch_size: int, max_waiting: int, replicas: int = 1) -> None:
        """`max_batch_size` texts a replica. ValueError, naming it, where a bound is below 1."""
        for name, bound in (("max_batch_size", max_batch_size), ("max_waiting", max_waiting), ("replicas", replicas)):
            if bound < 1:
                raise ValueError(f"{name}: {bound} is not above 0")
        self._max_batch_size = max_batch_size
        self._replicas = replicas
        self._jobs: Jobs[ContextT, OutputT] = Jobs(max_waiting)

    def submit(self, fence: Fence, context: ContextT, budget_s: float, now_s: float) -> None:
        self._jobs.submit(fence, context, budget_s, now_s)

    def cancel(self, fence: Fence) -> None:
        self._jobs.cancel(fence)

    def sweep(self, now_s: float) -> None:
        self._jobs.sweep(now_s)

    def next_batch(self, now_s: float) -> Sequence[dict[RequestID, ContextT]] | None:
        """One inner batch a replica, for `EmbeddingsGenerationInputs`; None where nothing waits."""
        self._jobs.sweep(now_s)
        jobs = self._jobs.start(self._max_batch_size * self._replicas)
        if not jobs:
            return None
        return [
            {job.fence.request_id: job.context for job in jobs[replica :: self._replicas]}
            for replica in range(self._replicas)
        ]

    def complete(self, outputs: Mapping[RequestID, OutputT], failures: Mapping[RequestID, PronghornError]) -> None:
        """The last batch was computed."""
        self._jobs.settle(outputs, failures)

    def take_answers(self) -> list[Done[OutputT] | Failed]:
        """Since the last call, in order: one for every fence that was submitted."""
        return self._jobs.take_answers()

    @property
    def has_work(self) -> bool:
        return self._jobs.waiting > 0

    def check(self) -> None:
        self._jobs.check()
