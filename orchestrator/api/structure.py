"""What the answer to a chat body must look like: its response format, its tools, and how far they are enforced.

Decides and compiles; knows neither HTTP nor contexts. Everything that the engine will enforce is compiled here first,
so that what cannot be enforced is refused before any work, with the reason.

| tool_choice | response_format | enforced |
|---|---|---|
| none, or no tools | none | nothing |
| none, or no tools | one | it, from the first token |
| auto | none | the calls, from where one begins |
| auto | one | it or calls, from the first token |
| required, or a name | ignored | calls, from the first token |
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.api.schema import ChatCompletionRequest
from orchestrator.api.structure_schema import NamedToolChoice, ResponseFormat, ToolDefinition
from pipelines.text.grammar import (
    GrammarCompiler,
    GrammarSource,
    grammar_source,
    json_schema_source,
    regex_source,
    response_format_source,
)
from pipelines.text.tokenizer import TextTokenizer
from pipelines.text.tool_format import Tool, ToolFormat
from pipelines.types.grammar_state import GrammarState
from pipelines.types.text_request import TextGenerationResponseFormat
from pronghorn.errors import InvalidRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Structure:
    response_format: TextGenerationResponseFormat | None = None
    state: GrammarState | None = None
    tools: list[Tool] = field(default_factory=list)
    """What the model is shown."""


class Structurer:
    """Threads may share it."""

    def __init__(self, tokenizer: TextTokenizer, format: ToolFormat | None, *, user_formats: bool) -> None:
        """`user_formats`: a client may send a response format; calls of tools are enforced in any case."""
        self._tokenizer = tokenizer
        self._format = format
        self._user_formats = user_formats
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def of(self, body: ChatCompletionRequest) -> Structure:
        """Raises InvalidRequest naming the field, with the compiler's reason where it is one."""
        tools = _chosen(body)
        asked = self._asked(body.response_format)
        if not tools:
            return Structure(asked)
        if self._format is None:
            if body.tool_choice not in (None, "auto"):
                raise InvalidRequest(
                    "tool_choice must be auto or none: this server has no parser for this model's tool calls",
                    param="tool_choice",
                )
            return Structure(asked, None, [shown_tool(tool) for tool in tools])
        several = body.parallel_tool_calls is not False
        enforced = self._enforceable(tools, self._format)
        if body.tool_choice not in (None, "auto"):
            calls = self._calls(enforced, several, "start: calls\n")
            state = GrammarState(enforced=True, tools_forced=True)
            return Structure(_format_of(calls, state), state, [shown_tool(tool) for tool in tools])
        return self._automatic(asked, [shown_tool(tool) for tool in tools], enforced, several)

    def _automatic(
        self, asked: TextGenerationResponseFormat | None, shown: list[Tool], enforced: list[Tool], several: bool
    ) -> Structure:
        assert self._format is not None
        if asked is not None:
            calls = self._calls(enforced, several, _either(asked))
            state = GrammarState(enforced=True, has_json_schema=True)
        else:
            calls = self._calls(enforced, several and not self._format.wakes_per_call, "start: calls\n")
            state = GrammarState(
                triggers=list(self._format.triggers),
                triggers_at_start=self._format.starts(enforced),
                repeats=several,
            )
        return Structure(_format_of(calls, state), state, shown)

    # --- response formats --------------------------------------------------------------------------------------------

    def _asked(self, given: ResponseFormat | None) -> TextGenerationResponseFormat | None:
        if given is None or given.type == "text":
            return None
        if not self._user_formats:
            raise InvalidRequest(
                f"response_format is of type {given.type}; this server was started without structured output",
                param="response_format",
                code="unsupported_parameter",
            )
        asked = _asked(given)
        self._compile(response_format_source(asked))
        return asked

    # --- tools -------------------------------------------------------------------------------------------------------

    def _calls(self, tools: Sequence[Tool], several: bool, start: str) -> str:
        assert self._format is not None
        text = start + self._format.calls(tools, self._compiler_now().literal, several)
        try:
            self._compile(GrammarSource("grammar", text))
        except InvalidRequest as error:
            raise InvalidRequest(
                error.message.replace("the response format", "the grammar of the tools"), param="tools", code=error.code
            ) from error
        return text

    def _enforceable(self, tools: Sequence[ToolDefinition], format: ToolFormat) -> list[Tool]:
        """The tools as they can be enforced: one whose schema cannot be takes any object, unless it is strict."""
        checked = []
        for index, definition in enumerate(tools):
            tool = shown_tool(definition)
            try:
                rules = format.calls([tool], self._compiler_now().literal, False)
                self._compile(GrammarSource("grammar", "start: calls\n" + rules))
            except InvalidRequest as error:
                where = f"tools[{index}].function.parameters"
                if definition.function.strict:
                    why = error.message.removeprefix("the response format ")
                    raise InvalidRequest(f"{where} {why}", param=where, code=error.code) from error
                log.warning("%s of %r is not enforced: %s", where, tool.name, error.message)
                tool = replace(tool, parameters={"type": "object"})
            checked.append(tool)
        return checked

    def _compile(self, source: GrammarSource) -> None:
        self._compiler_now().compile(source)

    def _compiler_now(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    self._tokenizer.to_json(), self._tokenizer.vocab_size, self._tokenizer.eos_ids
                )
            return self._compiler


def _chosen(body: ChatCompletionRequest) -> list[ToolDefinition]:
    """The tools that may be called. Raises InvalidRequest where the choice names none of them, or there are none."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools has {double!r} twice; a name must be of one tool", param="tools")
    choice = body.tool_choice
    if choice == "none":
        return []
    if choice not in (None, "auto") and not tools:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if not isinstance(choice, NamedToolChoice):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r}; the tools are: {', '.join(names)}", param="tool_choice"
        )
    return named


def shown_tool(definition: ToolDefinition) -> Tool:
    function = definition.function
    return Tool(function.name, function.parameters, function.description or "")


def _asked(given: ResponseFormat) -> TextGenerationResponseFormat:
    """A client's format, with the one field that its type needs."""
    needed = {"json_schema": given.json_schema, "grammar": given.grammar, "regex": given.regex}
    for name, value in needed.items():
        if (name == given.type) != (value is not None):
            must = "must be given" if name == given.type else "must be left out"
            raise InvalidRequest(
                f"response_format.{name} {must} where its type is {given.type}", param=f"response_format.{name}"
            )
    match given.type:
        case "json_schema":
            assert given.json_schema is not None
            schema = given.json_schema.schema_
            if schema is False:
                json_schema_source(False)
            known = schema if isinstance(schema, dict) else {}
            return _users("json_schema", known)
        case "json_object":
            return _users("json_object", {"type": "object"})
        case "regex":
            return _users("grammar", grammar=regex_source(given.regex or "").text)
        case _:
            return _users("grammar", grammar=grammar_source(given.grammar or "").text)


def _users(
    kind: str, schema: dict[str, Any] | None = None, *, grammar: str | None = None
) -> TextGenerationResponseFormat:
    return TextGenerationResponseFormat(
        kind,
        schema,
        grammar,
        grammar_enforced=True,
        requires_structured_output_flag=True,
        has_json_schema=schema is not None,
    )


def _either(asked: TextGenerationResponseFormat) -> str:
    constraint = asked.constraint
    if not isinstance(constraint, dict):
        raise InvalidRequest(
            "response_format must be of JSON beside tools that may be called; leave the tools out, or set tool_choice",
            param="response_format",
        )
    return f"start: calls | answer\nanswer: %json {json_schema_source(constraint).text}\n"


def _format_of(grammar: str, state: GrammarState) -> TextGenerationResponseFormat:
    return TextGenerationResponseFormat(
        "grammar",
        grammar=grammar,
        grammar_enforced=state.enforced,
        tools_forced=state.tools_forced,
        has_json_schema=state.has_json_schema,
    )
