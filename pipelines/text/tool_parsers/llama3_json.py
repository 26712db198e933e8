"""`{"name": ..., "parameters": {...}}`, several with `;` or `,` between them, perhaps behind `<|python_tag|>`: Llama 3.

Such an object counts where the answer begins with it or the mark stands before it; elsewhere braces are content. A
whole answer that is an object without a name is content too.
"""

from pipelines.text.tool_parsers.json_call import JsonCall, JsonState
from pipelines.text.tool_parsers.tool_parser import Mark, NewId, ToolParser

START = "<|python_tag|>"
SEPARATORS = ";,"


class Llama3JsonParser(ToolParser):
    def __init__(self, new_id: NewId) -> None:
        super().__init__(new_id)
        self._start = Mark(START)
        self._open: JsonCall | None = None
        self._expecting = True
        """An object that comes now is a call."""
        self._between = ""
        """Separators behind a call, content where no call follows."""

    def _read(self, char: str) -> None:
        if self._open is not None:
            self._read_call(char)
            return
        begun, text = self._start.read(char)
        for plain in text:
            self._read_plain(plain)
        if begun:
            self._expecting = True

    def _read_call(self, char: str) -> None:
        assert self._open is not None
        state = self._open.read(char)
        if state is JsonState.OPEN:
            return
        self._close(failed=state is JsonState.FAILED)

    def _close(self, *, failed: bool) -> None:
        assert self._open is not None
        between, self._between = self._between, ""
        if failed:
            self._expecting = False
            self._say((between if self._open.text else "") + self._open.text)
        self._open = None

    def _read_plain(self, char: str) -> None:
        if char == "{" and self._expecting:
            self._open = JsonCall(self, bare=True)
            self._read_call(char)
        elif char.isspace() or (self._expecting and self.num_calls and char in SEPARATORS):
            self._between += char
        else:
            self._expecting = False
            self._say(self._between + char)
            self._between = ""

    def _end(self) -> None:
        if self._open is not None:
            self._close(failed=True)
        for char in self._start.release():
            self._read_plain(char)
        if not self.num_calls:
            self._say(self._between)
