"""The state of one text request: its tokens, its bounds, how far it has come.

Knows nothing of blocks, nodes or text. It crosses processes whole (`wire.py`), and `__post_init__` runs on each decode:
it validates and draws nothing at random.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipelines.text.thinking_region import ThinkingMarkers, is_thinking
from pipelines.types.context import BaseContext as BaseContext
from pipelines.types.eos import EOSTracker
from pipelines.types.grammar_state import GrammarState
from pipelines.types.invalid_value import InvalidValue
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.reasoning_span import ReasoningSpan
from pipelines.types.sampled_token import SampledToken
from pipelines.types.sampling import SamplingParams
from pipelines.types.speculation import SpeculativeDecodingState
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID

FUTURE_TOKEN = -999
"""Stands for a token that the device is still computing; never leaves the engine."""


@dataclass(kw_only=True)
class TextContext:
    max_length: int
    """Prompt plus output, in tokens, for this request."""
    tokens: TokenBuffer
    request_id: RequestID = field(default_factory=RequestID)
    original_prompt_length: int = 0
    """Where generated text begins: kept through `reset`, so that sampling positions, penalties and end-of-sequence
    checks are those of a run that was never preempted. Left at 0, it becomes the buffer's prompt length."""
    eos_tracker: EOSTracker = field(default_factory=EOSTracker)
    vocab_size: int | None = None
    log_probabilities: int = 0
    """How many of the most likely tokens to report at each position; 0 is off."""
    log_probabilities_echo: bool = False
    """Whether the prompt's tokens are reported too. Such a prompt is computed whole, whatever is cached."""
    num_choices: int = 1
    """Sequences to generate from the one prompt; choice i draws with the seed + i."""
    thinking_markers: ThinkingMarkers | None = None
    """Where `thinking_temperature` applies."""
    ignore_eos: bool = False
    json_schema: str | None = None
    """JSON text."""
    grammar: str | None = None
    """Beats `json_schema`."""
    grammar_state: GrammarState | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    model_name: str = ""
    status: GenerationStatus = GenerationStatus.ACTIVE
    target_endpoint: str | None = None
    """An address, `tcp://host:port` or `ipc://path`; a registered name is looked up before it comes here."""
    external_block_metadata: dict[str, Any] | None = None
    """The request's dkv_cache_hint; only the connector reads inside."""
    cache_salt: str | None = None
    cached_prefix_length: int | None = None
    """Prompt tokens that were not computed for this request."""
    cached_prefix_external_length: int = 0
    """Those among them that came from another node's cache."""
    in_reasoning_phase: bool = False
    """The prompt ends inside a thinking region."""
    reasoning: ReasoningSpan | None = None
    """How the model marks its thinking, where that matters to what may be sampled."""
    trace_carrier: dict[str, str] | None = None
    """W3C trace headers."""
    priority: int = 0
    """The lower, the sooner, wherever it waits."""
    _log_probabilities_data: dict[int, LogProbabilities] = field(default_factory=dict)
    """By position of the sampled token, until it is streamed."""
    _prompt_log_probabilities: LogProbabilities | None = None
    """Of the prompt's tokens from the second on, as far as it is computed, until it is streamed."""
    _is_initial_prompt: bool = True
    _is_padding_ctx: bool = False
    _draft_offset: int = 0
    """Tokens by which the draft's KV is ahead of, or behind, the model's."""
    _spec_decoding_state: SpeculativeDecodingState | None = None
    _cache_metrics_emitted: bool = False
    """The cached prefix was counted already: a preempted request is not counted twice."""
    _concrete: Literal["TextContext"] = "TextContext"
    """Crosses with the fields, so that a context of a richer class is refused rather than decoded as a plain one,
    with its own fields gone."""

    def __post_init__(self) -> None:
        self.original_prompt_length = self.original_prompt_length or self.tokens.prompt_length
        if self.num_choices < 1:
            raise InvalidValue("num_choices", self.num_choices, "a whole number, 1 or more")
        shortest = self.original_prompt_length + self.sampling_params.min_new_tokens
        if shortest > self.max_length:
            raise InvalidValue(
                "min_new_tokens",
                self.sampling_params.min_new_tokens,
                f"at most {max(0, self.max_length - self.original_prompt_length)}: the prompt has "
                f"{self.original_prompt_length} tokens and the request may hold {self.max_length}",
            )
        if self.target_endpoint is not None:
            _check_endpoint(self.target_endpoint)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.status.is_done

    @property
    def is_initial_prompt(self) -> bool:
        """No token has come out yet."""
        return self._is_initial_prompt

    @property
    def num_generated_tokens(self) -> int:
        """Since the request's own prompt: a reset does not bring it back to 0."""
        return len(self.tokens) - self.original_prompt_length

    @property
    def below_min_new_tokens(self) -> bool:
        """While this is so, the sampler masks `eos_tracker.eos_token_ids`."""
        return self.num_generated_tokens < self.sampling_params.min_new_tokens

    @property
    def temperature(self) -> float:
        """Of the next token."""
        params = self.sampling_params
        if params.thinking_temperature is None or self.thinking_markers is None:
            return params.temperature
        return (
            params.thinking_temperature if is_thinking(self.tokens.all, self.thinking_markers) else params.temperature
        )

    @property
    def awaits_prompt_log_probabilities(self) -> bool:
        return self.log_probabilities_echo and self.log_probabilities > 0 and self.num_generated_tokens == 0

    # --- one step ----------------------------------------------------------------------------------------------------

    def update(self, token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """The window was computed. Where it is a chunk, go on to the next one and discard the token; otherwise append
        it and see whether the sequence ends."""
        if self.tokens.actively_chunked:
            self.tokens.advance_chunk()
            return
        self._append(token)
        self._settle_last_token(log_probabilities)

    def update_with_future_token(self) -> None:
        """As `update`, for a token that is not known yet: `realize_future_token` settles it. One at most is open."""
        if self.tokens.actively_chunked:
            self.tokens.advance_chunk()
            return
        if self._awaits_token:
            raise ValueError(f"request {self.request_id} still waits for the token before this one")
        self._append(FUTURE_TOKEN)

    def realize_future_token(self, token: int, log_probabilities: LogProbabilities | None = None) -> None:
        if not self._awaits_token:
            raise ValueError(f"request {self.request_id} waits for no token")
        self.tokens.overwrite_last_token(token)
        self._settle_last_token(log_probabilities)

    @property
    def last_realized_token(self) -> int:
        return self.tokens[-2 if self._awaits_token else -1]

    @property
    def pending_future_count(self) -> int:
        """Placeholders at the end, 0 or 1; a block that holds one is not to be hashed."""
        return int(self._awaits_token)

    @property
    def _awaits_token(self) -> bool:
        return self.tokens[-1] == FUTURE_TOKEN

    def note_prompt_log_probabilities(self, entries: LogProbabilities) -> None:
        """Of the next tokens of the prompt, in the order of their positions."""
        known = self._prompt_log_probabilities
        if known is None:
            self._prompt_log_probabilities = entries
            return
        known.token_log_probabilities += entries.token_log_probabilities
        known.top_log_probabilities += entries.top_log_probabilities
        known.sampled_token_ids += entries.sampled_token_ids

    def sibling(self, choice: int, first: SampledToken) -> "TextContext":
        """Another choice of this request, behind its own first token, which waits to be streamed. This one is behind
        its first token too. The other has a request id of its own, `<id>/<choice>`."""
        assert self.num_generated_tokens == 1, f"{self.request_id} has {self.num_generated_tokens} tokens of its own"
        other = replace(
            self,
            request_id=RequestID(f"{self.request_id}/{choice}"),
            tokens=TokenBuffer(self.tokens[: self.original_prompt_length].copy()),
            sampling_params=self.sampling_params.for_choice(choice),
            status=GenerationStatus.ACTIVE,
            num_choices=1,
            log_probabilities_echo=False,
            grammar_state=deepcopy(self.grammar_state),
            _log_probabilities_data={},
            _prompt_log_probabilities=None,
            _is_initial_prompt=True,
        )
        other.update(first.token, first.log_probabilities)
        return other

    def _append(self, token: int) -> None:
        self.tokens.advance_with_token(token)
        self._is_initial_prompt = False

    def _settle_last_token(self, log_probabilities: LogProbabilities | None) -> None:
        if log_probabilities is not None:
            self._log_probabilities_data[len(self.tokens) - 1] = log_probabilities
        if self.eos_tracker.is_eos(self.tokens[self.original_prompt_length :]):
            self.status = GenerationStatus.END_OF_SEQUENCE
        elif len(self.tokens) >= self.max_length:
            self.status = GenerationStatus.MAXIMUM_LENGTH

    def to_generation_output(self) -> TextGenerationOutput:
        """What was generated since the last call, possibly nothing. Raises InternalError for a token outside the
        vocabulary: it must not reach a client as text."""
        held_back = self.pending_future_count
        taken: list[int] = []
        first = len(self.tokens) - held_back
        if self.tokens.num_outstanding_generated_tokens > held_back:
            taken = self.tokens.consume_recently_generated_tokens(held_back).tolist()
            first -= len(taken)
        for token in taken:
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise InternalError(f"request {self.request_id}: token {token} is not in 0..{self.vocab_size}")
        data = self._log_probabilities_data
        found = [data.pop(position) for position in range(first, first + len(taken)) if position in data]
        prompt_log_probabilities = None
        if taken:
            prompt_log_probabilities, self._prompt_log_probabilities = self._prompt_log_probabilities, None
        return TextGenerationOutput(
            request_id=self.request_id,
            prompt_log_probabilities=prompt_log_probabilities,
            tokens=taken,
            final_status=self.status,
            log_probabilities=found or None,
            num_cached_tokens=self.cached_prefix_length,
        )

    def reset(self) -> None:
        """Preempted: all that is known is computed anew, as one prompt. Take what waits to be streamed before.

        A placeholder and drafts go; the request's own prompt length, its bounds and its status stay.
        """
        self.tokens.reset_as_new_prompt(self.pending_future_count)
        self._is_initial_prompt = True
        self._prompt_log_probabilities = None
        self._spec_decoding_state = None
        self._draft_offset = 0


def _check_endpoint(endpoint: str) -> None:
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not rest:
        raise InvalidValue("target_endpoint", endpoint, "tcp://host:port or ipc://path")
    if scheme == "tcp" and ":" not in rest:
        raise InvalidValue("target_endpoint", endpoint, "tcp://host:port")
