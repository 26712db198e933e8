"""How the next token is chosen, and how long a sequence may be.

A SamplingParams is always valid: what is out of bounds is refused as an InvalidValue that names it. One made from what
a user sent and what the model's folder recommends comes from `from_input_and_generation_config`.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipelines.types.invalid_value import InvalidValue


@dataclass(kw_only=True)
class SamplingParamsInput:
    """What a user sent. None means: inherit."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    thinking_temperature: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool | None = None
    seed: int | None = None
    logits_processors: list[str] | None = None
    logit_bias: dict[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParamsGenerationConfigDefaults:
    """What a model's generation_config.json recommends; only these keys count."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParamsGenerationConfigDefaults":
        return cls(**{f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None})

    @property
    def stop_token_ids(self) -> list[int] | None:
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id

    def sampling_values(self) -> dict[str, Any]:
        """As arguments of SamplingParams. `do_sample=False` means greedy, whatever else the file says."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("do_sample", "eos_token_id")}
        values["stop_token_ids"] = self.stop_token_ids
        if self.do_sample is False:
            values |= {"temperature": 0.0, "top_k": 1}
        return {name: value for name, value in values.items() if value is not None}


_WIRE_LOW, _WIRE_HIGH = -(2**63), 2**63 - 1
"""What an integer may be on the wire."""

LARGEST_BIAS = 100.0
"""Of `logit_bias`, either way, as OpenAI has it: it all but forbids a token, or all but forces it."""


def _require(ok: bool, name: str, value: object, bound: str) -> None:
    if not ok:
        raise InvalidValue(name, value, bound)


def _require_number(name: str, value: object, low: float, high: float) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(ok and low <= value <= high, name, value, f"a number from {low:g} to {high:g}")  # type: ignore[operator]


def _require_count(name: str, value: object) -> None:
    _require(type(value) is int and 0 <= value <= _WIRE_HIGH, name, value, "a whole number, 0 or more")


@dataclass
class SamplingParams:
    top_k: int = -1
    """-1: every token; 0 is read as -1."""
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    """0 is greedy and sets top_k to 1, unless a thinking region has a temperature of its own."""
    thinking_temperature: float | None = None
    """Inside a thinking region, in place of `temperature`."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """None: up to the model's limit. 0 still yields one token."""
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    """0 is a seed like any other."""
    logits_processors: list[str] | None = None
    """Names that the configuration knows; a callable never crosses a process."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before everything else."""

    def __post_init__(self) -> None:
        self._normalise()
        self._validate()

    def _normalise(self) -> None:
        # None comes from callers that pass a user's field on: it means the default.
        self.top_k = -1 if self.top_k is None or self.top_k == 0 else self.top_k
        self.top_p = 1.0 if self.top_p is None else self.top_p
        if self.temperature == 0 and not self.thinking_temperature:
            self.top_k = 1

    def _validate(self) -> None:
        _require(type(self.top_k) is int and -1 <= self.top_k <= _WIRE_HIGH, "top_k", self.top_k, "-1 (off) or more")
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("temperature", self.temperature, 0.0, 2.0)
        if self.thinking_temperature is not None:
            _require_number("thinking_temperature", self.thinking_temperature, 0.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        penalty = self.repetition_penalty
        finite = isinstance(penalty, int | float) and not isinstance(penalty, bool) and math.isfinite(penalty)
        _require(finite and penalty > 0, "repetition_penalty", penalty, "finite and above 0")
        if self.max_new_tokens is not None:
            _require_count("max_new_tokens", self.max_new_tokens)
        _require_count("min_new_tokens", self.min_new_tokens)
        in_range = type(self.seed) is int and _WIRE_LOW <= self.seed <= _WIRE_HIGH
        _require(in_range, "seed", self.seed, "a whole number of 64 bits with a sign")
        _require(all(self.stop or ["-"]), "stop", self.stop, "strings of one character or more")
        for token in self.stop_token_ids or []:
            _require_count("stop_token_ids", token)
        for token, bias in (self.logit_bias or {}).items():
            _require_count("logit_bias", token)
            _require_number("logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)

    def for_choice(self, choice: int) -> "SamplingParams":
        """Of the `choice`-th sequence of a request for several: its seed is `seed` + `choice`, so that it says what a
        request for one sequence with that seed says. Wraps around at the ends of 64 bits."""
        if choice == 0:
            return self
        return replace(self, seed=(self.seed + choice - _WIRE_LOW) % 2**64 + _WIRE_LOW)

    @property
    def needs_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def from_input_and_generation_config(
        cls, input_params: SamplingParamsInput, defaults: SamplingParamsGenerationConfigDefaults
    ) -> "SamplingParams":
        """The user's values over the model's over ours.

        A user's `stop_token_ids` replace the model's list; with `do_sample=False` in the model's file a temperature
        alone changes nothing, since top_k stays 1 until the user sets it.
        """
        given = {f.name: getattr(input_params, f.name) for f in fields(input_params)}
        return cls(**(defaults.sampling_values() | {name: value for name, value in given.items() if value is not None}))
