"""The body of `/v1/responses` as a chat body: one way to everything behind it.

Pure. An assistant's reasoning, words and calls that follow each other are one turn. Errors name fields of chat;
`in_words_of_responses` names those of this endpoint.
"""

import re
from collections.abc import Sequence
from typing import Any

from orchestrator.api.body import check_fields
from orchestrator.api.responses_schema import (
    ITEM_TYPES,
    LOGPROBS,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputPart,
    InputReasoning,
    ResponsesRequest,
    TextFormat,
)
from orchestrator.api.schema import ChatCompletionRequest, GenerationBody
from pronghorn.errors import InvalidRequest

_SAME = frozenset(GenerationBody.model_fields) - {"max_tokens", "n", "detokenize", "stream_options"}
_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """Raises InvalidRequest."""
    fields = {name: value for name, value in body.model_dump(include=set(_SAME)).items() if value is not None}
    reasoning = body.reasoning
    return check_fields(
        fields
        | {
            "messages": _messages(body),
            "max_completion_tokens": body.max_output_tokens,
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools or ()]
            or None,
            "tool_choice": _choice(body),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format(body.text.format) if body.text is not None and body.text.format else None,
            "reasoning_effort": reasoning.effort if reasoning is not None else None,
            "reasoning": {"max_tokens": reasoning.max_tokens}
            if reasoning is not None and reasoning.max_tokens is not None
            else None,
            "chat_template_kwargs": body.chat_template_kwargs,
            "logprobs": (body.top_logprobs or 0) > 0 or LOGPROBS in (body.include or ()),
            "top_logprobs": body.top_logprobs or None,
        },
        ChatCompletionRequest,
        {},
    )


def repeated(body: ResponsesRequest) -> dict[str, Any]:
    """What the answer repeats of its request."""
    choice = body.tool_choice
    given = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": choice if choice is None or isinstance(choice, str) else choice.model_dump(),
        "tools": [{"type": "function", "strict": bool(tool.strict)} | tool.model_dump() for tool in body.tools or ()],
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else None,
        "reasoning": body.reasoning.model_dump(include={"effort"}) if body.reasoning is not None else None,
        "metadata": body.metadata if isinstance(body.metadata, dict) else None,
    }
    return {name: value for name, value in given.items() if value is not None}


_TAGS = re.compile(rf"^input\.(text|items)((\[\d+\])(\.({'|'.join(ITEM_TYPES)}))?)?")
"""What a place within `input` has of the shapes that it may have."""


def in_words_of_responses(error: InvalidRequest) -> InvalidRequest:
    if error.param is not None and (tagged := _TAGS.match(error.param)):
        place = "input" + (tagged[3] or "")
        param = place + error.param.removeprefix(tagged[0])
        return type(error)(error.message.replace(tagged[0], place), code=error.code, param=param)
    for chat, ours in _NAMES.items():
        if error.param is not None and error.param.startswith(chat):
            message = error.message.replace(chat, ours)
            return type(error)(message, code=error.code, param=ours + error.param.removeprefix(chat))
    return error


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    if asked.schema_ is None:
        raise InvalidRequest(
            "text.format.schema must be given where its type is json_schema", param="text.format.schema"
        )
    return {"type": "json_schema", "json_schema": asked.model_dump(by_alias=True, exclude={"type"})}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    begun = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*begun, {"role": "user", "content": body.input}]
    return begun + _turns(body.input)


def _turns(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    saying: dict[str, Any] | None = None
    """The assistant's turn that further items belong to."""
    for item in items:
        if isinstance(item, InputCallOutput):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            saying = None
        elif isinstance(item, InputMessage) and item.role != "assistant":
            turns.append({"role": item.role, "content": _text(item.content)})
            saying = None
        else:
            if saying is None or _begins_anew(item, saying):
                saying = {"role": "assistant"}
                turns.append(saying)
            _say(saying, item)
    return turns


def _begins_anew(item: InputItem, saying: dict[str, Any]) -> bool:
    if isinstance(item, InputMessage):
        return "content" in saying or "tool_calls" in saying
    return isinstance(item, InputReasoning) and len(saying) > 1


def _say(saying: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, InputMessage):
        saying["content"] = _text(item.content)
    elif isinstance(item, InputReasoning):
        saying["reasoning"] = "".join(part.text for part in item.content or item.summary)
    elif isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        saying.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | list[InputPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.refusal or part.text} for part in content]
