"""One attempt at a request on its decode node, from the orchestrator's Submit to the last word.

Pure: what happens comes in as calls, what to do goes out as effects, in order. Knows neither engine nor stream.

    (begin, where others may have the prompt's beginning) --> BRINGING --brought--> RUNNING; cancelled --> ENDED
    RESERVING --reserved--> PULLING --committed--> RUNNING --done, failed, cancelled--> ENDED
        |                    |   |                    ^
        |                    |   +--no target left----+  (the prompt is computed here, where there is room for that)
        |                    |   '--no target left--> FETCHING --fetched--> RUNNING  (where others may have some of it)
        |                    +--failed, cancelled--> STOPPING --the pull has ended--> ENDED
        +--failed, cancelled--> ENDED

Invariants. Blocks are handed back (Release, PrefillHere, Adopt) only once nothing is writing them: from PULLING that is
after `on_pull_end`, from FETCHING after `on_fetched`, which is why STOPPING exists. The first token is delivered once,
whoever computes it again. At most one last word is said, and nothing after it. Where engines of `POISONOUS_DEATHS`
nodes have died under the request, no further one is asked to compute it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from pipelines.runtime.messages import Admit, Adopt, EngineCommand, Failed, PrefillHere, Release, Reserved, TokenDelta
from pipelines.types.frames import POISONOUS_DEATHS, Delta, PrefillTarget, Submit
from pipelines.types.handover import FirstToken
from pipelines.types.sampled_token import SampledToken
from pipelines.types.status import GenerationStatus
from pronghorn.deadline import Deadline
from pronghorn.errors import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    EngineDied,
    ErrorRecord,
    NoPrefill,
    Overloaded,
    PoisonRequest,
    PronghornError,
    TransferFailed,
)
from pronghorn.ids import NodeName


class AttemptState(enum.Enum):
    BRINGING = "getting the beginning of its prompt from elsewhere"
    RESERVING = "waiting for blocks"
    PULLING = "pulling its blocks"
    FETCHING = "getting its blocks from elsewhere"
    STOPPING = "ending what writes its blocks"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.BRINGING: frozenset({AttemptState.RUNNING, AttemptState.ENDED}),
    AttemptState.RESERVING: frozenset(
        {AttemptState.BRINGING, AttemptState.PULLING, AttemptState.RUNNING, AttemptState.ENDED}
    ),
    AttemptState.PULLING: frozenset(
        {AttemptState.FETCHING, AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED}
    ),
    AttemptState.FETCHING: frozenset({AttemptState.RUNNING, AttemptState.STOPPING}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """Send this to the engine. Where it is refused, call `cancel` with the refusal."""

    command: EngineCommand


@dataclass(frozen=True)
class StartPull:
    """Ask `target` for the blocks at these positions, into these blocks; end with `on_pull_end`, once."""

    target: PrefillTarget
    block_ids: dict[int, int]
    """By position in the prompt."""


@dataclass(frozen=True)
class StartBringing:
    """Get what others have of the prompt's beginning into the pool; end with `on_brought`, once."""


@dataclass(frozen=True)
class StopBringing:
    """Cancel it; `on_brought` need not come any more."""


@dataclass(frozen=True)
class StartFetch:
    """Get what others have of the prompt's blocks into these; end with `on_fetched`, once."""

    block_ids: dict[int, int]
    """By position in the prompt, without a gap."""
    failed: tuple[NodeName, ...]
    """Prefill nodes that need not be asked."""


@dataclass(frozen=True)
class StopFetch:
    """Cancel it; `on_fetched` still comes."""


@dataclass(frozen=True)
class StopPull:
    """Cancel the pull; `on_pull_end` still comes."""


@dataclass(frozen=True)
class Say:
    delta: Delta


@dataclass(frozen=True)
class SayFailure:
    error: ErrorRecord


Effect = Tell | StartBringing | StopBringing | StartPull | StopPull | StartFetch | StopFetch | Say | SayFailure


class Attempt:
    def __init__(self, submit: Submit, deadline: Deadline, block_tokens: int) -> None:
        self.fence = submit.fence
        self.key = submit.key
        self.context = submit.context
        self.deadline = deadline
        self.state = AttemptState.RESERVING
        self._targets = submit.prefill
        self._only_these = submit.only_these
        self._block_tokens = block_tokens
        self._next_target = 0
        self._block_ids: dict[int, int] = {}
        self._cached_tokens = 0
        self._first: FirstToken | None = None
        self._open_choices = submit.context.num_choices
        self._deaths = submit.deaths
        self._computing_here = False
        self._fetched_bytes: Mapping[str, int] = {}
        """That the orchestrator has not been told of yet, by source."""

    @property
    def local_prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed here."""
        return len(self.context.tokens) - self._cached_tokens if self._computing_here else 0

    def begin(self, budget_s: float, may_bring: bool = False) -> list[Effect]:
        """`may_bring`: others may have the beginning of the prompt, should it be computed here."""
        prefill_here = self._computing_here = not self._targets
        if prefill_here and may_bring:
            self._move(AttemptState.BRINGING)
            return [StartBringing()]
        if prefill_here:
            self._move(AttemptState.RUNNING)
        return [Tell(Admit(self.fence, self.context, budget_s, prefill_here))]

    def on_brought(self, budget_s: float, size_bytes: Mapping[str, int] | None = None) -> list[Effect]:
        """What could be brought is in the pool, and held there until these effects are done: so much, by source."""
        if self.state is not AttemptState.BRINGING:
            return []
        self._fetched_bytes = size_bytes or {}
        self._move(AttemptState.RUNNING)
        return [Tell(Admit(self.fence, self.context, budget_s, prefill_here=True))]

    # --- from the engine ----------------------------------------------------------------------------------------------

    def on_reserved(self, reserved: Reserved) -> list[Effect]:
        if self.state is not AttemptState.RESERVING:
            return []
        wanted = range(reserved.cached_blocks, len(reserved.block_ids))
        assert wanted, f"{self.fence}: the prompt's last token is never cached, so that a block is always missing"
        self._block_ids = {position: reserved.block_ids[position] for position in wanted}
        self._cached_tokens = reserved.cached_blocks * self._block_tokens
        self._move(AttemptState.PULLING)
        return [self._start_pull()]

    def on_tokens(self, event: TokenDelta) -> list[Effect]:
        if self.state is not AttemptState.RUNNING:
            return []
        self._computing_here = False
        delta = Delta(
            fence=event.fence,
            tokens=event.tokens,
            status=event.status,
            num_cached_tokens=event.num_cached_tokens,
            log_probabilities=event.log_probabilities,
            choice=event.choice,
            prompt_log_probabilities=event.prompt_log_probabilities,
            fetched_bytes=self._take_fetched_bytes(),
        )
        if event.status.is_done:
            self._open_choices -= 1
            if self._open_choices:
                return [Say(replace(delta, status=GenerationStatus.ACTIVE, choice_status=event.status))]
            self._move(AttemptState.ENDED)
        return [Say(delta)]

    def on_failed(self, event: Failed) -> list[Effect]:
        return self._cancel(event.error)

    # --- from the pull ------------------------------------------------------------------------------------------------

    def on_first_token(self, token: FirstToken) -> list[Effect]:
        """Raises TransferFailed, for the pull to end with, unless each choice has one."""
        if self.state is not AttemptState.PULLING or self._first is not None:
            return []
        if len(token.siblings) != self.context.num_choices - 1:
            text = f"{1 + len(token.siblings)} first tokens came for {self.context.num_choices} choices"
            raise TransferFailed(text, code="incomplete")
        self._first = token
        # A hit on either node: not handed over, or not computed.
        self._cached_tokens = max(self._cached_tokens, token.num_cached_tokens)
        self._fetched_bytes = token.fetched_bytes
        return [self._say_first(0, token), *(self._say_first(i, each) for i, each in enumerate(token.siblings, 1))]

    def _say_first(self, choice: int, token: FirstToken | SampledToken) -> Say:
        return Say(
            Delta(
                self.fence,
                [token.token],
                num_cached_tokens=self._cached_tokens if choice == 0 else None,
                log_probabilities=None if token.log_probabilities is None else [token.log_probabilities],
                choice=choice,
                prompt_log_probabilities=token.prompt_log_probabilities if isinstance(token, FirstToken) else None,
                fetched_bytes=self._take_fetched_bytes(),
            )
        )

    def _take_fetched_bytes(self) -> dict[str, int]:
        taken, self._fetched_bytes = dict(self._fetched_bytes), {}
        return taken

    def on_pull_end(
        self, error: PronghornError | None, local_room_tokens: int, may_fetch: bool = False
    ) -> list[Effect]:
        """The pull is over and writes no more; None: every wanted block is there and the first token was told.
        `local_room_tokens` is what this node would compute itself; `may_fetch`: others may have some of the blocks."""
        if self.state is AttemptState.STOPPING:
            self._move(AttemptState.ENDED)
            return [Tell(Release(self.fence))]
        assert self.state is AttemptState.PULLING, f"{self.fence}: a pull ended while {self.state.value}"
        if error is None:
            assert self._first is not None, f"{self.fence}: a pull committed without a first token"
            self._move(AttemptState.RUNNING)
            first = self._first
            return [Tell(Adopt(self.fence, first.token, first.log_probabilities, first.siblings))]
        self._deaths += isinstance(error, EngineDied)
        if self._deaths >= POISONOUS_DEATHS:
            return self._give_up(PoisonRequest(f"{self._deaths} nodes have died under the request: {error.message}"))
        if self._next_target < len(self._targets):
            return [self._start_pull()]
        if self._only_these:
            return self._give_up(_of_its_prefill(error))
        return self._prefill_here(error, local_room_tokens, may_fetch)

    def _prefill_here(self, error: PronghornError, room_tokens: int, may_fetch: bool) -> list[Effect]:
        needed_tokens = len(self.context.tokens) - self._cached_tokens
        if needed_tokens > room_tokens:
            full = f"room to compute {room_tokens} prompt tokens in their stead, and the request needs {needed_tokens}"
            return self._give_up(NoPrefill(f"every prefill node failed ({error.message}), and here is {full}"))
        self._computing_here = True
        if not may_fetch:
            return self._compute(0)
        self._move(AttemptState.FETCHING)
        return [StartFetch(self._block_ids, tuple(target.name for target in self._targets))]

    def on_fetched(self, blocks: int, size_bytes: Mapping[str, int] | None = None) -> list[Effect]:
        """So many of the first of the blocks are there, whole and verified; the others are not written any more.
        `size_bytes`: what came, by source."""
        if self.state is AttemptState.STOPPING:
            self._move(AttemptState.ENDED)
            return [Tell(Release(self.fence))]
        assert self.state is AttemptState.FETCHING, f"{self.fence}: a fetch ended while {self.state.value}"
        self._cached_tokens += blocks * self._block_tokens
        self._fetched_bytes = size_bytes or {}
        return self._compute(blocks)

    def _compute(self, fetched_blocks: int) -> list[Effect]:
        self._move(AttemptState.RUNNING)
        if (first := self._first) is None:
            return [Tell(PrefillHere(self.fence, fetched_blocks=fetched_blocks))]
        return [Tell(PrefillHere(self.fence, first.token, first.log_probabilities, first.siblings, fetched_blocks))]

    def _give_up(self, error: PronghornError) -> list[Effect]:
        self._move(AttemptState.ENDED)
        return [Tell(Release(self.fence)), SayFailure(error.record())]

    # --- from elsewhere -----------------------------------------------------------------------------------------------

    def cancel(self, error: PronghornError | None) -> list[Effect]:
        """End it; with `error` as its last word, or with none where nobody listens any more."""
        return self._cancel(None if error is None else error.record())

    def _cancel(self, error: ErrorRecord | None) -> list[Effect]:
        if self.state in (AttemptState.STOPPING, AttemptState.ENDED):
            return []
        last_word: list[Effect] = [] if error is None else [SayFailure(error)]
        if self.state in (AttemptState.PULLING, AttemptState.FETCHING):
            stop = StopPull() if self.state is AttemptState.PULLING else StopFetch()
            self._move(AttemptState.STOPPING)
            return [stop, *last_word]
        bringing = self.state is AttemptState.BRINGING
        self._move(AttemptState.ENDED)
        return [StopBringing() if bringing else Tell(Release(self.fence)), *last_word]

    def _start_pull(self) -> StartPull:
        target = self._targets[self._next_target]
        self._next_target += 1
        return StartPull(target, self._block_ids)

    def _move(self, state: AttemptState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.fence}: {self.state} -> {state}"
        self.state = state


def _of_its_prefill(error: PronghornError) -> PronghornError:
    """As the attempt's last word: said of this node it would count as its own death, and against its breaker."""
    if isinstance(error, ClientError | Overloaded | DeadlineExceeded | Cancelled):
        return error
    return NoPrefill(f"the only prefill node that may serve it failed: {error.message}", code=error.code)
