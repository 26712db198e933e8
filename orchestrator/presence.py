"""An orchestrator as those who operate the cluster see it: its row, its operations port, its ledger and metrics.

Knows the replicas' own account of themselves and the registry's section for orchestrators. No request depends on
anything here: with the registry away an orchestrator serves on, unseen.
"""

import os
import time
from functools import partial

from kvcache.handshake import Identity
from kvcache.registration import Registration
from kvcache.registry import NodeRegistry, OrchestratorRecord
from operations.metrics import GAUGES, Metrics, Reading, RequestMetrics
from operations.port import Operations
from operations.server import OperationsServer
from orchestrator.replica import Replica
from orchestrator.replicas import Replicas
from pronghorn.ids import Incarnation, NodeName
from pronghorn.ledger import Held, Kind, Ledger
from pronghorn.tasks import Owner

STOP_GRACE_S = 3.0


class Presence:
    def __init__(self, replicas: Replicas, identity: Identity, registry: NodeRegistry, lease_s: float) -> None:
        self._replicas = replicas
        self._identity = identity
        self._owner = Owner("presence")
        metrics = Metrics(
            identity.role, {model: partial(_reading, replica) for model, replica in replicas.by_model.items()}
        )
        self.requests = RequestMetrics(metrics)
        self.operations = Operations(replicas.ready, self._ledger, metrics)
        self._server = OperationsServer(self.operations)
        self._registration = Registration(registry.orchestrators, lease_s, self._record)
        self._host: str | None = None
        self._address: str | None = None
        self._since_unix_s = time.time()

    async def start(self, host: str) -> None:
        """Open the port on `host`, by which others know this machine, then appear in the registry."""
        self._host, self._address = host, await self._server.start(host, host)
        self._registration.begin(self._owner)

    async def stop(self) -> None:
        """Out of the registry, then silent. Idempotent."""
        await self._registration.end()
        await self._owner.stop(STOP_GRACE_S)
        await self._server.stop()

    def _record(self) -> OrchestratorRecord:
        assert self._host is not None
        return OrchestratorRecord(
            name=NodeName(self._identity.name),
            model=self._identity.model,
            models=list(self._replicas.by_model),
            incarnation=Incarnation(self._identity.incarnation),
            operations_address=self._address,
            host=self._host,
            pid=os.getpid(),
            registered_at_unix_s=self._since_unix_s,
        )

    async def _ledger(self) -> Ledger:
        held = [*self._replicas.held(), *(Held(Kind.TASK, name) for name in self._owner.running)]
        return Ledger(self._identity.name, self._identity.role, Incarnation(self._identity.incarnation), held)


def _reading(replica: Replica) -> Reading:
    held = replica.held()
    gauges = {
        "ready": float(replica.ready()[0]),
        "num_requests_running": sum(row.kind is Kind.SLOT for row in held),
        "num_requests_waiting": sum(row.kind is Kind.QUEUE_PLACE for row in held),
        "num_nodes_usable": sum(view.unusable is None for view in replica.views()),
    } | {name: float(value) for name, value in replica.gauges().items() if name in GAUGES}
    return Reading(gauges, held, replica.counters())
