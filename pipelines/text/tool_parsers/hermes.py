"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen 2.5 and Qwen 3 write calls."""

from pipelines.text.tool_parsers.json_call import JsonCall, JsonState
from pipelines.text.tool_parsers.tool_parser import Mark, NewId, ToolParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def __init__(self, new_id: NewId) -> None:
        super().__init__(new_id)
        self._start, self._end_mark = Mark(START), Mark(END)
        self._call_text: JsonCall | None = None
        """Between the marks, until it is known to be no call."""
        self._inside = False

    def _read(self, char: str) -> None:
        if not self._inside:
            begun, text = self._start.read(char)
            self._say(text)
            if begun:
                self._inside, self._call_text = True, JsonCall(self)
            return
        if self._call_text is not None and self._call_text.in_string:
            self._read_inside(char)  # what a string of the arguments holds is no mark
            return
        ended, text = self._end_mark.read(char)
        for inner in text:
            self._read_inside(inner)
        if ended:
            self._leave()

    def _read_inside(self, char: str) -> None:
        call = self._call_text
        if call is None:
            self._say(char)
        elif call.state is JsonState.OPEN:
            if call.read(char) is JsonState.FAILED:
                self._call_text = None
                self._say(call.text)
        elif not char.isspace():
            self._call_text = None
            self._say(char)

    def _leave(self) -> None:
        call = self._call_text
        if call is not None and call.state is JsonState.OPEN:
            self._say(call.text)
        self._inside, self._call_text = False, None

    def _end(self) -> None:
        if self._inside:
            for char in self._end_mark.release():
                self._read_inside(char)
            self._leave()
        else:
            self._say(self._start.release())
