"""`[TOOL_CALLS]` before `[{"name": ..., "arguments": {...}}, ...]`, or before `name[ARGS]{...}` in newer models."""

import json

from pipelines.text.tool_parsers.json_call import JsonCall, JsonState
from pipelines.text.tool_parsers.tool_parser import Mark, NewId, ToolParser

START, ARGS = "[TOOL_CALLS]", "[ARGS]"


class MistralParser(ToolParser):
    def __init__(self, new_id: NewId) -> None:
        super().__init__(new_id)
        self._start = Mark(START)
        self._behind_mark = False
        self._held = ""
        """Behind the mark, until a call begins: the list's bracket, separators, or a name."""
        self._open: JsonCall | None = None
        self._wrapped = False
        """The object is the arguments alone; the name stood before it."""

    def _read(self, char: str) -> None:
        if self._open is not None:
            self._read_call(char)
            return
        begun, text = self._start.read(char)
        for plain in text:
            if self._behind_mark:
                self._read_behind(plain)
            else:
                self._say(plain)
        if begun:
            self._behind_mark, self._held = True, ""

    def _read_behind(self, char: str) -> None:
        if self._open is not None:
            self._read_call(char)
            return
        if char == "{":
            name = self._held.removesuffix(ARGS).strip(" \t\r\n[],")
            self._held = ""
            self._open, self._wrapped = JsonCall(self), bool(name)
            if name:
                for written in f'{{"name":{json.dumps(name)},"arguments":':
                    self._open.read(written)
            self._read_call(char)
        elif char.isspace() or char in "[],_-." or char.isalnum():
            self._held += char
        else:
            self._behind_mark = False
            self._say(self._held.lstrip("[") + char)
            self._held = ""

    def _read_call(self, char: str) -> None:
        assert self._open is not None
        state = self._open.read(char)
        if state is JsonState.OPEN and self._wrapped and self._open.depth == 1:
            state = self._open.read("}")
        if state is JsonState.OPEN:
            return
        text, self._open = self._open.text, None
        if state is JsonState.FAILED:
            self._behind_mark = False
            self._say(text)

    def _end(self) -> None:
        rest = self._start.release()
        if self._open is not None:
            self._say(self._open.text + rest)
            self._open = None
        elif self._behind_mark:
            self._say((self._held + rest).strip(" \t\r\n[],"))
        else:
            self._say(rest)
