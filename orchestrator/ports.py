"""What the orchestrator's parts need of each other: generation and a view of the cluster for the API, a session with a
node for the dispatcher.

Protocols and plain records only; no version of any port lives here.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvcache.registry import NodeRecord
from orchestrator.explanation import RequestRecord
from pipelines.types.frames import NodeFrame, NodeReport, OrchestratorFrame
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.deadline import Deadline
from pronghorn.ids import Incarnation

# --- what the API needs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationJob:
    """One sequence to generate. `context.request_id` names it; an id that is in flight already is refused."""

    context: TextContext
    deadline: Deadline
    """On the clock of this process."""
    model: str
    target_endpoint: str | None = None
    """As the client wrote it: a registered name or `tcp://host:port`. Looked up among the nodes, never dialled."""
    hint: dict[str, Any] | None = None
    """The client's `dkv_cache_hint`, as it came. An unusable one is counted and costs a recompute, nothing else."""
    key: str | None = None
    """What the client calls it: as long as it runs, another one of that key is refused with RequestInProgress."""
    session: str | None = None
    """What requests of one conversation have in common: the client's `X-Session-ID` or `prompt_cache_key`."""
    priority: int = 0
    """The lower, the sooner it is served."""
    share: str = ""
    """Whose share of the service it is counted to: a name made of the client's API key, never the key itself."""


class Generator(Protocol):
    def generate(self, job: GenerationJob) -> AbstractAsyncContextManager[AsyncIterator[TextGenerationOutput]]:
        """Generate one sequence.

        Entering returns with the first output at hand, or raises the error that decided the request before it:
        Overloaded, Unavailable and its kinds, EndpointNotFound, InvalidRequest, RequestInProgress, DeadlineExceeded,
        or what a node said. Iterating yields outputs in order, each token once whatever node it came from, the last one
        with `is_done`; where no node can go on it raises one typed error instead. Leaving the context before the end
        stops the work on the node and frees everything that was held for it, at once. One iteration per context.
        """


class ModelState(msgspec.Struct, frozen=True):
    """One of the models, as this orchestrator sees it."""

    name: str
    ready: bool
    reason: str
    in_flight: int


class ClusterView(Protocol):
    def nodes(self) -> list[NodeReport]:
        """Every node that is registered or has a live session, with what it last said. A silent one is unhealthy."""

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and why (not): at least one usable decode node."""

    def degraded(self) -> str | None:
        """What is wrong with serving though requests are served: many of the nodes picked lately failed."""

    def models(self) -> list[ModelState]: ...

    def counters(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, int]:
        """Sizes of what is known here of the nodes' caches."""

    def explain(self, request_id: str) -> RequestRecord | None:
        """Why a request went where it went, while that is kept."""

    def in_flight(self) -> int:
        """Requests accepted and not ended, queued ones included."""

    async def reset_prefix_cache(self) -> None:
        """Ask every reachable node to forget the cached blocks that nobody holds."""


# --- what membership and dispatcher need of a node -------------------------------------------------------------------


class NodeClient(Protocol):
    """One session with one life of one node, from `connect` to its first break. Never reconnects: make a new one."""

    async def connect(self) -> None:
        """Open the session and exchange Hellos, within a bound. Raises HandshakeRefused or NodeLost."""

    def send(self, frame: OrchestratorFrame) -> None:
        """Queue a frame; never blocks. Raises NodeLost where the session is not up, Overloaded where the bounded queue
        is full; an `Abort` is always taken while the session is up: what frees is never refused."""

    def frames(self) -> AsyncGenerator[NodeFrame, None]:
        """The node's frames in order. Ends only by raising NodeLost, when the session broke or was closed."""

    async def close(self) -> None:
        """End the session in bounded time. Idempotent."""


class NodeConnector(Protocol):
    def client(self, record: NodeRecord) -> NodeClient:
        """A client for that life of that node, not connected yet. Does no I/O."""


class SessionListener(Protocol):
    """Whoever owns the attempts that run over the sessions."""

    def on_frame(self, incarnation: Incarnation, frame: NodeFrame) -> None: ...

    def on_heartbeat(self, report: NodeReport) -> None:
        """What the node says of itself, which is known to membership by now."""

    def on_lost(self, incarnation: Incarnation, reason: str, died: bool) -> None:
        """The session with that life of a node is over, and with it every attempt there. `died`: it broke as when the
        node's process ends, not by its silence nor in good order."""


class Sessions(Protocol):
    def send(self, incarnation: Incarnation, frame: OrchestratorFrame) -> None:
        """As NodeClient.send, to that life of a node."""

    def open_to(self) -> list[Incarnation]:
        """The lives of nodes with which a session is up."""
