"""One call written as a JSON object, `{"name": ..., "arguments": {...}}`, read one character at a time.

The arguments are given out as they are written, character by character, once the name is known; arguments that were
written as a string of JSON are given out as what the string says. An object that is no call is handed back as text.
"""

import json
from enum import Enum, auto

from pipelines.text.tool_parsers.tool_parser import ToolParser

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", "type", "id", "function", *ARGUMENT_KEYS)


class JsonState(Enum):
    OPEN = auto()
    COMPLETE = auto()
    """The object's last brace was read."""
    FAILED = auto()
    """It is no call; `text` is what it was, as far as nobody was told of it."""


class JsonCall:
    def __init__(self, parser: ToolParser, *, bare: bool = False) -> None:
        """`bare`: no mark says that this is a call, so that an object without arguments is none."""
        self._parser = parser
        self._bare = bare
        self._all = ""
        self._stack: list[str] = []
        self.in_string = False
        self._escaped = False
        self._key: str | None = None
        """Whose value is being read, at the first level."""
        self._piece = ""
        """Of the key or value at the first level."""
        self._name: str | None = None
        self._kept = ""
        """Arguments that came before the name."""
        self._raw = False
        """The value is arguments, to be given out as they are."""
        self._whole = False
        """The arguments' last bracket was read; blanks may follow."""
        self._argued = False
        """There are arguments."""
        self._told = False
        self.state = JsonState.OPEN

    @property
    def text(self) -> str:
        return "" if self._told else self._all

    @property
    def depth(self) -> int:
        """Brackets that are open."""
        return len(self._stack)

    def read(self, char: str) -> JsonState:
        self._all += char
        if self.in_string:
            self._piece_of(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
            self._piece_of(char)
        elif char in "{[":
            self._begin(char)
        elif char in "}]":
            self._close(char)
        elif char in ":," and len(self._stack) == 1:
            self._separate(char)
        else:
            self._piece_of(char)
        return self.state

    def _fail(self) -> None:
        self.state = JsonState.FAILED

    def _begin(self, char: str) -> None:
        if not self._stack:
            if char != "{":
                return self._fail()
            self._stack.append(char)
            return None
        if len(self._stack) == 1 and (self._key is None or self._piece.strip()):
            return self._fail()
        if len(self._stack) == 1 and self._key in ARGUMENT_KEYS:
            self._raw = self._argued = True
            self._tell_name()
        self._stack.append(char)
        self._piece_of(char)
        return None

    def _close(self, char: str) -> None:
        if not self._stack or self._stack[-1] != {"}": "{", "]": "["}[char]:
            return self._fail()
        if len(self._stack) > 1:
            self._piece_of(char)
            self._stack.pop()
            if self._raw and len(self._stack) == 1:
                self._raw, self._whole = False, True
            return None
        self._value_ends()
        self._stack.pop()
        if self.state is JsonState.OPEN:
            if self._name is None or (self._bare and not self._argued):
                return self._fail()
            self._tell_name()
            if not self._argued:
                self._parser._argue("{}")
            self.state = JsonState.COMPLETE
        return None

    def _separate(self, char: str) -> None:
        if char == ":" and self._key is None:
            key = _parsed(self._piece)
            if not isinstance(key, str) or key not in CALL_KEYS:
                return self._fail()
            self._key, self._piece = key, ""
        elif char == "," and self._key is not None:
            self._value_ends()
        else:
            self._fail()
        return None

    def _piece_of(self, char: str) -> None:
        if not self._stack:
            if not char.isspace():
                self._fail()
        elif self._raw:
            self._arguments(char)
        else:
            self._piece += char

    def _arguments(self, text: str) -> None:
        if self._told:
            self._parser._argue(text)
        else:
            self._kept += text

    def _value_ends(self) -> None:
        if self._key is None and not self._piece.strip():
            return
        if self._whole:
            if self._piece.strip():
                return self._fail()
            self._whole = False
        else:
            value = _parsed(self._piece)
            if self._key == "name" or (self._key == "function" and isinstance(value, str)):
                if not isinstance(value, str) or not value:
                    return self._fail()
                self._name = value
                if self._argued:
                    self._tell_name()
            elif self._key in ARGUMENT_KEYS:
                self._argued = True
                self._tell_name()
                self._arguments(value if isinstance(value, str) else "{}" if value is None else self._piece.strip())
            elif value is None and self._piece.strip() != "null":
                return self._fail()
        self._key, self._piece = None, ""
        return None

    def _tell_name(self) -> None:
        if not self._told and self._name is not None:
            self._told = True
            self._parser._call(self._name)
            self._parser._argue(self._kept)
            self._kept = ""


def _parsed(text: str) -> object:
    """None where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
