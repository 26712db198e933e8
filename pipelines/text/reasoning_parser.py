"""Splits a model's text into its thinking and its answer, by the marks around the thinking.

Reads one character at a time, so that where the text is cut changes nothing. Thinking stands at the beginning or not at
all: the prompt has opened it, or the start mark is the first thing written. Blanks at the borders belong to neither.
Knows neither tokens nor what is done with the two.
"""

from dataclasses import dataclass

from pipelines.text.tool_parsers.tool_parser import Mark
from pipelines.types.reasoning_span import ReasoningSpan
from pronghorn.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str
    end: str
    always_open: bool = False
    """The model thinks from its first token on, without the start mark, whatever the prompt says."""


REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always_open=True),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    )
}

NONE = "none"


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """The format called `name`; "auto": the one whose end mark the chat template knows; "none": none. Raises
    ConfigurationError for any other name."""
    if name == NONE:
        return None
    if name == "auto":
        known = (f for f in REASONING_FORMATS.values() if not f.always_open and f.end in (template or ""))
        return next(known, None)
    if name not in REASONING_FORMATS:
        raise ConfigurationError(
            f"reasoning_parser is {name!r}; it must be auto, none, {', '.join(REASONING_FORMATS)}",
            param="reasoning_parser",
        )
    return REASONING_FORMATS[name]


def opens_thinking(prompt: str, format: ReasoningFormat) -> bool:
    """Whether the answer to `prompt`, a rendered template, begins inside the thinking."""
    said = prompt.rstrip()
    return said.endswith(format.start) or (format.always_open and not said.endswith(format.end))


@dataclass(frozen=True, slots=True)
class Thinks:
    """How a request's model thinks."""

    format: ReasoningFormat
    max_tokens: int | None = None

    def span(self, *, bounds: bool) -> ReasoningSpan | None:
        """What whoever samples must know: None where it `bounds` no grammar and has no budget."""
        if not bounds and self.max_tokens is None:
            return None
        return ReasoningSpan(start=self.format.start, end=self.format.end, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str
    content: str


class ReasoningParser:
    def __init__(self, format: ReasoningFormat, thinking: bool) -> None:
        """`thinking`: the prompt has opened it."""
        self._start, self._end = Mark(format.start), Mark(format.end)
        self._thinking = thinking
        self._undecided = not thinking
        """Nothing but blanks, and perhaps the beginning of the start mark, was read."""
        self._blank = ""
        self._begun = False
        """Something of the present part was given out."""
        self._reasoning = ""
        self._content = ""
        self._after_thinking = False

    @property
    def thinking(self) -> bool:
        """What comes next is thinking, by what is known so far."""
        return self._thinking

    def push(self, text: str) -> Split:
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> Split:
        """What was held back, once no more text comes."""
        if self._thinking:
            self._think(self._end.release())
        elif self._undecided:
            self._content += self._blank + self._start.release()
        self._blank = ""
        return self._take()

    def _read(self, char: str) -> None:
        if self._undecided:
            self._decide(char)
        elif self._thinking:
            ended, text = self._end.read(char)
            self._think(text)
            if ended:
                self._thinking, self._begun, self._blank, self._after_thinking = False, False, "", True
        elif self._after_thinking and not self._begun and char.isspace():
            return
        else:
            self._begun = True
            self._content += char

    def _decide(self, char: str) -> None:
        if char.isspace() and not self._start.held:
            self._blank += char
            return
        begun, text = self._start.read(char)
        if begun:
            self._thinking, self._undecided, self._blank = True, False, ""
        elif text:
            self._undecided, self._begun = False, True
            self._content += self._blank + text + self._start.release()
            self._blank = ""

    def _think(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._blank += char
                continue
            self._reasoning += (self._blank if self._begun else "") + char
            self._begun, self._blank = True, ""

    def _take(self) -> Split:
        split = Split(self._reasoning, self._content)
        self._reasoning = self._content = ""
        return split
