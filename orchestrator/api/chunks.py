"""The events of a streamed answer as bytes: chat chunks, completion chunks, usage, error, `[DONE]`, heartbeat.

Written on the path of every token, so an event is a prefix, a JSON string and a suffix, made once per request. Strings
are escaped to ASCII: clients that split lines as Unicode does would otherwise cut an event at U+2028 or U+0085.
"""

from json.encoder import encode_basestring_ascii as quoted
from typing import Protocol

import msgspec

from orchestrator.api.choice import Piece
from orchestrator.api.errors import envelope
from orchestrator.api.logprobs import BytesOf, chat_logprobs, completion_logprobs
from orchestrator.api.schema import Usage
from pipelines.text.tool_parsers.tool_parser import ToolCallDelta
from pronghorn.errors import PronghornError

DONE = b"data: [DONE]\n\n"
"""The last word of a stream that went well."""
PING = b": ping\n\n"


def bytes_of_nothing(token: int) -> bytes:
    return b""


class Chunks(Protocol):
    def piece(self, piece: Piece) -> bytes:
        """The events of `piece`; b"" where there is nothing to say."""

    def usage(self, usage: Usage) -> bytes: ...

    def failure(self, error: PronghornError) -> bytes:
        """The last word of a stream that failed."""

    @property
    def last(self) -> bytes:
        """The last word of a stream that went well."""


def error_event(error: PronghornError) -> bytes:
    return b"data: " + envelope(error) + b"\n\n"


def _head(answer_id: str, kind: str, created: int, model: str) -> str:
    head = {"id": answer_id, "object": kind, "created": created, "model": model}
    return "data: " + msgspec.json.encode(head).decode()[:-1]


class _Tail:
    """The end of every event: with usage asked for, all but the last say that it is null."""

    def __init__(self, head: str, include_usage: bool) -> None:
        self._head = head
        self.text = (',"usage":null}' if include_usage else "}") + "\n\n"

    def usage(self, usage: Usage) -> bytes:
        return f'{self._head},"choices":[],"usage":{usage.model_dump_json()}}}\n\n'.encode()


class _OpenAiStream:
    """How streams of chunks end."""

    last = DONE

    def failure(self, error: PronghornError) -> bytes:
        return error_event(error)


class ChatChunks(_OpenAiStream):
    """The role comes once per choice, in its first chunk; a text never shares a chunk with a finish reason."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        include_usage: bool,
        logprobs: int | None = None,
        bytes_of: BytesOf = bytes_of_nothing,
        reasoning_key: str | None = "reasoning",
    ) -> None:
        """`reasoning_key`: what thinking is told as; None: it is not."""
        self._reasoning_key = reasoning_key
        self._head = _head(answer_id, "chat.completion.chunk", created, model)
        self._tail = _Tail(self._head, include_usage)
        self._text_end = '},"logprobs":null,"finish_reason":null}]' + self._tail.text
        self._logprobs = logprobs
        self._bytes_of = bytes_of
        self._begun: set[int] = set()
        self.usage = self._tail.usage

    def piece(self, piece: Piece) -> bytes:
        start = f'{self._head},"choices":[{{"index":{piece.index},"delta":{{'
        events = ""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            events = start + '"role":"assistant","content":"","refusal":null' + self._text_end
        if piece.reasoning and self._reasoning_key is not None:
            events += f'{start}"{self._reasoning_key}":{quoted(piece.reasoning)}{self._text_end}'
        if piece.logprobs and self._logprobs is not None:
            told = msgspec.json.encode(chat_logprobs(piece.logprobs, self._logprobs, self._bytes_of)).decode()
            end = f'}},"logprobs":{told},"finish_reason":null{_ids(piece)}}}]{self._tail.text}'
            events += start + '"content":' + quoted(piece.text) + end
        elif piece.text or piece.token_ids:
            end = f'}},"logprobs":null,"finish_reason":null{_ids(piece)}}}]{self._tail.text}'
            events += start + '"content":' + quoted(piece.text) + (end if piece.token_ids else self._text_end)
        if piece.tool_calls:
            calls = ",".join(map(_call, piece.tool_calls))
            events += f'{start}"tool_calls":[{calls}]{self._text_end}'
        if piece.finish_reason is not None:
            events += f'{start}}},"logprobs":null,"finish_reason":"{piece.finish_reason}"}}]{self._tail.text}'
        return events.encode()


class CompletionChunks(_OpenAiStream):
    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        include_usage: bool,
        logprobs: int | None = None,
        bytes_of: BytesOf = bytes_of_nothing,
    ) -> None:
        self._head = _head(answer_id, "text_completion", created, model)
        self._tail = _Tail(self._head, include_usage)
        self._logprobs = logprobs
        self._bytes_of = bytes_of
        self._offsets: dict[int, int] = {}
        """Where the next token of each choice starts."""
        self.usage = self._tail.usage

    def piece(self, piece: Piece) -> bytes:
        if not (piece.text or piece.logprobs or piece.token_ids or piece.finish_reason):
            return b""
        reason = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        told = self._told(piece)
        choice = (
            f'{{"index":{piece.index},"text":{quoted(piece.text)},"logprobs":{told},"finish_reason":{reason}'
            f"{_ids(piece)}}}"
        )
        return f'{self._head},"choices":[{choice}]{self._tail.text}'.encode()

    def _told(self, piece: Piece) -> str:
        if not piece.logprobs or self._logprobs is None:
            return "null"
        offset = self._offsets.get(piece.index, 0)
        told, end = completion_logprobs(piece.logprobs, self._logprobs, self._bytes_of, offset)
        self._offsets[piece.index] = end
        return msgspec.json.encode(told).decode()


def _call(delta: ToolCallDelta) -> str:
    arguments = f'"arguments":{quoted(delta.arguments)}'
    if delta.name is None:
        return f'{{"index":{delta.index},"function":{{{arguments}}}}}'
    function = f'{{"name":{quoted(delta.name)},{arguments}}}'
    return f'{{"index":{delta.index},"id":"{delta.id}","type":"function","function":{function}}}'


def _ids(piece: Piece) -> str:
    return f',"token_ids":{list(piece.token_ids)}' if piece.token_ids else ""
