"""The turns of a conversation as a template takes them, and whether its tool calls and their replies fit together.

Pure. Arguments of calls are given to the template as objects. A template that knows no tools gets them in words: a
system turn that shows them, calls as the model would have written them, replies as turns of the user.
"""

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.api.schema import ChatMessage
from orchestrator.api.structure_schema import ToolCall
from pipelines.text.tool_format import Tool, ToolFormat
from pipelines.types.text_request import TextGenerationRequestMessage
from pronghorn.errors import InvalidRequest


def turns(messages: Sequence[ChatMessage]) -> list[TextGenerationRequestMessage]:
    """Raises InvalidRequest where a reply answers nothing, a call is unanswered when the conversation goes on, or
    arguments are no JSON object. Calls of the last turn may be unanswered."""
    _check_replies(messages)
    return [_turn(index, message) for index, message in enumerate(messages)]


def told_in_words(
    given: Sequence[TextGenerationRequestMessage], tools: Sequence[Tool], format: ToolFormat
) -> list[TextGenerationRequestMessage]:
    """The same for a template that knows no tools."""
    told: list[TextGenerationRequestMessage] = []
    if tools:
        ask = format.asks(tools)
        if given and given[0].role == "system":
            before = given[0].flatten_content()["content"]
            ask, given = f"{before}\n\n{ask}", given[1:]
        told.append(_message(role="system", content=ask))
    return told + [_in_words(message, format) for message in given]


def _in_words(message: TextGenerationRequestMessage, format: ToolFormat) -> TextGenerationRequestMessage:
    if message.role == "tool":
        content = message.flatten_content()["content"]
        return _message(role="user", content=f"<tool_response>\n{content}\n</tool_response>")
    if not message.tool_calls:
        return message
    functions = [call["function"] for call in message.tool_calls]
    calls = [format.writes(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions]
    content = "\n".join(filter(None, [message.flatten_content()["content"], *calls]))
    return _message(role="assistant", content=content, reasoning_content=message.reasoning_content)


def _check_replies(messages: Sequence[ChatMessage]) -> None:
    asked: set[str] = set()
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "tool":
            if message.tool_call_id not in asked:
                known = ", ".join(sorted(asked)) or "none"
                raise InvalidRequest(
                    f"{where}.tool_call_id is {message.tool_call_id!r}; the calls before it are: {known}",
                    param=f"{where}.tool_call_id",
                )
            waiting.discard(message.tool_call_id)
            continue
        if waiting:
            raise InvalidRequest(
                f"{where} comes before the tool calls {', '.join(sorted(waiting))} were answered", param=where
            )
        asked = {call.id for call in message.tool_calls or () if message.role == "assistant"}
        waiting = set(asked)


def _turn(index: int, message: ChatMessage) -> TextGenerationRequestMessage:
    content = message.content
    parts = [part.model_dump() for part in content] if isinstance(content, list) else content
    calls = [_call(f"messages[{index}].tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or ())]
    return _message(
        role="system" if message.role == "developer" else message.role,
        content=parts,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content or message.reasoning,
    )


def _call(where: str, call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequest(
                f"{where}.function.arguments is no JSON: {error}", param=f"{where}.function.arguments"
            ) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments is {type(arguments).__name__}; it must be the JSON text of an object",
            param=f"{where}.function.arguments",
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _message(**fields: Any) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage.model_validate(fields)
