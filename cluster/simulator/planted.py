"""Bugs on purpose, to show that the simulator would find them. For tests only: nothing plants one by itself.

Each replaces one method of the real code by one that forgets what that method is for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from decode_nodes.attempt import Attempt, AttemptState, Effect
from orchestrator.lifecycle import Lifecycle
from orchestrator.request_events import (
    AttemptFailed,
    Event,
    NodeGone,
    Produced,
)
from pipelines.types.text_output import TextGenerationOutput
from prefill_nodes.prompt import Prompt
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.errors import PronghornError


class PlantedBug(StrEnum):
    FREED_EARLY = "a block freed early"
    """A prefill engine gives a prompt's blocks back when its first token is out, though they are still being read."""
    NEVER_RELEASED = "a held block never released"
    """A decode shell that has stopped a pull forgets to tell its engine."""
    LATE_TOKEN = "a late token accepted"
    """An orchestrator takes what an attempt says that it gave up before."""


@contextmanager
def planted(bug: PlantedBug | None) -> Iterator[None]:
    if bug is None:
        yield
        return
    owner, name, replacement = _BUGS[bug]
    original = getattr(owner, name)
    setattr(owner, name, replacement(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _freed_early(original: Callable[..., Any]) -> Callable[..., Any]:
    def report_first_token(self: PrefillScheduler, prompt: Prompt, output: TextGenerationOutput) -> None:
        original(self, prompt, output)
        self._report_complete_blocks(prompt)
        cache = self._cache(prompt)
        cache.release(prompt.fence)
        cache.claim(prompt.fence, bytes(32))

    return report_first_token


def _never_released(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_pull_end(
        self: Attempt, error: PronghornError | None, local_room_tokens: int, may_fetch: bool = False
    ) -> list[Effect]:
        stopping = self.state is AttemptState.STOPPING
        effects: list[Effect] = original(self, error, local_room_tokens, may_fetch)
        return [] if stopping else effects

    return on_pull_end


def _late_token(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_late(self: Lifecycle, event: Event) -> bool:
        match event:
            case Produced():
                return False
            case AttemptFailed() | NodeGone():
                late: bool = original(self, event)
                return late
            case _:
                return False

    return is_late


_BUGS: dict[PlantedBug, tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    PlantedBug.FREED_EARLY: (PrefillScheduler, "_report_first_token", _freed_early),
    PlantedBug.NEVER_RELEASED: (Attempt, "on_pull_end", _never_released),
    PlantedBug.LATE_TOKEN: (Lifecycle, "_is_late", _late_token),
}
