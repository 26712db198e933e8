"""Grammars over a model's tokens: compiled once, matched by many sequences. The one place that names `llguidance`.

Knows schemas, regular expressions and grammars as text, and the vocabulary; not requests, sampling or threads. A
compiled grammar is never changed: a sequence gets a matcher of its own. What cannot be compiled, or costs too much, is
an InvalidRequest that says why; that verdict is kept too, so that asking again costs nothing.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from pipelines.types.text_request import TextGenerationResponseFormat
from pronghorn.errors import ConfigurationError, InvalidRequest

MAX_SOURCE_CHARS = 256 * 1024
MAX_REPETITIONS = 10_000
"""Of one piece of a pattern, nested counts multiplied. 10^4 cost 24 ms a mask over 49,152 tokens, 10^6 four seconds."""
MAX_MASK_S = 1.0
"""Processor time for one mask. Median 0.02 ms; what takes longer than this holds everybody else up."""
CACHED_GRAMMARS = 256
CACHED_CHARS = 8 * 1024 * 1024
_SHOWN_CHARS = 300

_LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 100_000, "step_max_items": 50_000, "verbose_errors": False}

_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t\r]{0,16}"}
"""Bounded white space: a model that is at a loss would otherwise write blanks up to its limit."""

_OBJECT_KEYWORDS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
)
_OTHER_SHAPES = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems"})


@dataclass(frozen=True)
class GrammarSource:
    kind: Literal["json_schema", "grammar"]
    """JSON text of a schema, or a grammar in Lark's notation."""
    text: str


class Matcher:
    """One sequence on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]: the tokens that may come next, the model's end tokens among them where the text may end. Raises
        InvalidRequest where the grammar turns out to cost too much."""
        started_s = time.thread_time()
        words = self._matcher.compute_bitmask()
        took_s = time.thread_time() - started_s
        if error := self._matcher.get_error():
            raise _refused(f"became too complex: {_first_line(error)}")
        if took_s > MAX_MASK_S:
            raise _refused(f"costs {took_s:.1f} s for one token; at most {MAX_MASK_S:g} s are allowed")
        bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def consume(self, *tokens: int) -> bool:
        """Go on by `tokens`; False, and unchanged or spent, where they do not fit."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    @property
    def complete(self) -> bool:
        """The text may end here."""
        return self._matcher.is_accepting()

    @property
    def stopped(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()


class Grammar:
    def __init__(self, prototype: LLMatcher, vocab_size: int) -> None:
        self._prototype = prototype
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        """At the beginning of a text."""
        return Matcher(self._prototype.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one vocabulary, with a bounded cache. Threads may share it; they compile side by side."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`vocab_size` is the model's, which may be more than the tokenizer has. Raises ConfigurationError."""
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)
        except Exception as error:  # the library says what a tokenizer lacks in errors of every kind
            raise ConfigurationError(f"no grammar can be matched with this tokenizer: {error}") from error
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSource, Grammar | InvalidRequest] = OrderedDict()
        self._kept_chars = 0

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> "GrammarCompiler":
        """Of a Hugging Face folder. Raises ConfigurationError."""
        try:
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
            eos = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no grammar can be matched: {error}") from error
        ids = [eos] if isinstance(eos, int) else eos or []
        return cls(tokenizer, vocab_size, frozenset(ids))

    def compile(self, source: GrammarSource) -> Grammar:
        """Raises InvalidRequest with the reason; within about a second of processor time whatever `source` is."""
        with self._lock:
            known = self._kept.get(source)
            if known is not None:
                self._kept.move_to_end(source)
        if known is None:
            known = self._verdict(source)
            self._keep(source, known)
        if isinstance(known, InvalidRequest):
            raise known
        return known

    def _verdict(self, source: GrammarSource) -> Grammar | InvalidRequest:
        try:
            check_size(source.text)
            limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]  # its stub has no keyword
            matcher = LLMatcher(self._tokenizer, _as_library_grammar(source), log_level=0, limits=limits)
            if error := matcher.get_error():
                raise _refused(f"cannot be compiled: {_first_line(error)}")
            # The first mask is where a costly beginning shows; it warms the lexer for all that follow.
            grammar = Grammar(matcher, self.vocab_size)
            if not grammar.matcher().allowed().any():
                raise _refused("allows no text at all")
            return grammar
        except InvalidRequest as error:
            return error

    def _keep(self, source: GrammarSource, verdict: Grammar | InvalidRequest) -> None:
        if len(source.text) > MAX_SOURCE_CHARS:
            return
        with self._lock:
            if source not in self._kept:
                self._kept_chars += len(source.text)
            self._kept[source] = verdict
            while len(self._kept) > CACHED_GRAMMARS or self._kept_chars > CACHED_CHARS:
                gone, _ = self._kept.popitem(last=False)
                self._kept_chars -= len(gone.text)

    # --- tokens and bytes --------------------------------------------------------------------------------------------

    def token_bytes(self, token: int) -> bytes:
        """What a token writes; a special token writes its name."""
        return self._tokenizer.decode_bytes([token])

    def tokens_of(self, text: str | bytes) -> list[int]:
        """Tokens that write `text`; special tokens written out in it become themselves."""
        data = text.encode() if isinstance(text, str) else text
        return self._tokenizer.tokenize_bytes(data, parse_special=True)

    def literal(self, mark: str) -> str:
        """`mark` as a term of a grammar: the special token where it is one, else its characters."""
        tokens = self.tokens_of(mark)
        if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]):
            return f"<[{tokens[0]}]>"
        return json.dumps(mark, ensure_ascii=False)


# --- what a client may write -----------------------------------------------------------------------------------------


def json_schema_source(schema: dict[str, Any] | bool) -> GrammarSource:
    """`{}` and true are any one JSON value; a schema of an object's keywords alone is of an object."""
    return GrammarSource("json_schema", json.dumps(rooted(schema), ensure_ascii=False, sort_keys=False))


def rooted(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A root schema as it is compiled. Raises InvalidRequest for false, and for anything that is no schema."""
    if schema is False:
        raise _refused("is the schema false, which allows no text at all")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused("is not an object")
    if _OBJECT_KEYWORDS & schema.keys() and not _OTHER_SHAPES & schema.keys():
        schema = {"type": "object"} | schema
    return schema | {"x-guidance": _JSON_OPTIONS}


def response_format_source(format: TextGenerationResponseFormat) -> GrammarSource:
    """Of a format that constrains."""
    constraint = format.constraint
    assert constraint is not None
    return GrammarSource("grammar", constraint) if isinstance(constraint, str) else json_schema_source(constraint)


def regex_source(pattern: str) -> GrammarSource:
    """The whole text matches `pattern`. Raises InvalidRequest where it repeats too much."""
    check_pattern(pattern)
    library = json.loads(LLMatcher.grammar_from_regex(pattern))
    return GrammarSource("grammar", library["grammars"][0]["lark_grammar"])


def grammar_source(text: str) -> GrammarSource:
    """A grammar in Lark's notation, or in the EBNF of llama.cpp (`root ::= ...`). Raises InvalidRequest."""
    check_size(text)
    if "::=" in text:
        try:
            text = any_to_lark(text)
        except Exception as error:  # a converter of the library's, which raises whatever it meets
            raise _refused(f"cannot be read: {_first_line(str(error))}") from error
    for pattern in re.findall(r"/((?:[^/\\\n]|\\.)+)/", text):
        check_pattern(pattern)
    return GrammarSource("grammar", text)


def choice_source(choices: list[str]) -> GrammarSource:
    """The text is one of `choices`."""
    return GrammarSource("grammar", "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices))


def check_size(text: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise _refused(f"has {len(text)} characters; at most {MAX_SOURCE_CHARS} are allowed")


def check_pattern(pattern: str) -> None:
    """Raises InvalidRequest where counted repetitions, nested ones multiplied, repeat a piece too often."""
    if (times := repetitions(pattern)) > MAX_REPETITIONS:
        raise _refused(f"has a pattern that repeats a piece {times} times; at most {MAX_REPETITIONS} are allowed")


def repetitions(pattern: str) -> int:
    """How often, at least, the most repeated piece of `pattern` must come. Counts braces and groups; no more than an
    estimate, made in one pass whatever the text."""
    most, groups = 1, [1]
    """`groups`: for each open group, the most repeated piece inside it so far."""
    last, at = 1, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            last, at = 1, at + 2
            continue
        if char == "[":
            closing = pattern.find("]", at + 2)
            last, at = 1, (closing + 1 if closing >= 0 else len(pattern))
            continue
        if char == "(":
            groups.append(1)
        elif char == ")" and len(groups) > 1:
            last = groups.pop()
        elif char == "{" and (count := re.compile(r"\{(\d{1,9})(,\d*)?\}").match(pattern, at)):
            last *= max(1, int(count[1]))
            at = count.end() - 1
        else:
            last = 1
        if char != "(":
            groups[-1] = max(groups[-1], last)
            most = max(most, last)
        at += 1
    return most


def _as_library_grammar(source: GrammarSource) -> str:
    if source.kind == "grammar":
        return LLMatcher.grammar_from_lark(source.text)
    for pattern in _patterns(json.loads(source.text)):
        check_pattern(pattern)
    return json.dumps({"grammars": [{"json_schema": json.loads(source.text)}]})


def _patterns(schema: object) -> list[str]:
    """Every regular expression in a schema."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                found.append(part["pattern"])
            if isinstance(part.get("patternProperties"), dict):
                found += part["patternProperties"]
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the response format {why}", param="response_format", code="invalid_grammar")


def _first_line(text: str) -> str:
    return " ".join(text.strip().split("\n<state>")[0].split())[:_SHOWN_CHARS]
