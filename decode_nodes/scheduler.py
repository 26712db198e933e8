"""What a decode node computes next, and who holds its blocks; with `prefill_here` the aggregated server.

Continuous batching: unless configured otherwise, every step has one token of each decoding sequence and, in what is
left of the budgets, the next chunk of the oldest local prompts (`batching.py`). A sequence takes a slot and blocks for
its whole prompt and one token more, on the least loaded replica, before anything is computed for it; those that find
no room wait by priority, then in order of arrival. When a decoding sequence finds no block to grow into, the newest
running one of the least urgent of its
replica gives its blocks back and starts over, before all that came after it, with what it has said so far.

A request for several choices is one sequence until its first tokens are there. Then the others fork off it: they share
the full blocks of its prompt and copy the partial one where there is room for them, and wait for it like any other
where there is none. From there on each goes its own way; an error of one is the whole request's.

Attempts: an `Admit` of a higher attempt, or of the same attempt by another life of the node, ends the one that it
replaces with `Cancelled`; a lower attempt is refused with `Cancelled`; the same fence again is ignored.

Pure: knows neither clock nor socket nor block bytes. Invariants, seen to by `check`: sequences with a slot are at most
`max_batch_size` a replica; exactly the sequences that are not WAITING own blocks, all of one replica; every fence has
one last word.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import msgspec

from decode_nodes.sequence import STAGES, Event, Family, Sequence, State
from kvcache.block import BlockCopy, BlockId
from kvcache.hashing import BlockHasher
from kvcache.journal import CacheChange
from kvcache.prefix_cache import PrefixCache
from pipelines.runtime.attempts import Attempts
from pipelines.runtime.batching import Batcher, Policy, blocks_for
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    EndHold,
    EngineCommand,
    EngineEvent,
    EngineLoad,
    Failed,
    HoldEvent,
    ImportBlocks,
    LeaseBlocks,
    Prefill,
    PrefillHere,
    PublishBlocks,
    Release,
    Reserved,
    ResetPrefixCache,
    Stop,
    TakeStock,
    TokenDelta,
)
from pipelines.runtime.padding import Padding
from pipelines.runtime.replica import Replica, insert_by_turn, turn
from pipelines.runtime.replicas import Replicas
from pipelines.runtime.scheduler import Batch
from pipelines.types.sampled_token import SampledToken
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded, InsufficientBlocks, Overloaded, PronghornError, TransferFailed
from pronghorn.ids import Fence, RequestID
from pronghorn.ledger import Held, Kind

RETRY_AFTER_S = 1.0


class DecodeScheduler:
    def __init__(self, config: EngineConfig, caches: SequenceOf[PrefixCache], hasher: BlockHasher) -> None:
        """One cache a replica."""
        self._config = config
        self._replicas = Replicas[Sequence](config, caches, hasher)
        policy = Policy.of(config, strategy="decode_first", in_flight=True)
        self._batcher = Batcher(config, policy, self._replicas.all)
        self._padding = Padding(caches, hasher.root(None), enabled=config.device_graph_capture)
        self._arrivals = 0
        self._attempts: Attempts[Sequence] = Attempts()
        self._families: dict[RequestID, Family] = {}
        self._waiting: deque[Sequence] = deque()
        self._events: list[EngineEvent] = []
        self._ended: list[RequestID] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    def next_batch(self, now_s: float) -> Batch | None:
        for replica in self._replicas:
            self._grow(replica)
        batches = self._batcher.next()
        if not any(batches):
            self._padding.release()
            return None
        return self._padding.pad(Batch(batches=batches))

    def complete(
        self,
        batch: Batch,
        outputs: Mapping[RequestID, TextGenerationOutput],
        failures: Mapping[RequestID, PronghornError],
        now_s: float,
    ) -> None:
        for context in batch.flat_batch:
            if context._is_padding_ctx:
                continue
            sequence = self._attempts.live(context.request_id)
            if sequence is None and context.request_id in self._ended:
                continue  # another choice of its request has failed in this very step
            assert sequence is not None and sequence.context is context, f"{context.request_id} is not in this batch"
            if (error := failures.get(context.request_id)) is not None:
                self._fail(sequence, error)
                continue
            self._commit(sequence)
            if (output := outputs.get(context.request_id)) is not None:
                if sequence.state is State.PREFILLING:
                    self._apply(sequence, Event.PROMPT_DONE)
                others = self._fork(sequence, output.siblings, shared=True)
                self._deliver(sequence, output)
                for other, first_output in others:
                    self._deliver(other, first_output)
        self._admit_waiting()

    def _grow(self, replica: Replica[Sequence]) -> None:
        """See that every decoding sequence has a block for the token that it feeds."""
        cache = replica.cache
        for sequence in list(replica.decoding):
            needed_tokens = sequence.context.tokens.current_position
            while sequence.state is State.DECODING and cache.missing_blocks(sequence.fence, needed_tokens):
                if cache.can_reserve(sequence.fence, needed_tokens):
                    cache.reserve(sequence.fence, needed_tokens)
                else:
                    self._preempt(max((*replica.prompts, *replica.decoding), key=lambda running: running.order))

    def _preempt(self, sequence: Sequence) -> None:
        if self._too_long(sequence):
            self._fail(sequence, self._never_fits(sequence))
            return
        self._cache(sequence).release(sequence.fence)
        sequence.context.reset()
        sequence.prefill_here = True
        self._apply(sequence, Event.PREEMPT)
        insert_by_turn(self._waiting, sequence)

    def _deliver(self, sequence: Sequence, output: TextGenerationOutput) -> None:
        """One step's tokens of one sequence, its last where the output is done."""
        if output.is_done:
            self._end(sequence, Event.FINISH)
        self._events.append(
            TokenDelta(
                fence=sequence.said_as,
                tokens=output.tokens,
                status=output.final_status,
                num_cached_tokens=None if sequence.reported else sequence.context.cached_prefix_length,
                log_probabilities=output.log_probabilities,
                choice=sequence.choice,
                prompt_log_probabilities=output.prompt_log_probabilities,
            )
        )
        sequence.reported = True

    # --- several choices ---------------------------------------------------------------------------------------------

    def _fork(
        self, first: Sequence, siblings: SequenceOf[SampledToken], *, shared: bool
    ) -> list[tuple[Sequence, TextGenerationOutput]]:
        """The other choices of `first`, which has its first token, each with its own as its output. With `shared` the
        prompt's blocks are written."""
        if not siblings:
            return []
        first.family = Family(first.fence, [first])
        self._families[first.fence.request_id] = first.family
        return [self._fork_one(first, choice, token, shared) for choice, token in enumerate(siblings, 1)]

    def _fork_one(
        self, first: Sequence, choice: int, token: SampledToken, shared: bool
    ) -> tuple[Sequence, TextGenerationOutput]:
        assert first.family is not None and first.replica is not None
        context = first.context.sibling(choice, token)
        sequence = Sequence(
            fence=msgspec.structs.replace(first.fence, request_id=context.request_id),
            context=context,
            deadline=first.deadline,
            prefill_here=True,
            arrival=first.arrival,
            choice=choice,
            family=first.family,
            reported=True,
            since_s=first.since_s,
        )
        first.family.members.append(sequence)
        self._attempts.add(sequence)
        output = context.to_generation_output()
        prompt_tokens = context.original_prompt_length
        if (
            shared
            and not context.is_done
            and self._replicas.fork(first.replica, first.fence, sequence.fence, prompt_tokens, room_to_grow=True)
        ):
            sequence.replica = first.replica
            self._apply(sequence, Event.FORK)
        else:
            context.reset()
            insert_by_turn(self._waiting, sequence)
        return sequence, output

    def _unborn_choices(self) -> int:
        """Those that will fork off what is held, and may have to wait then."""
        return sum(s.context.num_choices - 1 for s in self._attempts if s.family is None)

    def _family_of(self, fence: Fence) -> list[Sequence]:
        """All that is held under a request's fence."""
        family = self._families.get(fence.request_id)
        if family is not None and family.fence == fence:
            return list(family.members)
        sequence = self._attempts.get(fence)
        return [] if sequence is None else [sequence]

    def _live(self, request_id: RequestID) -> Sequence | None:
        """Of the request: its first choice, or another one that still goes on."""
        if (family := self._families.get(request_id)) is not None:
            return family.members[0]
        return self._attempts.live(request_id)

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
                for sequence in self._family_of(command.fence):
                    self._end(sequence, Event.RELEASE)
            case LeaseBlocks() | ImportBlocks() | PublishBlocks() | EndHold():
                self._replicas.holds.handle(command)
            case ResetPrefixCache():
                self._replicas.reset_prefix_caches()
            case Prefill() | TakeStock() | Stop():
                raise ValueError(f"{type(command).__name__} is no command for a decode scheduler")
        self._admit_waiting()

    def sweep(self, now_s: float) -> None:
        for sequence in self._attempts:
            if sequence.state not in (State.CONDEMNED, State.GONE) and sequence.deadline.passed(now_s):
                doing = sequence.state.name.lower()
                self._fail(
                    sequence, DeadlineExceeded(f"the request's deadline passed on the decode node while {doing}")
                )
        self._admit_waiting()

    def _admit(self, command: Admit, now_s: float) -> None:
        if self._family_of(command.fence) or not self._replace_older(command.fence):
            return
        deadline = Deadline.after(now_s, command.budget_s)
        self._arrivals += 1
        sequence = Sequence(
            command.fence, command.context, deadline, command.prefill_here, self._arrivals, since_s=now_s
        )
        if self._too_long(sequence):
            self._refuse(command.fence, self._never_fits(sequence))
        elif (waiting := len(self._waiting) + self._unborn_choices()) >= self._config.max_waiting:
            text = f"{waiting} sequences wait for this decode node already (bound {self._config.max_waiting})"
            self._refuse(command.fence, Overloaded(text, retry_after_s=RETRY_AFTER_S))
        else:
            self._attempts.add(sequence)
            insert_by_turn(self._waiting, sequence)

    def _replace_older(self, fence: Fence) -> bool:
        """Make way for `fence`; False, with its refusal, where a newer attempt of the request is here already."""
        live = self._live(fence.request_id)
        if live is None:
            return True
        if fence.attempt < live.fence.attempt:
            self._refuse(fence, Cancelled(f"attempt {fence.attempt} is older than attempt {live.fence.attempt}"))
            return False
        self._fail(live, Cancelled(f"attempt {live.fence.attempt} was replaced by attempt {fence.attempt}"))
        return True

    def _admit_waiting(self) -> None:
        """Give blocks and slots to those that wait, in order, until one finds no room. A local prompt whose prefix is
        being computed for another waits for that."""
        for sequence in list(self._waiting):
            if sequence.prefill_here and self._replicas.better_waits(sequence):
                continue
            # A block for each that runs stays free: an arrival that took the last one would be preempted at once.
            replica = self._replicas.place(sequence.fence, sequence, self._needed_tokens(sequence), room_to_grow=True)
            if replica is None:
                return
            self._waiting.remove(sequence)
            sequence.replica = replica
            self._apply(sequence, Event.RESERVE_HERE if sequence.prefill_here else Event.RESERVE)
            if sequence.state is State.PULLING:
                self._events.append(self._reserved(sequence))

    def _reserved(self, sequence: Sequence) -> Reserved:
        prompt_blocks = blocks_for(len(sequence.context.tokens), self._config.block_tokens)
        cache = self._cache(sequence)
        return Reserved(
            fence=sequence.fence,
            block_ids=list[int](cache.table(sequence.fence)[:prompt_blocks]),
            cached_blocks=cache.cached_blocks(sequence.fence),
        )

    def _adopt(self, command: Adopt) -> None:
        sequence = self._attempts.get(command.fence)
        if sequence is None or sequence.state is not State.PULLING:
            return
        tokens = [SampledToken(command.token, command.log_probabilities), *command.siblings]
        if self._take_first_tokens(sequence, tokens):
            self._commit(sequence, computed_here=False)
            self._go_on_together(sequence, tokens[1:], Event.ADOPT, shared=True)

    def _prefill_here(self, command: PrefillHere) -> None:
        sequence = self._attempts.get(command.fence)
        if sequence is None or sequence.state is not State.PULLING:
            return
        if command.fetched_blocks:
            self._take_fetched(sequence, command.fetched_blocks * self._config.block_tokens)
        if command.token is None:
            self._apply(sequence, Event.PREFILL_HERE)
            return
        tokens = sequence.context.tokens
        uncomputed_tokens = tokens.active_length
        first_tokens = [SampledToken(command.token, command.log_probabilities), *command.siblings]
        if self._take_first_tokens(sequence, first_tokens):
            if not sequence.context.is_done:
                # The delivered token is computed together with the prompt, and what is sampled then is the second.
                tokens.rewind_processing(uncomputed_tokens)
            self._go_on_together(sequence, first_tokens[1:], Event.PREFILL_HERE, shared=False)

    def _take_fetched(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens behind the cached ones came from other nodes: they are hits, too, and others may have them."""
        context = sequence.context
        context.tokens.skip_processing(num_tokens)
        context.cached_prefix_length = (context.cached_prefix_length or 0) + num_tokens
        self._commit(sequence, computed_here=False)

    def _take_first_tokens(self, sequence: Sequence, sampled: SequenceOf[SampledToken]) -> bool:
        """Append the first of the tokens that the shell has delivered already. False, with the failure, where one of
        them cannot be one."""
        context = sequence.context
        for token in (each.token for each in sampled):
            if not 0 <= token < (context.vocab_size or token + 1):
                self._end(sequence, Event.RELEASE)
                text = f"token {token} is not in the vocabulary of {context.vocab_size}"
                self._refuse(sequence.fence, TransferFailed(text, code="bad_token"))
                return False
        context.update(sampled[0].token, sampled[0].log_probabilities)
        context.to_generation_output()
        return True

    def _go_on_together(
        self, first: Sequence, siblings: SequenceOf[SampledToken], event: Event, *, shared: bool
    ) -> None:
        for other, _ in self._fork(first, siblings, shared=shared):  # the shell has delivered their first tokens
            if other.context.is_done:
                self._go_on(other, Event.FINISH)
        self._go_on(first, event)

    def _go_on(self, sequence: Sequence, event: Event) -> None:
        """Run from here, or end where the first token was the last."""
        context = sequence.context
        if context.is_done:
            end = TextGenerationOutput(request_id=context.request_id, tokens=[], final_status=context.status)
            self._deliver(sequence, end)
        else:
            self._apply(sequence, event)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: PronghornError) -> None:
        """With all that belong to the same request."""
        said_as = sequence.said_as
        if sequence.state is State.PULLING:
            self._apply(sequence, Event.FAIL)
            self._attempts.retire(sequence)
            self._ended.append(sequence.fence.request_id)
        else:
            for member in [sequence] if sequence.family is None else list(sequence.family.members):
                self._end(member, Event.FAIL)
        self._refuse(said_as, error)

    def _end(self, sequence: Sequence, event: Event) -> None:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._cache(sequence).release(sequence.fence)
        if self._attempts.live(sequence.fence.request_id) is sequence:
            self._ended.append(sequence.fence.request_id)
        self._attempts.discard(sequence)
        if sequence.family is not None:
            sequence.family.members.remove(sequence)
            if not sequence.family.members:
                del self._families[sequence.family.fence.request_id]
        self._apply(sequence, event)

    def _apply(self, sequence: Sequence, event: Event) -> None:
        """Change the state, and with it the queue of its replica that the sequence stands in."""
        before = STAGES.get(sequence.state)
        sequence.apply(event)
        if sequence.replica is not None:
            sequence.replica.move(sequence, before, STAGES.get(sequence.state))
        if sequence.state is State.WAITING:
            sequence.replica = None
        elif event in (Event.RESERVE_HERE, Event.PREFILL_HERE):
            self._cache(sequence).promise(sequence.fence)

    def _refuse(self, fence: Fence, error: PronghornError) -> None:
        self._events.append(Failed(fence, error.record()))

    # --- what others ask ---------------------------------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        return bool(self._events) or self._replicas.holds.has_events

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def take_ended(self) -> list[RequestID]:
        ended, self._ended = self._ended + self._padding.take_released(), []
        return ended

    def take_hold_events(self) -> list[HoldEvent]:
        return self._replicas.holds.take_events()

    def take_cache_changes(self) -> list[CacheChange]:
        return self._replicas.take_cache_changes()

    def take_copies(self) -> list[BlockCopy]:
        return self._replicas.take_copies()

    def table(self, owner: RequestID) -> list[BlockId]:
        if self._padding.holds(owner):
            return self._padding.table(owner)
        sequence = self._attempts.live(owner)
        assert sequence is not None, f"request {owner} is not held"
        return self._cache(sequence).table(sequence.fence)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._running() > 0

    def load(self) -> EngineLoad:
        running, waiting = self._running(), len(self._waiting)
        awaiting_blocks = len(self._attempts) - running - waiting
        gauges = self._replicas.block_gauges()
        queued = sum(sequence.uncomputed_tokens for sequence in self._attempts)
        return EngineLoad(
            waiting=waiting, running=running, awaiting_blocks=awaiting_blocks, queued_tokens=queued, **gauges
        )

    def held(self, now_s: float) -> list[Held]:
        rows = [
            Held(Kind.SEQUENCE, str(sequence.said_as), age_s=now_s - sequence.since_s, note=sequence.state.name.lower())
            for sequence in self._attempts
        ]
        holders = {sequence.fence: (str(sequence.said_as), now_s - sequence.since_s) for sequence in self._attempts}
        return rows + self._replicas.blocks_held(holders)

    def check(self) -> None:
        self._replicas.check()
        self._batcher.check()
        for replica in self._replicas:
            mine = {sequence.fence for sequence in self._attempts if sequence.replica is replica}
            strangers = (self._padding.holds, self._replicas.holds.__contains__)
            owners = {owner for owner in replica.cache.owners if not any(hold(owner) for hold in strangers)}
            assert owners == mine, f"owners of blocks {owners}, sequences {mine}"
            for stage, queue in replica.queues.items():
                standing = [s for s in self._attempts if s.replica is replica and STAGES.get(s.state) is stage]
                assert set(map(id, queue)) == set(map(id, standing)) and len(queue) == len(standing)
        waiting = [sequence for sequence in self._attempts if sequence.state is State.WAITING]
        assert set(map(id, self._waiting)) == set(map(id, waiting)) and len(self._waiting) == len(waiting)
        turns = [turn(sequence) for sequence in self._waiting]
        assert turns == sorted(turns) and all(sequence.replica is None for sequence in waiting)
        members = {id(member) for family in self._families.values() for member in family.members}
        assert members == {id(sequence) for sequence in self._attempts if sequence.family is not None}

    # --- small questions ---------------------------------------------------------------------------------------------

    def _cache(self, sequence: Sequence) -> PrefixCache:
        assert sequence.replica is not None, f"{sequence.fence} holds no block"
        return sequence.replica.cache

    def _running(self) -> int:
        return sum(len(replica.prompts) + len(replica.decoding) for replica in self._replicas)

    def _needed_tokens(self, sequence: Sequence) -> int:
        return len(sequence.context.tokens) + 1

    def _too_long(self, sequence: Sequence) -> bool:
        return blocks_for(self._needed_tokens(sequence), self._config.block_tokens) > self._config.num_blocks

    def _never_fits(self, sequence: Sequence) -> InsufficientBlocks:
        needed = blocks_for(self._needed_tokens(sequence), self._config.block_tokens)
        return InsufficientBlocks(
            f"the sequence needs {needed} blocks of {self._config.block_tokens} tokens, the whole pool has "
            f"{self._config.num_blocks}; start with more blocks or send a shorter prompt"
        )

    def _commit(self, sequence: Sequence, *, computed_here: bool = True) -> None:
        tokens = sequence.context.tokens
        cache = self._cache(sequence)
        cache.commit(sequence.fence, tokens[:], tokens.processed_length, computed_here=computed_here)
