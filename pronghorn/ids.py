"""Identity types: what names a request, a node, one life of a node, one try of a request.

Knows nothing of what they identify. Every message that crosses a process carries a `Fence`.
"""

import uuid
from dataclasses import dataclass, field
from typing import NewType

import msgspec


@dataclass(frozen=True)
class RequestID:
    """Names one request for its whole life, retries included. `str()` gives `value`."""

    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return self.value


NodeName = NewType("NodeName", str)
"""What people call a node, for example `decode-3f2a`. Unique among the living."""

Incarnation = NewType("Incarnation", str)
"""One life of a node process or of an orchestrator: 32 hex digits, minted at its start and never reused."""


def new_incarnation() -> Incarnation:
    return Incarnation(uuid.uuid4().hex)


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """Which try of which request, addressed to which life of the decode node that owns it.

    A retry raises `attempt`. A message whose fence is not the one that its receiver holds is late, and refused.
    """

    request_id: RequestID
    attempt: int
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}@{self.incarnation[:8]}"
