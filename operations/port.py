"""What a process answers to whoever operates it: alive, ready, metrics, ledger. A record of callables, no sockets.

The same answers leave a node's or an orchestrator's operations port (`server.py`) and an orchestrator's HTTP API.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from operations.metrics import Metrics
from pronghorn.ledger import Ledger

ROUTES: dict[str, str] = {
    "/health": "200 while the process answers; says nothing of anybody else",
    "/ready": "200 where it could do its work now, else 503; the body says why",
    "/metrics": "Prometheus's text format",
    "/internal/ledger": "what the process holds, as JSON",
}
"""What is served by GET."""


@dataclass(frozen=True)
class Operations:
    ready: Callable[[], tuple[bool, str]]
    """Whether this process could do its work now, and why (not). A dead peer is no reason."""
    ledger: Callable[[], Awaitable[Ledger]]
    """Answers within a bound, whatever its engine does."""
    metrics: Metrics
