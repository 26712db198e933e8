"""`[get_weather(city="Oslo", days=3), now()]`: a list of calls in Python's notation, where the answer begins with it.

A call is given out when its last parenthesis was read: its arguments are literals, and are turned into JSON.
"""

import ast
import json
import warnings
from enum import Enum, auto
from typing import Any

from pipelines.text.tool_parsers.tool_parser import NewId, ToolParser

MAX_CALL_CHARS = 256 * 1024
"""A longer one is content: Python's own parser takes memory in proportion."""


class _Place(Enum):
    START = auto()
    BETWEEN = auto()
    """In the list, before a call or behind one."""
    CALL = auto()
    OUTSIDE = auto()


class PythonicParser(ToolParser):
    def __init__(self, new_id: NewId) -> None:
        super().__init__(new_id)
        self._place = _Place.START
        self._held = ""
        self._stack: list[str] = []
        self._quote = ""
        self._escaped = False

    def _read(self, char: str) -> None:
        match self._place:
            case _Place.START:
                if char == "[":
                    self._held += char
                    self._place = _Place.BETWEEN
                elif char.isspace():
                    self._held += char
                else:
                    self._give_up(char)
            case _Place.BETWEEN:
                self._read_between(char)
            case _Place.CALL:
                self._read_call(char)
            case _Place.OUTSIDE:
                self._say(char)

    def _read_between(self, char: str) -> None:
        if char == "]":
            self._held = self._held + char if not self.num_calls else ""
            self._place = _Place.OUTSIDE
            self._say(self._held)
            self._held = ""
        elif char.isidentifier():
            self._held += char
            self._place = _Place.CALL
        elif char.isspace() or (char == "," and self.num_calls):
            self._held += char
        else:
            self._give_up(char)

    def _read_call(self, char: str) -> None:
        self._held += char
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._stack.append(char)
        elif char in ")]}":
            opening = self._stack.pop() if self._stack else ""
            if opening + char not in ("()", "[]", "{}"):
                self._give_up("")
            elif not self._stack:
                self._call_ends()
        elif not self._stack and not (char.isidentifier() or char.isdigit() or char in "._-" or char.isspace()):
            self._give_up("")
        if len(self._held) > MAX_CALL_CHARS:
            self._give_up("")

    def _call_ends(self) -> None:
        text = self._held.strip().lstrip("[, \n\t\r")
        call = _call(text)
        if call is None:
            self._give_up("")
            return
        self._held = ""
        name, arguments = call
        self._call(name)
        self._argue(json.dumps(arguments, ensure_ascii=False))
        self._place = _Place.BETWEEN

    def _give_up(self, char: str) -> None:
        """What was held is content, and so is everything after it."""
        self._place = _Place.OUTSIDE
        held, self._held = self._held, ""
        self._say((held.lstrip(" \t\r\n,") if self.num_calls else held) + char)

    def _end(self) -> None:
        if self._place is not _Place.OUTSIDE:
            self._give_up("")


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on escapes is meant for programmers
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return None
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        json.dumps(arguments)
        return ast.unparse(tree.func), arguments
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
