"""The attempts that a scheduler holds, by fence, and which of them speaks for its request.

Several attempts of one request may be held at once, because blocks that a shell may be touching stay held until
`Release`; at most one of them, the newest, is live. Knows nothing of blocks.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from pronghorn.ids import Fence, RequestID


class Attempt(Protocol):
    @property
    def fence(self) -> Fence: ...


AttemptT = TypeVar("AttemptT", bound=Attempt)


class Attempts(Generic[AttemptT]):
    def __init__(self) -> None:
        self._by_fence: dict[Fence, AttemptT] = {}
        self._live: dict[RequestID, AttemptT] = {}

    def add(self, attempt: AttemptT) -> None:
        """Make `attempt` the live one of its request, which must have none."""
        fence = attempt.fence
        assert fence not in self._by_fence and fence.request_id not in self._live, f"{fence} is held already"
        self._by_fence[fence] = attempt
        self._live[fence.request_id] = attempt

    def get(self, fence: Fence) -> AttemptT | None:
        return self._by_fence.get(fence)

    def live(self, request_id: RequestID) -> AttemptT | None:
        return self._live.get(request_id)

    def retire(self, attempt: AttemptT) -> None:
        """`attempt` no longer speaks for its request; it is still held."""
        if self._live.get(attempt.fence.request_id) is attempt:
            del self._live[attempt.fence.request_id]

    def discard(self, attempt: AttemptT) -> None:
        self.retire(attempt)
        del self._by_fence[attempt.fence]

    def __iter__(self) -> Iterator[AttemptT]:
        """Oldest first; the set may change while it is walked."""
        return iter(list(self._by_fence.values()))

    def __len__(self) -> int:
        return len(self._by_fence)
