"""What every parser of tool calls is: text of one answer in, in any pieces; content and calls out.

A parser reads one character at a time, and what it gives out depends on the characters alone. So the deltas of a
stream, joined, are the whole answer's content and calls, however the text was cut. Knows neither tokens nor schemas.
What looks like a call and is none becomes content, without its marks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New of one call: its first delta has its id and name."""

    index: int
    arguments: str = ""
    """JSON text, a piece of it."""
    id: str | None = None
    name: str | None = None


Part = str | ToolCallDelta
"""Content, or a piece of a call."""

NewId = Callable[[], str]


class ToolParser(ABC):
    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._parts: list[Part] = []
        self._blank = ""
        """White space that is content only where more content follows."""
        self._content = False
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes."""
        self._end()
        if self._content and not self.num_calls:
            self._parts.append(self._blank)
            self._blank = ""
        return self._take()

    @abstractmethod
    def _read(self, char: str) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    # --- giving out --------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Content. Blanks around calls are none of it."""
        for char in text:
            if char.isspace():
                self._blank += char
                continue
            if self._content or not self.num_calls:
                self._parts.append(self._blank)
            self._blank = ""
            self._content = True
            self._parts.append(char)

    def _call(self, name: str) -> None:
        self._blank = ""
        self._parts.append(ToolCallDelta(self.num_calls, id=self._new_id(), name=name))
        self.num_calls += 1

    def _argue(self, arguments: str) -> None:
        """More arguments of the newest call."""
        if arguments:
            self._parts.append(ToolCallDelta(self.num_calls - 1, arguments))

    def _take(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours of one kind in one piece, and nothing empty."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, str):
            if isinstance(last, str):
                result[-1] = last + part
            elif part:
                result.append(part)
        elif isinstance(last, ToolCallDelta) and last.index == part.index and part.name is None:
            result[-1] = ToolCallDelta(last.index, last.arguments + part.arguments, last.id, last.name)
        else:
            result.append(part)
    return result


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """One for each call, in order."""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        call = calls.get(delta.index)
        calls[delta.index] = delta if call is None else replace(call, arguments=call.arguments + delta.arguments)
    return list(calls.values())


class Mark:
    """Looks for a text, one character at a time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.held = ""
        """The end of what was read that may still become the mark."""

    def read(self, char: str) -> tuple[bool, str]:
        """Whether the mark is complete, and what turns out not to belong to it."""
        held = self.held + char
        if held == self._text:
            self.held = ""
            return True, ""
        start = 0
        while not self._text.startswith(held[start:]):
            start += 1
        self.held = held[start:]
        return False, held[:start]

    def release(self) -> str:
        held, self.held = self.held, ""
        return held
