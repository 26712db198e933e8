"""Text to tokens and back for one model, and a request to the context that a node computes.

Reads a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json,
config.json; all but the first may be missing. Loads neither torch nor weights.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipelines.text.chat_template import ChatTemplate
from pipelines.text.grammar import response_format_source
from pipelines.text.reasoning_parser import Thinks, opens_thinking
from pipelines.text.thinking_region import ThinkingMarkers
from pipelines.text.token_bytes import TokenBytes
from pipelines.types.eos import EOSTracker
from pipelines.types.grammar_state import GrammarState
from pipelines.types.invalid_value import InvalidValue
from pipelines.types.sampling import SamplingParamsGenerationConfigDefaults
from pipelines.types.text_context import TextContext
from pipelines.types.text_request import (
    TextGenerationRequest,
    TextGenerationRequestMessage,
    TextGenerationRequestTool,
)
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest

_THINKING_TAIL_TOKENS = 64
"""Of a prompt: marks and blanks behind them have no more."""
THINKING_MARKERS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


class TextTokenizer:
    """Safe to share between threads: nothing changes after construction."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
        generation_defaults: SamplingParamsGenerationConfigDefaults,
    ) -> None:
        """Takes `tokenizer` over, and turns its truncation and padding off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size = vocab_size
        """Of the model: it may be more than the tokenizer uses."""
        self.eos_ids = eos_ids
        """Ids that end a sequence by the tokenizer's and the model's own word, whatever is asked."""
        self.generation_defaults = generation_defaults
        self.token_bytes = TokenBytes(tokenizer)
        """What one token stands for, by id."""
        self.thinking_markers = self._find_thinking_markers()
        self._longest_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.special_ids = frozenset(id for id, added in tokenizer.get_added_tokens_decoder().items() if added.special)

    @classmethod
    def from_folder(cls, path: str | Path) -> "TextTokenizer":
        """Raises ConfigurationError, naming the file, where one is missing or damaged."""
        folder = Path(path)
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        special_tokens = _special_tokens(settings)
        source = _template_source(folder / "chat_template.jinja", settings)
        eos_ids = _ids(config.get("eos_token_id"))
        if "eos_token" in special_tokens:
            eos_ids |= _ids(tokenizer.token_to_id(special_tokens["eos_token"]))
        return cls(
            tokenizer,
            vocab_size=config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True),
            eos_ids=eos_ids,
            template=None if source is None else ChatTemplate(source, special_tokens),
            generation_defaults=SamplingParamsGenerationConfigDefaults.from_generation_config(
                _read_json(folder / "generation_config.json")
            ),
        )

    def _find_thinking_markers(self) -> ThinkingMarkers:
        """Those that the vocabulary has whole; else the usual ones as they are written."""
        for begin, end in THINKING_MARKERS:
            ids = self._tokenizer.token_to_id(begin), self._tokenizer.token_to_id(end)
            if ids[0] is not None and ids[1] is not None:
                return ThinkingMarkers([ids[0]], [ids[1]])
        begin, end = THINKING_MARKERS[0]
        return ThinkingMarkers(self.encode(begin, add_special_tokens=False), self.encode(end, add_special_tokens=False))

    @property
    def template_source(self) -> str | None:
        """Jinja, where the model has a chat template."""
        return None if self._template is None else self._template.source

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def special_ids_of(self, marks: Iterable[str]) -> frozenset[int]:
        """Those of `marks` that are special tokens."""
        ids = (self._tokenizer.token_to_id(mark) for mark in marks)
        return frozenset(id for id in ids if id in self.special_ids)

    # --- text and tokens ---------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in `text` become themselves; `add_special_tokens` adds those that the model
        wants around a plain prompt. A rendered template has its own: turn it off there."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def apply_template(
        self,
        messages: Sequence[TextGenerationRequestMessage],
        tools: Sequence[TextGenerationRequestTool] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequest where the model has no template, the template refuses, or a part is not text."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            turns = [message.flatten_content() for message in messages]
        except ValueError as error:
            raise InvalidRequest(str(error), param="messages") from error
        return self._template.render(turns, tools, options)

    # --- requests ----------------------------------------------------------------------------------------------------

    def new_context(
        self,
        request: TextGenerationRequest,
        max_length: int,
        defaults: SamplingParamsGenerationConfigDefaults | None = None,
        *,
        grammar_state: GrammarState | None = None,
        thinks: Thinks | None = None,
    ) -> TextContext:
        """What a node computes for `request`. `max_length` is the model's: prompt plus output, in tokens.

        `defaults`, the model's own unless given, apply where the sampling parameters leave `max_new_tokens` or
        `stop_token_ids` open. `grammar_state` says how far the request's response format is enforced, from the first
        token on where it is left out. `target_endpoint` stays unset: whoever looks the name up sets the address. Raises
        ContextLengthExceeded naming both numbers, and InvalidRequest for what this server cannot do as asked.
        """
        defaults = defaults or self.generation_defaults
        prompt = self._prompt_tokens(request, max_length)
        if len(prompt) > max_length:
            raise _too_long(request, f"{len(prompt)} tokens", max_length)
        params = request.sampling_params
        max_new = defaults.max_new_tokens if params.max_new_tokens is None else params.max_new_tokens
        room = max_length - len(prompt)
        format = request.response_format
        source = None if format is None or not format.constrains else response_format_source(format)
        return TextContext(
            max_length=len(prompt) + (room if max_new is None else min(max_new, room)),
            tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
            request_id=request.request_id,
            eos_tracker=self._eos_tracker(request, defaults),
            vocab_size=self.vocab_size,
            log_probabilities=request.logprobs,
            log_probabilities_echo=request.echo,
            ignore_eos=params.ignore_eos,
            json_schema=source.text if source is not None and source.kind == "json_schema" else None,
            grammar=source.text if source is not None and source.kind == "grammar" else None,
            grammar_state=grammar_state,
            in_reasoning_phase=thinks is not None and self._opens_thinking(prompt, thinks),
            reasoning=None if thinks is None else thinks.span(bounds=source is not None),
            thinking_markers=None if params.thinking_temperature is None else self.thinking_markers,
            sampling_params=params,
            model_name=request.model_name,
            external_block_metadata=request.dkv_cache_hint,
            cache_salt=request.cache_salt,
        )

    def _opens_thinking(self, prompt: Sequence[int], thinks: Thinks) -> bool:
        return opens_thinking(self.decode(prompt[-_THINKING_TAIL_TOKENS:], skip_special_tokens=False), thinks.format)

    def _prompt_tokens(self, request: TextGenerationRequest, max_length: int) -> list[int]:
        if request.messages:
            text = self.apply_template(request.messages, request.tools, request.chat_template_options)
            self._refuse_what_cannot_fit(request, text, max_length)
            tokens = self.encode(text, add_special_tokens=False)
        elif isinstance(request.prompt, str):
            self._refuse_what_cannot_fit(request, request.prompt, max_length)
            tokens = self.encode(request.prompt)
        elif request.prompt is not None:
            tokens = self._checked_tokens(request.prompt)
        else:
            raise InvalidRequest("a request needs a prompt or messages", param="prompt")
        if not tokens:
            raise InvalidRequest(
                "the prompt is empty: at least one token is needed", param="messages" if request.messages else "prompt"
            )
        return tokens

    def _refuse_what_cannot_fit(self, request: TextGenerationRequest, text: str, max_length: int) -> None:
        """Tokenising costs more than a hundred times the text's memory, so that what is far too long is not."""
        fewest_tokens = -(-len(text) // self._longest_token_chars)
        if fewest_tokens > max_length:
            raise _too_long(request, f"{len(text)} characters, which are at least {fewest_tokens} tokens", max_length)

    def _checked_tokens(self, prompt: Sequence[int]) -> list[int]:
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidValue("prompt", token, f"token ids, whole numbers from 0 to {self.vocab_size - 1}")
        return list(prompt)

    def _eos_tracker(
        self, request: TextGenerationRequest, defaults: SamplingParamsGenerationConfigDefaults
    ) -> EOSTracker:
        params = request.sampling_params
        extra = defaults.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
        stops = params.stop or []
        return EOSTracker.build(
            ids=self.eos_ids | set(extra or []),
            sequences=[tokens for stop in stops if (tokens := self._stop_tokens(stop))],
            strings=stops,
            ignore_eos=params.ignore_eos,
        )

    def _stop_tokens(self, stop: str) -> list[int]:
        """The usual tokens of a stop string; none where they stand for another text (a normaliser changed it)."""
        tokens = self.encode(stop, add_special_tokens=False)
        return tokens if stop in self.decode(tokens, skip_special_tokens=False) else []


def _too_long(request: TextGenerationRequest, size: str, max_length: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {size}; this model takes at most {max_length} tokens, output included",
        param="messages" if request.messages else "prompt",
    )


# --- files -----------------------------------------------------------------------------------------------------------


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower, for a missing file as for a damaged one
        raise ConfigurationError(f"cannot read the tokenizer {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    return content


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or what older folders keep in tokenizer_config.json: a text, or several with names."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    kept = settings.get("chat_template")
    if isinstance(kept, list):
        kept = {entry["name"]: entry["template"] for entry in kept}.get("default")
    return kept


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on, by name; a token is a text, or an object that holds it as `content`."""
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
