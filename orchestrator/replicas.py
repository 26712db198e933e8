"""An orchestrator of several models: one replica for each, which share a process, a registry and nothing else.

Nodes, sessions, admission, routing, breakers, holdings and explanations are each replica's own, so that nothing of one
model is ever considered for another. This file knows which replica a request is for, and sums up what they say.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from orchestrator.explanation import RequestRecord
from orchestrator.nodes import NodeView
from orchestrator.ports import GenerationJob, ModelState
from orchestrator.replica import Replica
from orchestrator.routing.filters import is_named
from pipelines.types.frames import NodeReport
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import EndpointNotFound, ModelNotFound
from pronghorn.ledger import Held


class Replicas:
    """Implements `ports.Generator` and `ports.ClusterView`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """At least one, no two of one model."""
        self.by_model = {replica.model: replica for replica in replicas}

    def _all(self) -> list[Replica]:
        return list(self.by_model.values())

    def start(self) -> None:
        for replica in self._all():
            replica.start()

    async def drain(self) -> None:
        await asyncio.gather(*(replica.drain() for replica in self._all()))

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self._all()))

    def generate(self, job: GenerationJob) -> AbstractAsyncContextManager[AsyncIterator[TextGenerationOutput]]:
        """Raises ModelNotFound, and EndpointNotFound where the client named a node of another model."""
        if job.model not in self.by_model:
            raise ModelNotFound(f"the model {job.model!r} does not exist", param="model")
        if job.target_endpoint is not None:
            self._require_own(job.target_endpoint, job.model)
        return self.by_model[job.model].generate(job)

    def _require_own(self, endpoint: str, model: str) -> None:
        own, *others = sorted(self._all(), key=lambda replica: replica.model != model)
        if any(is_named(endpoint, view) for view in own.views()):
            return
        for other in others:
            if any(is_named(endpoint, view) for view in other.views()):
                whose = f"is a node of the model {other.model!r}, and the request is for {model!r}"
                raise EndpointNotFound(f"target_endpoint {endpoint!r} {whose}", param="target_endpoint")

    def nodes(self) -> list[NodeReport]:
        return [report for replica in self._all() for report in replica.nodes()]

    def views(self) -> list[NodeView]:
        return [view for replica in self._all() for view in replica.views()]

    def held(self) -> list[Held]:
        return [held for replica in self._all() for held in replica.held()]

    def models(self) -> list[ModelState]:
        return [state for replica in self._all() for state in replica.models()]

    def ready(self) -> tuple[bool, str]:
        """Whether a request for one of the models, at least, could be served: what another one lacks is no reason to
        turn its clients away."""
        states = self.models()
        if len(states) == 1:
            return states[0].ready, states[0].reason
        return any(state.ready for state in states), "; ".join(f"{state.name}: {state.reason}" for state in states)

    def degraded(self) -> str | None:
        said = {replica.model: reason for replica in self._all() if (reason := replica.degraded()) is not None}
        if len(self.by_model) == 1:
            return next(iter(said.values()), None)
        return "; ".join(f"{model}: {reason}" for model, reason in said.items()) or None

    def counters(self) -> dict[str, int]:
        return _summed(replica.counters() for replica in self._all())

    def gauges(self) -> dict[str, int]:
        return _summed(replica.gauges() for replica in self._all())

    def explain(self, request_id: str) -> RequestRecord | None:
        found = (replica.explain(request_id) for replica in self._all())
        return next((record for record in found if record is not None), None)

    def in_flight(self) -> int:
        return sum(replica.in_flight() for replica in self._all())

    async def reset_prefix_cache(self) -> None:
        await asyncio.gather(*(replica.reset_prefix_cache() for replica in self._all()))

    def failure(self) -> BaseException | None:
        return next((failure for replica in self._all() if (failure := replica.failure()) is not None), None)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
