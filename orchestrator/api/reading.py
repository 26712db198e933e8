"""How the text of an answer is read: thinking first, then content and tool calls. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelines.text.reasoning_parser import ReasoningFormat, ReasoningParser, Split
from pipelines.text.tool_format import ToolFormat
from pipelines.text.tool_parsers.tool_parser import NewId, Part, ToolCallDelta, joined


@dataclass(frozen=True)
class Reading:
    """What a request's answers may hold beside content."""

    reasoning: ReasoningFormat | None = None
    thinking: bool = False
    """The prompt has opened the thinking."""
    tools: ToolFormat | None = None
    marks: tuple[str, ...] = ()
    """Which the text must show, though they may be special tokens."""


@dataclass(frozen=True, slots=True)
class Read:
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCallDelta, ...] = field(default=())

    @classmethod
    def merged(cls, reads: Sequence["Read"]) -> "Read":
        calls = joined([call for read in reads for call in read.calls])
        return cls(
            "".join(read.reasoning for read in reads),
            "".join(read.content for read in reads),
            tuple(call for call in calls if isinstance(call, ToolCallDelta)),
        )


class AnswerReader:
    """What `push` and `finish` return, joined, does not depend on where the text was cut."""

    def __init__(self, reading: Reading, new_id: NewId) -> None:
        self._thoughts = None if reading.reasoning is None else ReasoningParser(reading.reasoning, reading.thinking)
        self._tools = None if reading.tools is None else reading.tools.new_parser(new_id)

    @property
    def thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str) -> Read:
        split = Split("", text) if self._thoughts is None else self._thoughts.push(text)
        if self._tools is None:
            return Read(split.reasoning, split.content)
        return _read(split.reasoning, self._tools.push(split.content))

    def finish(self) -> Read:
        """What was held back, once no more text comes."""
        split = Split("", "") if self._thoughts is None else self._thoughts.finish()
        if self._tools is None:
            return Read(split.reasoning, split.content)
        return _read(split.reasoning, self._tools.push(split.content) + self._tools.finish())


def _read(reasoning: str, parts: Sequence[Part]) -> Read:
    content = "".join(part for part in parts if isinstance(part, str))
    return Read(reasoning, content, tuple(part for part in parts if isinstance(part, ToolCallDelta)))
