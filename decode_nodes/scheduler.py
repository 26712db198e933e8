"""What a decode node computes next, and who holds its blocks; with `prefill_here` the aggregated server.

Continuous batching: every step has one token of each decoding sequence and, in what is left of the token budget, the
next chunk of the oldest local prompts. A sequence takes a slot and blocks for its whole prompt and one token more
before anything is computed for it; those that find no room wait in order of arrival. When a decoding sequence finds
no block to grow into, the newest running one gives its blocks back and starts over later with what it has said so far.

Attempts: an `Admit` of a higher attempt, or of the same attempt by another life of the node, ends the one that it
replaces with `Cancelled`; a lower attempt is refused with `Cancelled`; the same fence again is ignored.

Pure: knows neither clock nor socket nor block bytes. Invariants, seen to by `check`: sequences with a slot are at most
`max_batch_size`; exactly the sequences that are not WAITING own blocks; every fence has one last word.
"""

from collections import deque
from collections.abc import Mapping

from decode_nodes.sequence import RUNNING, Event, Sequence, State
from kvcache.block import BlockId
from kvcache.hashing import BlockHasher
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.attempts import Attempts
from pipelines.runtime.batching import StepBudget, blocks_for
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    EngineCommand,
    EngineEvent,
    EngineLoad,
    Failed,
    Prefill,
    PrefillHere,
    Release,
    Reserved,
    ResetPrefixCache,
    Stop,
    TokenDelta,
)
from pipelines.runtime.reservation import reserve_prompt
from pipelines.runtime.scheduler import Batch
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded, InsufficientBlocks, Overloaded, PronghornError, TransferFailed
from pronghorn.ids import Fence, RequestID

RETRY_AFTER_S = 1.0


class DecodeScheduler:
    def __init__(self, config: EngineConfig, cache: PrefixCache, hasher: BlockHasher) -> None:
        self._config = config
        self._cache = cache
        self._hasher = hasher
        self._attempts: Attempts[Sequence] = Attempts()
        self._waiting: deque[Sequence] = deque()
        self._events: list[EngineEvent] = []
        self._ended: list[RequestID] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    def next_batch(self, now_s: float) -> Batch | None:
        self._grow()
        budget = StepBudget(self._config.max_batch_input_tokens)
        decoding = [s.context for s in self._in(State.DECODING) if budget.take(s.context)]
        prefilling = [s.context for s in self._in(State.PREFILLING) if budget.take(s.context)]
        return Batch(batches=[decoding + prefilling]) if decoding or prefilling else None

    def complete(
        self,
        batch: Batch,
        outputs: Mapping[RequestID, TextGenerationOutput],
        failures: Mapping[RequestID, PronghornError],
        now_s: float,
    ) -> None:
        for context in batch.flat_batch:
            sequence = self._attempts.live(context.request_id)
            assert sequence is not None and sequence.context is context, f"{context.request_id} is not in this batch"
            if (error := failures.get(context.request_id)) is not None:
                self._fail(sequence, error)
                continue
            self._commit(sequence)
            if (output := outputs.get(context.request_id)) is not None:
                if sequence.state is State.PREFILLING:
                    sequence.apply(Event.PROMPT_DONE)
                self._deliver(sequence, output)
        self._admit_waiting()

    def _grow(self) -> None:
        """See that every decoding sequence has a block for the token that it feeds, oldest first."""
        for sequence in self._in(State.DECODING):
            while sequence.state is State.DECODING:
                needed_tokens = sequence.context.tokens.current_position
                if self._cache.can_reserve(sequence.fence, needed_tokens):
                    self._cache.reserve(sequence.fence, needed_tokens)
                    break
                self._preempt(self._in(*RUNNING)[-1])

    def _preempt(self, sequence: Sequence) -> None:
        if self._too_long(sequence):
            self._fail(sequence, self._never_fits(sequence))
            return
        self._cache.release(sequence.fence)
        sequence.context.reset()
        sequence.prefill_here = True
        sequence.apply(Event.PREEMPT)
        self._waiting.appendleft(sequence)

    def _deliver(self, sequence: Sequence, output: TextGenerationOutput) -> None:
        """One step's tokens of one sequence, its last where the output is done."""
        if output.is_done:
            self._end(sequence, Event.FINISH)
        self._events.append(
            TokenDelta(
                fence=sequence.fence,
                tokens=output.tokens,
                status=output.final_status,
                num_cached_tokens=None if sequence.reported else sequence.context.cached_prefix_length,
                log_probabilities=output.log_probabilities,
            )
        )
        sequence.reported = True

    # --- commands ----------------------------------------------------------------------------------------------------

    def handle(self, command: EngineCommand, now_s: float) -> None:
        match command:
            case Admit():
                self._admit(command, now_s)
            case Adopt():
                self._adopt(command)
            case PrefillHere():
                self._prefill_here(command)
            case Release():
                if (sequence := self._attempts.get(command.fence)) is not None:
                    self._end(sequence, Event.RELEASE)
            case ResetPrefixCache():
                self._cache.reset()
            case Prefill() | Stop():
                raise ValueError(f"{type(command).__name__} is no command for a decode scheduler")
        self._admit_waiting()

    def sweep(self, now_s: float) -> None:
        for sequence in self._attempts:
            if sequence.state is not State.CONDEMNED and sequence.deadline.passed(now_s):
                doing = sequence.state.name.lower()
                self._fail(
                    sequence, DeadlineExceeded(f"the request's deadline passed on the decode node while {doing}")
                )
        self._admit_waiting()

    def _admit(self, command: Admit, now_s: float) -> None:
        if self._attempts.get(command.fence) is not None or not self._replace_older(command.fence):
            return
        deadline = Deadline.after(now_s, command.budget_s)
        sequence = Sequence(command.fence, command.context, deadline, command.prefill_here)
        if self._too_long(sequence):
            self._refuse(command.fence, self._never_fits(sequence))
        elif len(self._waiting) >= self._config.max_waiting:
            waiting = (
                f"{len(self._waiting)} requests wait for this decode node already (bound {self._config.max_waiting})"
            )
            self._refuse(command.fence, Overloaded(waiting, retry_after_s=RETRY_AFTER_S))
        else:
            self._attempts.add(sequence)
            self._waiting.append(sequence)

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
        while self._waiting and (slots := self._slots()) < self._config.max_batch_size:
            sequence = self._waiting[0]
            # A block for each that runs stays free: an arrival that took the last one would be preempted at once.
            room = reserve_prompt(
                self._cache, self._hasher, sequence.fence, sequence.context, self._needed_tokens(sequence), slots
            )
            if not room:
                return
            self._waiting.popleft()
            sequence.apply(Event.RESERVE_HERE if sequence.prefill_here else Event.RESERVE)
            if sequence.state is State.PULLING:
                self._events.append(self._reserved(sequence))

    def _reserved(self, sequence: Sequence) -> Reserved:
        prompt_blocks = blocks_for(len(sequence.context.tokens), self._config.block_tokens)
        return Reserved(
            fence=sequence.fence,
            block_ids=list[int](self._cache.table(sequence.fence)[:prompt_blocks]),
            cached_blocks=self._cache.cached_blocks(sequence.fence),
        )

    def _adopt(self, command: Adopt) -> None:
        sequence = self._attempts.get(command.fence)
        if sequence is None or sequence.state is not State.PULLING:
            return
        if self._take_first_token(sequence, command.token, command.log_probabilities):
            self._commit(sequence)
            self._go_on(sequence, Event.ADOPT)

    def _prefill_here(self, command: PrefillHere) -> None:
        sequence = self._attempts.get(command.fence)
        if sequence is None or sequence.state is not State.PULLING:
            return
        if command.token is None:
            sequence.apply(Event.PREFILL_HERE)
            return
        tokens = sequence.context.tokens
        uncomputed_tokens = tokens.active_length
        if self._take_first_token(sequence, command.token, command.log_probabilities):
            if not sequence.context.is_done:
                # The delivered token is computed together with the prompt, and what is sampled then is the second.
                tokens.rewind_processing(uncomputed_tokens)
            self._go_on(sequence, Event.PREFILL_HERE)

    def _take_first_token(self, sequence: Sequence, token: int, log_probabilities: LogProbabilities | None) -> bool:
        """Append a token that the shell has delivered already. False, with the failure, where it cannot be one."""
        context = sequence.context
        if not 0 <= token < (context.vocab_size or token + 1):
            self._end(sequence, Event.RELEASE)
            error = TransferFailed(f"token {token} is not in the vocabulary of {context.vocab_size}", code="bad_token")
            self._refuse(sequence.fence, error)
            return False
        context.update(token, log_probabilities)
        context.to_generation_output()
        return True

    def _go_on(self, sequence: Sequence, event: Event) -> None:
        """Run from here, or end where the first token was the last."""
        context = sequence.context
        if context.is_done:
            end = TextGenerationOutput(request_id=context.request_id, tokens=[], final_status=context.status)
            self._deliver(sequence, end)
        else:
            sequence.apply(event)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: PronghornError) -> None:
        if sequence.state is State.PULLING:
            sequence.apply(Event.FAIL)
            self._attempts.retire(sequence)
            self._ended.append(sequence.fence.request_id)
        else:
            self._end(sequence, Event.FAIL)
        self._refuse(sequence.fence, error)

    def _end(self, sequence: Sequence, event: Event) -> None:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._cache.release(sequence.fence)
        if self._attempts.live(sequence.fence.request_id) is sequence:
            self._ended.append(sequence.fence.request_id)
        self._attempts.discard(sequence)
        sequence.apply(event)

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
        sequence = self._attempts.live(owner)
        assert sequence is not None, f"request {owner} is not held"
        return self._cache.table(sequence.fence)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(sequence.state in RUNNING for sequence in self._attempts)

    def load(self) -> EngineLoad:
        pool = self._cache.stats()
        return EngineLoad(
            total_blocks=pool.total,
            free_blocks=pool.free,
            held_blocks=pool.held,
            cached_blocks=pool.cached,
            waiting=len(self._waiting),
            running=len(self._in(*RUNNING)),
            awaiting_blocks=len(self._in(State.PULLING, State.CONDEMNED)),
        )

    def check(self) -> None:
        self._cache.check()
        held = {sequence.fence for sequence in self._attempts if sequence.state is not State.WAITING}
        assert set(self._cache.owners) == held, f"owners of blocks {set(self._cache.owners)}, sequences {held}"
        assert list(self._waiting) == self._in(State.WAITING)
        assert self._slots() <= self._config.max_batch_size

    # --- small questions ---------------------------------------------------------------------------------------------

    def _in(self, *states: State) -> list[Sequence]:
        """Sequences in one of `states`, in order of arrival."""
        return [sequence for sequence in self._attempts if sequence.state in states]

    def _slots(self) -> int:
        return len(self._in(State.PULLING, *RUNNING))

    def _needed_tokens(self, sequence: Sequence) -> int:
        return len(sequence.context.tokens) + 1

    def _too_long(self, sequence: Sequence) -> bool:
        return blocks_for(self._needed_tokens(sequence), self._config.block_tokens) > self._cache.stats().total

    def _never_fits(self, sequence: Sequence) -> InsufficientBlocks:
        needed = blocks_for(self._needed_tokens(sequence), self._config.block_tokens)
        return InsufficientBlocks(
            f"the sequence needs {needed} blocks of {self._config.block_tokens} tokens, the whole pool has "
            f"{self._cache.stats().total}; start with more blocks or send a shorter prompt"
        )

    def _commit(self, sequence: Sequence) -> None:
        tokens = sequence.context.tokens
        self._cache.commit(sequence.fence, tokens[:], tokens.processed_length)
