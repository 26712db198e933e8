"""What a node's shell and its engine say to each other: commands in, one report per step out.

The shell (asyncio, sockets) and the engine (scheduler, block pool, model) share the block memory and nothing else.

Who may touch a block: the engine owns every block. Between `Reserved` and the shell's next word on that fence the
shell writes the wanted blocks; between `ChunkReady` and `Release` it reads them. The engine never takes such a block
back on its own account: it reports a `Failed` and waits for `Release`. So a late write into a reused block, or a read
of one, cannot exist.
"""

from typing import NewType

import msgspec

from kvcache.journal import CacheChange
from pipelines.types.batch import CompletedBatchStats
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampled_token import SampledToken
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pronghorn.errors import ErrorRecord
from pronghorn.ids import Fence
from pronghorn.ledger import Held

# --- commands: shell -> engine ---------------------------------------------------------------------------------------


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Decode: hold blocks for the whole prompt. Answered by `Reserved` (at once, or when there is room) or `Failed`.

    With `prefill_here` no `Reserved` comes: the prompt is computed on this node and tokens follow.
    """

    fence: Fence
    context: TextContext
    budget_s: float
    prefill_here: bool = False


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Decode: every wanted block has landed and was verified; `token` is the prompt's first output, `siblings` those of
    the request's other choices."""

    fence: Fence
    token: int
    log_probabilities: LogProbabilities | None = None
    siblings: list[SampledToken] = []


class PrefillHere(msgspec.Struct, frozen=True, tag=True):
    """Decode: the pull is over without success and the shell has stopped writing: compute the prompt here.

    Of the blocks that were reserved behind the cached ones, the first `fetched_blocks` hold their bytes.
    `token` is the first output where it was delivered already: it is kept, not sampled again.
    """

    fence: Fence
    token: int | None = None
    log_probabilities: LogProbabilities | None = None
    siblings: list[SampledToken] = []
    fetched_blocks: int = 0


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Prefill: compute the prompt; report `ChunkReady` for `wanted` positions as they are done, and `FirstToken`."""

    fence: Fence
    context: TextContext
    wanted: list[int]
    budget_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """Whatever state this fence is in, end it and free its blocks. Unknown fences are fine: the word may be late."""

    fence: Fence


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached block that nobody holds."""


class TakeStock(msgspec.Struct, frozen=True, tag=True):
    """Say what is held, in a report's `stock` under this number: the next report, or the one after the step that is
    being computed."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop after the step in progress."""


HoldId = NewType("HoldId", str)
"""Names blocks that the engine holds for its shell itself: `holds.py`."""


class LeaseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Hold the blocks that lead `hashes`, to be read. Answered by `Leased`, again whenever there is more of them."""

    hold: HoldId
    hashes: list[bytes]


class ImportBlocks(msgspec.Struct, frozen=True, tag=True):
    """Hold blocks for `hashes`, the chain of a sequence from its start, to be written where they cannot be found.

    Answered by `Importing` or `HoldRefused`."""

    hold: HoldId
    hashes: list[bytes]


class PublishBlocks(msgspec.Struct, frozen=True, tag=True):
    """The first `blocks` of an import hold their bytes, found ones included; the others are not written any more."""

    hold: HoldId
    blocks: int


class EndHold(msgspec.Struct, frozen=True, tag=True):
    """Nobody reads or writes these blocks any more. Unknown holds are fine: the word may be late."""

    hold: HoldId


HoldCommand = LeaseBlocks | ImportBlocks | PublishBlocks | EndHold

EngineCommand = Admit | Adopt | PrefillHere | Prefill | Release | ResetPrefixCache | TakeStock | Stop | HoldCommand

FREES = Release | EndHold | Stop
"""Never refused, however many commands wait."""

# --- events: engine -> shell -----------------------------------------------------------------------------------------


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """`block_ids[i]` is held for block position i of the prompt; the first `cached_blocks` hold their bytes already."""

    fence: Fence
    block_ids: list[int]
    cached_blocks: int


class ChunkReady(msgspec.Struct, frozen=True, tag=True):
    """The blocks at these wanted positions are complete and may be read until `Release`."""

    fence: Fence
    positions: list[int]
    block_ids: list[int]


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt is done and this was sampled. Every wanted position is reported by the end of the same report."""

    fence: Fence
    token: int
    log_probabilities: LogProbabilities | None = None
    siblings: list[SampledToken] = []
    prompt_log_probabilities: LogProbabilities | None = None
    num_cached_tokens: int = 0
    """Of the prompt, those that were not computed."""


class TokenDelta(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of one choice of the fence's request. A status other than ACTIVE is the choice's last word; its blocks
    are free by then."""

    fence: Fence
    tokens: list[int]
    status: GenerationStatus = GenerationStatus.ACTIVE
    num_cached_tokens: int | None = None
    log_probabilities: list[LogProbabilities] | None = None
    choice: int = 0
    prompt_log_probabilities: LogProbabilities | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The fence's last word, an error. Blocks that the shell may be touching stay held until `Release`."""

    fence: Fence
    error: ErrorRecord


EngineEvent = Reserved | ChunkReady | FirstToken | TokenDelta | Failed


class Leased(msgspec.Struct, frozen=True, tag=True):
    """`block_ids` are held behind those told before; `coming` more behind them are being computed here."""

    hold: HoldId
    block_ids: list[int]
    coming: int


class Importing(msgspec.Struct, frozen=True, tag=True):
    """`block_ids[i]` is held for position i; the first `found` hold their bytes already, the others may be written."""

    hold: HoldId
    found: int
    block_ids: list[int]


class HoldRefused(msgspec.Struct, frozen=True, tag=True):
    """No room for this import, or nothing is cached here at all."""

    hold: HoldId


HoldEvent = Leased | Importing | HoldRefused


class EngineLoad(msgspec.Struct, frozen=True):
    """Gauges of one engine. `free + held == total`; `cached` counts free blocks whose bytes can still be reused."""

    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    waiting: int
    running: int
    awaiting_blocks: int
    """Decode: sequences whose blocks are being pulled. Prefill: finished prompts whose blocks are being read."""
    queued_tokens: int = 0
    """Of prompts to compute here, waiting or begun, what is not computed yet."""


class Stock(msgspec.Struct, frozen=True):
    """Everything that an engine holds for attempts. `number` is that of the `TakeStock` it answers."""

    number: int
    held: list[Held]


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """One per step, and one at least every `EngineConfig.report_period_s` when idle."""

    events: list[EngineEvent]
    load: EngineLoad
    stats: CompletedBatchStats | None = None
    prompt_tokens: int = 0
    """Of the batch's input tokens, those of prompts; the others are each a sequence's last token."""
    holds: list[HoldEvent] = []
    """What is said of the shell's own holds."""
    cache_changes: list[CacheChange] = []
    """What can be found in the pools since the report before, and what cannot any more, in order."""
    stock: Stock | None = None


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The first thing an engine says, once its model has computed a canary batch."""

    layout: dict[str, str]
    vocab_size: int
    max_length: int
    startup_s: float


class EngineFault(msgspec.Struct, frozen=True, tag=True):
    """The last thing an engine says when it cannot go on, or cannot start."""

    error: ErrorRecord


EngineMessage = EngineReady | StepReport | EngineFault
