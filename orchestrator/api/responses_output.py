"""The answer of `/v1/responses` from the pieces of a choice: its items, and the events that tell how they come to be.

Pure. The whole answer is made by the same steps as the stream, so that both say the same. One item is open at a time:
thinking, a message or a call; it closes when another begins. An event is one line of ASCII.
"""

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.api.choice import Piece
from orchestrator.api.logprobs import BytesOf, chat_logprobs
from orchestrator.api.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseFailure,
    ResponseUsage,
)
from orchestrator.api.schema import Usage
from pipelines.text.tool_parsers.tool_parser import ToolCallDelta
from pronghorn.errors import PronghornError

Event = dict[str, Any]

_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_ID_PREFIX = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}


class AnswerItems:
    def __init__(self, name: str, logprobs: int | None, bytes_of: BytesOf, tell_reasoning: bool = True) -> None:
        self._name = name
        self._logprobs = logprobs
        self._bytes_of = bytes_of
        self._tell_reasoning = tell_reasoning
        self.items: list[dict[str, Any]] = []
        """As they stand; the last one may be open."""
        self._open = False
        self.cut_off = False
        """The answer ended at a limit."""

    def push(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning and self._tell_reasoning:
            events += self._to(_REASONING) + self._write(piece.reasoning)
        if piece.text or piece.logprobs:
            logprobs = self._told(piece)
            events += self._to(_MESSAGE) + self._write(piece.text, logprobs)
        for delta in piece.tool_calls:
            events += self._call(delta)
        if piece.finish_reason is not None:
            self.cut_off = piece.finish_reason == "length"
            if not self.items:
                events += self._to(_MESSAGE)
            events += self._close("incomplete" if self.cut_off else "completed")
        return events

    def _told(self, piece: Piece) -> list[dict[str, Any]]:
        if self._logprobs is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(piece.logprobs, self._logprobs, self._bytes_of)["content"]
        return content

    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _to(self, kind: str) -> list[Event]:
        """The events that lead to an open item of that kind."""
        if self._open and self.items[-1]["type"] == kind:
            return []
        return self._close("completed") + self._begin(kind)

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        item: dict[str, Any] = {"id": f"{_ID_PREFIX[kind]}_{self._name}_{len(self.items)}", "type": kind}
        item |= {"status": "in_progress", **fields}
        if kind == _MESSAGE:
            item |= {"role": "assistant", "content": []}
        elif kind == _REASONING:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = True
        added = _event("response.output_item.added", output_index=len(self.items) - 1, item=_copy(item))
        if kind == _CALL:
            return [added]
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == _MESSAGE:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        return [added, _event("response.content_part.added", **self._at(), content_index=0, part=_copy(part))]

    def _write(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        if part["type"] == "reasoning_text":
            return [_event("response.reasoning_text.delta", **self._at(), content_index=0, delta=text)]
        part["logprobs"] += logprobs or []
        return [
            _event("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=logprobs or [])
        ]

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            events = self._close("completed")
            events += self._begin(_CALL, call_id=delta.id or "", name=delta.name, arguments="")
        if delta.arguments:
            self.items[-1]["arguments"] += delta.arguments
            events.append(_event("response.function_call_arguments.delta", **self._at(), delta=delta.arguments))
        return events

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        at = self._at()
        if item["type"] == _CALL:
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = [_event("response.function_call_arguments.done", **at, **said)]
        else:
            part = item["content"][0]
            at |= {"content_index": 0}
            kind = "response.output_text.done" if item["type"] == _MESSAGE else "response.reasoning_text.done"
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [_event(kind, **at, **said), _event("response.content_part.done", **at, part=_copy(part))]
        return [*events, _event("response.output_item.done", output_index=at["output_index"], item=_copy(item))]


def _event(kind: str, **fields: Any) -> Event:
    return {"type": kind, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | ({"content": list(item["content"])} if "content" in item else {})


class ResponseAnswer:
    """One answer, whole or as it comes."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        repeated: Mapping[str, Any],
        items: AnswerItems,
    ) -> None:
        """`repeated`: the fields of the request that the answer repeats."""
        self._base = {**repeated, "id": answer_id, "created_at": created, "model": model}
        self._items = items
        self._sent = 0

    def whole(self, usage: Usage) -> ResponseBody:
        """Once every piece was pushed."""
        body = ResponseBody(**self._base, status="completed", output=self._items.items, usage=_usage(usage))
        if self._items.cut_off:
            body.status, body.incomplete_details = "incomplete", IncompleteDetails(reason="max_output_tokens")
        return body

    # --- as `chunks.Chunks` ------------------------------------------------------------------------------------------

    last = b""

    def piece(self, piece: Piece) -> bytes:
        events = self._items.push(piece)
        if not self._sent:
            begun = ResponseBody(**self._base, status="in_progress", output=[]).model_dump()
            events = [_event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")] + events
        return b"".join(map(self._encoded, events))

    def usage(self, usage: Usage) -> bytes:
        body = self.whole(usage)
        return self._encoded(_event(f"response.{body.status}", response=body.model_dump()))

    def failure(self, error: PronghornError) -> bytes:
        """An `error` event, and the answer as it failed."""
        told = _event("error", code=error.code, message=error.message, param=error.param)
        limited = error.code == "rate_limit_exceeded"
        failed = ResponseFailure(code="rate_limit_exceeded" if limited else "server_error", message=error.message)
        body = ResponseBody(**self._base, status="failed", output=self._items.items, error=failed).model_dump()
        return self._encoded(told) + self._encoded(_event("response.failed", response=body))

    def _encoded(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._sent}
        self._sent += 1
        return f"event: {event['type']}\ndata: {json.dumps(numbered, separators=(',', ':'))}\n\n".encode("ascii")


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
        total_tokens=usage.total_tokens,
    )
