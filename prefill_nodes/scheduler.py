"""What a prefill node computes next, and who holds its blocks.

Prompts are taken by priority, then in order of arrival, each with blocks for all of it on the least loaded replica; a
step computes the next chunk of the first ones, as many as the budgets hold (`batching.py`). Wanted blocks are reported
as soon as they are complete, those that the prefix cache holds at once; the first token is reported the moment it is
sampled, before the last blocks. Blocks stay held until `Release`, whatever happens.

Attempts: a `Prefill` of the same or a higher attempt under another fence ends the one that it replaces with
`Cancelled`; a lower attempt is refused with `Cancelled`; the same fence again is ignored.

Pure: knows neither clock nor socket nor block bytes. Invariants, seen to by `check`: exactly the prompts that are not
WAITING own blocks, all of one replica; prompts that are computed are at most `max_batch_size` a replica.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from kvcache.block import BlockCopy, BlockId
from kvcache.hashing import BlockHasher
from kvcache.journal import CacheChange
from kvcache.prefix_cache import PrefixCache
from pipelines.node.prefill_request import check_wanted
from pipelines.runtime.attempts import Attempts
from pipelines.runtime.batching import Batcher, Policy, blocks_for
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    ChunkReady,
    EndHold,
    EngineCommand,
    EngineEvent,
    EngineLoad,
    Failed,
    FirstToken,
    HoldEvent,
    ImportBlocks,
    LeaseBlocks,
    Prefill,
    PrefillHere,
    PublishBlocks,
    Release,
    ResetPrefixCache,
    Stop,
    TakeStock,
)
from pipelines.runtime.replica import insert_by_turn, turn
from pipelines.runtime.replicas import Replicas
from pipelines.runtime.scheduler import Batch
from pipelines.types.text_output import TextGenerationOutput
from prefill_nodes.prompt import STAGES, Event, Prompt, State
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded, InsufficientBlocks, InvalidRequest, Overloaded, PronghornError
from pronghorn.ids import Fence, RequestID
from pronghorn.ledger import Held, Kind

RETRY_AFTER_S = 1.0


class PrefillScheduler:
    def __init__(self, config: EngineConfig, caches: Sequence[PrefixCache], hasher: BlockHasher) -> None:
        """One cache a replica."""
        self._config = config
        self._replicas = Replicas[Prompt](config, caches, hasher)
        policy = Policy.of(config, strategy="prefill_first", in_flight=False)
        self._batcher = Batcher(config, policy, self._replicas.all)
        self._arrivals = 0
        self._attempts: Attempts[Prompt] = Attempts()
        self._waiting: deque[Prompt] = deque()
        self._events: list[EngineEvent] = []
        self._ended: list[RequestID] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    def next_batch(self, now_s: float) -> Batch | None:
        batches = self._batcher.next()
        return Batch(batches=batches) if any(batches) else None

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
            self._cache(prompt).commit(prompt.fence, context.tokens[:], context.tokens.processed_length)
            if (output := outputs.get(context.request_id)) is not None:
                self._report_first_token(prompt, output)
            self._report_complete_blocks(prompt)
        self._admit_waiting()

    def _report_first_token(self, prompt: Prompt, output: TextGenerationOutput) -> None:
        self._apply(prompt, Event.FIRST_TOKEN)
        log_probabilities = output.log_probabilities[0] if output.log_probabilities else None
        self._events.append(
            FirstToken(
                fence=prompt.fence,
                token=output.tokens[0],
                log_probabilities=log_probabilities,
                siblings=output.siblings,
                prompt_log_probabilities=output.prompt_log_probabilities,
                num_cached_tokens=prompt.context.cached_prefix_length or 0,
            )
        )

    def _report_complete_blocks(self, prompt: Prompt) -> None:
        if positions := prompt.take_complete(self._config.block_tokens):
            table = self._cache(prompt).table(prompt.fence)
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
            case LeaseBlocks() | ImportBlocks() | PublishBlocks() | EndHold():
                self._replicas.holds.handle(command)
            case ResetPrefixCache():
                self._replicas.reset_prefix_caches()
            case Admit() | Adopt() | PrefillHere() | TakeStock() | Stop():
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
        self._arrivals += 1
        prompt = Prompt(command.fence, command.context, deadline, list(command.wanted), self._arrivals, since_s=now_s)
        if (refusal := self._refusal(prompt)) is not None:
            self._refuse(prompt.fence, refusal)
        else:
            self._attempts.add(prompt)
            insert_by_turn(self._waiting, prompt)

    def _refusal(self, prompt: Prompt) -> PronghornError | None:
        needed, total = self._blocks(prompt), self._config.num_blocks
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
        """Give blocks and slots to those that wait, in order, until one finds no room. Whose prefix is being computed
        for another waits for that."""
        for prompt in list(self._waiting):
            if self._replicas.better_waits(prompt):
                continue
            replica = self._replicas.place(prompt.fence, prompt, prompt.prompt_tokens, room_to_grow=False)
            if replica is None:
                return
            self._waiting.remove(prompt)
            prompt.replica = replica
            self._apply(prompt, Event.RESERVE)
            replica.cache.promise(prompt.fence)
            self._report_complete_blocks(prompt)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, prompt: Prompt, error: PronghornError) -> None:
        if prompt.read:
            self._leave(prompt)
            self._attempts.retire(prompt)
            self._cache(prompt).break_promise(prompt.fence)
            self._apply(prompt, Event.CONDEMN)
        else:
            self._end(prompt, Event.FAIL)
        self._refuse(prompt.fence, error)

    def _end(self, prompt: Prompt, event: Event) -> None:
        self._leave(prompt)
        if prompt.state is not State.WAITING:
            self._cache(prompt).release(prompt.fence)
        self._attempts.discard(prompt)
        self._apply(prompt, event)

    def _apply(self, prompt: Prompt, event: Event) -> None:
        """Change the state, and with it the queue of its replica that the prompt stands in."""
        before = STAGES.get(prompt.state)
        prompt.apply(event)
        if prompt.replica is not None:
            prompt.replica.move(prompt, before, STAGES.get(prompt.state))

    def _leave(self, prompt: Prompt) -> None:
        """`prompt` takes part in nothing any more, whoever may still be reading its blocks."""
        if prompt.state is State.WAITING:
            self._waiting.remove(prompt)
        if self._attempts.live(prompt.fence.request_id) is prompt:
            self._ended.append(prompt.fence.request_id)

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
        ended, self._ended = self._ended, []
        return ended

    def take_hold_events(self) -> list[HoldEvent]:
        return self._replicas.holds.take_events()

    def take_cache_changes(self) -> list[CacheChange]:
        return self._replicas.take_cache_changes()

    def take_copies(self) -> list[BlockCopy]:
        return self._replicas.take_copies()

    def table(self, owner: RequestID) -> list[BlockId]:
        prompt = self._attempts.live(owner)
        assert prompt is not None, f"request {owner} is not held"
        return self._cache(prompt).table(prompt.fence)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._computing() > 0

    def load(self) -> EngineLoad:
        running, waiting = self._computing(), len(self._waiting)
        awaiting_blocks = len(self._attempts) - running - waiting
        gauges = self._replicas.block_gauges()
        queued = sum(prompt.uncomputed_tokens for prompt in self._attempts)
        return EngineLoad(
            waiting=waiting, running=running, awaiting_blocks=awaiting_blocks, queued_tokens=queued, **gauges
        )

    def held(self, now_s: float) -> list[Held]:
        rows = [
            Held(Kind.SEQUENCE, str(prompt.fence), age_s=now_s - prompt.since_s, note=prompt.state.name.lower())
            for prompt in self._attempts
        ]
        holders = {prompt.fence: (str(prompt.fence), now_s - prompt.since_s) for prompt in self._attempts}
        return rows + self._replicas.blocks_held(holders)

    def check(self) -> None:
        self._replicas.check()
        self._batcher.check()
        for replica in self._replicas:
            mine = [prompt for prompt in self._attempts if prompt.replica is replica]
            owners = {owner for owner in replica.cache.owners if owner not in self._replicas.holds}
            assert owners == {prompt.fence for prompt in mine}
            computing = [prompt for prompt in mine if prompt.state is State.COMPUTING]
            assert set(map(id, replica.prompts)) == set(map(id, computing)) and replica.slots == len(computing)
        waiting = sorted((prompt for prompt in self._attempts if prompt.state is State.WAITING), key=turn)
        assert list(self._waiting) == waiting and all(prompt.replica is None for prompt in waiting)

    # --- small questions ---------------------------------------------------------------------------------------------

    def _cache(self, prompt: Prompt) -> PrefixCache:
        assert prompt.replica is not None, f"{prompt.fence} holds no block"
        return prompt.replica.cache

    def _computing(self) -> int:
        return sum(replica.slots for replica in self._replicas)

    def _blocks(self, prompt: Prompt) -> int:
        return blocks_for(prompt.prompt_tokens, self._config.block_tokens)
