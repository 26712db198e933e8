"""What a prefill node computes next, and who holds its blocks.

Prompts are taken in order of arrival, each with blocks for all of it; a step computes the next chunk of the oldest
ones, as many as the token budget holds. Wanted blocks are reported as soon as they are complete, those that the prefix
cache holds at once; the first token is reported the moment it is sampled, before the last blocks. Blocks stay held
until `Release`, whatever happens.

Attempts: a `Prefill` of the same or a higher attempt under another fence ends the one that it replaces with
`Cancelled`; a lower attempt is refused with `Cancelled`; the same fence again is ignored.

Pure: knows neither clock nor socket nor block bytes. Invariants, seen to by `check`: exactly the prompts that are not
WAITING own blocks; prompts that are computed are at most `max_batch_size`.
"""

from collections import deque
from collections.abc import Mapping

from kvcache.block import BlockId
from kvcache.hashing import BlockHasher
from kvcache.prefix_cache import PrefixCache
from pipelines.node.prefill_request import check_wanted
from pipelines.runtime.attempts import Attempts
from pipelines.runtime.batching import StepBudget, blocks_for
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    ChunkReady,
    EngineCommand,
    EngineEvent,
    EngineLoad,
    Failed,
    FirstToken,
    Prefill,
    PrefillHere,
    Release,
    ResetPrefixCache,
    Stop,
)
from pipelines.runtime.reservation import reserve_prompt
from pipelines.runtime.scheduler import Batch
from pipelines.types.text_output import TextGenerationOutput
from prefill_nodes.prompt import Event, Prompt, State
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded, InsufficientBlocks, InvalidRequest, Overloaded, PronghornError
from pronghorn.ids import Fence, RequestID

RETRY_AFTER_S = 1.0


class PrefillScheduler:
    def __init__(self, config: EngineConfig, cache: PrefixCache, hasher: BlockHasher) -> None:
        self._config = config
        self._cache = cache
        self._hasher = hasher
        self._attempts: Attempts[Prompt] = Attempts()
        self._waiting: deque[Prompt] = deque()
        self._events: list[EngineEvent] = []
        self._ended: list[RequestID] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    def next_batch(self, now_s: float) -> Batch | None:
        budget = StepBudget(self._config.max_batch_input_tokens)
        contexts = [prompt.context for prompt in self._in(State.COMPUTING) if budget.take(prompt.context)]
        return Batch(batches=[contexts]) if contexts else None

    def complete(
        self,
        batch: Batch,
        outputs: Mapping[RequestID, TextGenerationOutput],
        failures: Mapping[RequestID, PronghornError],
        now_s: float,
    ) -> None:
        for context in batch.flat_batch:
            prompt = self._attempts.live(context.request_id)
            assert prompt is not None and prompt.context is context, f"{context.request_id} is not in this batch"
            if (error := failures.get(context.request_id)) is not None:
                self._fail(prompt, error)
                continue
            self._cache.commit(prompt.fence, context.tokens[:], context.tokens.processed_length)
            if (output := outputs.get(context.request_id)) is not None:
                self._report_first_token(prompt, output)
            self._report_complete_blocks(prompt)
        self._admit_waiting()

    def _report_first_token(self, prompt: Prompt, output: TextGenerationOutput) -> None:
        prompt.apply(Event.FIRST_TOKEN)
        log_probabilities = output.log_probabilities[0] if output.log_probabilities else None
        self._events.append(FirstToken(prompt.fence, output.tokens[0], log_probabilities))

    def _report_complete_blocks(self, prompt: Prompt) -> None:
        if positions := prompt.take_complete(self._config.block_tokens):
            table = self._cache.table(prompt.fence)
            self._events.append(ChunkReady(prompt.fence, positions, [table[position] for position in positions]))
            prompt.read = True

    # --- commands ----------------------------------------------------------------------------------------------------

    def handle(self, command: EngineCommand, now_s: float) -> None:
        match command:
            case Prefill():
                self._take(command, now_s)
            case Release():
                if (prompt := self._attempts.get(command.fence)) is not None:
                    self._end(prompt, Event.RELEASE)
            case ResetPrefixCache():
                self._cache.reset()
            case Admit() | Adopt() | PrefillHere() | Stop():
                raise ValueError(f"{type(command).__name__} is no command for a prefill scheduler")
        self._admit_waiting()

    def sweep(self, now_s: float) -> None:
        for prompt in self._attempts:
            if prompt.state is not State.CONDEMNED and prompt.deadline.passed(now_s):
                doing = prompt.state.name.lower()
                self._fail(prompt, DeadlineExceeded(f"the request's deadline passed on the prefill node while {doing}"))
        self._admit_waiting()

    def _take(self, command: Prefill, now_s: float) -> None:
        if self._attempts.get(command.fence) is not None or not self._replace_older(command.fence):
            return
        # The decode node's own window, behind what it has cached, says nothing about what is cached here.
        command.context.reset()
        command.context.cached_prefix_length = None
        deadline = Deadline.after(now_s, command.budget_s)
        prompt = Prompt(command.fence, command.context, deadline, list(command.wanted))
        if (refusal := self._refusal(prompt)) is not None:
            self._refuse(prompt.fence, refusal)
        else:
            self._attempts.add(prompt)
            self._waiting.append(prompt)

    def _refusal(self, prompt: Prompt) -> PronghornError | None:
        needed, total = self._blocks(prompt), self._cache.stats().total
        if needed > total:
            return InsufficientBlocks(
                f"the prompt needs {needed} blocks of {self._config.block_tokens} tokens, the whole pool has {total}; "
                f"start with more blocks or send a shorter prompt"
            )
        try:
            check_wanted(prompt.wanted, needed)
        except InvalidRequest as error:
            return error
        if len(self._waiting) >= self._config.max_waiting:
            bound = self._config.max_waiting
            return Overloaded(
                f"{len(self._waiting)} prompts wait for this prefill node already (bound {bound})",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def _replace_older(self, fence: Fence) -> bool:
        """Make way for `fence`; False, with its refusal, where a newer attempt of the request is here already."""
        live = self._attempts.live(fence.request_id)
        if live is None:
            return True
        if fence.attempt < live.fence.attempt:
            self._refuse(fence, Cancelled(f"attempt {fence.attempt} is older than attempt {live.fence.attempt}"))
            return False
        self._fail(live, Cancelled(f"attempt {live.fence.attempt} was replaced by attempt {fence.attempt}"))
        return True

    def _admit_waiting(self) -> None:
        """Give blocks and slots to those that wait, in order, until one finds no room."""
        while self._waiting and len(self._in(State.COMPUTING)) < self._config.max_batch_size:
            prompt = self._waiting[0]
            room = reserve_prompt(
                self._cache, self._hasher, prompt.fence, prompt.context, prompt.prompt_tokens, spare_blocks=0
            )
            if not room:
                return
            self._waiting.popleft()
            prompt.apply(Event.RESERVE)
            self._report_complete_blocks(prompt)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, prompt: Prompt, error: PronghornError) -> None:
        if prompt.read:
            self._leave(prompt)
            self._attempts.retire(prompt)
            prompt.apply(Event.CONDEMN)
        else:
            self._end(prompt, Event.FAIL)
        self._refuse(prompt.fence, error)

    def _end(self, prompt: Prompt, event: Event) -> None:
        self._leave(prompt)
        if prompt.state is not State.WAITING:
            self._cache.release(prompt.fence)
        self._attempts.discard(prompt)

    def _leave(self, prompt: Prompt) -> None:
        """`prompt` takes part in nothing any more, whoever may still be reading its blocks."""
        if prompt.state is State.WAITING:
            self._waiting.remove(prompt)
        if self._attempts.live(prompt.fence.request_id) is prompt:
            self._ended.append(prompt.fence.request_id)

    def _refuse(self, fence: Fence, error: PronghornError) -> None:
        self._events.append(Failed(fence, error.record()))

    # --- what others ask ---------------------------------------------------------------------------------------------

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def take_ended(self) -> list[RequestID]:
        ended, self._ended = self._ended, []
        return ended

    def table(self, owner: RequestID) -> list[BlockId]:
        prompt = self._attempts.live(owner)
        assert prompt is not None, f"request {owner} is not held"
        return self._cache.table(prompt.fence)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or bool(self._in(State.COMPUTING))

    def load(self) -> EngineLoad:
        pool = self._cache.stats()
        return EngineLoad(
            total_blocks=pool.total,
            free_blocks=pool.free,
            held_blocks=pool.held,
            cached_blocks=pool.cached,
            waiting=len(self._waiting),
            running=len(self._in(State.COMPUTING)),
            awaiting_blocks=len(self._in(State.SERVING, State.CONDEMNED)),
        )

    def check(self) -> None:
        self._cache.check()
        held = {prompt.fence for prompt in self._attempts if prompt.state is not State.WAITING}
        assert set(self._cache.owners) == held, f"owners of blocks {set(self._cache.owners)}, prompts {held}"
        assert list(self._waiting) == self._in(State.WAITING)
        assert len(self._in(State.COMPUTING)) <= self._config.max_batch_size

    # --- small questions ---------------------------------------------------------------------------------------------

    def _in(self, *states: State) -> list[Prompt]:
        """Prompts in one of `states`, in order of arrival."""
        return [prompt for prompt in self._attempts if prompt.state in states]

    def _blocks(self, prompt: Prompt) -> int:
        return blocks_for(prompt.prompt_tokens, self._config.block_tokens)
