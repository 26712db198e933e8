"""How a family of models writes tool calls: the parser that reads them, the grammar that enforces them, and the words
that ask for them where the chat template has none.

Knows JSON schemas of tools as text; neither requests nor HTTP. A grammar holds calls to the declared tools only, each
with arguments that follow its schema; one call, or several where the request allows that.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.text.grammar import rooted
from pipelines.text.tool_parsers import hermes, llama3_json, mistral, pythonic
from pipelines.text.tool_parsers.tool_parser import NewId, ToolParser
from pronghorn.errors import ConfigurationError

Literal = Callable[[str], str]
"""A mark as a term of a grammar (`GrammarCompiler.literal`)."""


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    description: str = ""

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    name: str
    new_parser: Callable[[NewId], ToolParser]
    calls: Callable[[Sequence[Tool], Literal, bool], str]
    """(tools, literal, several allowed) -> rules of a grammar in Lark's notation; `calls` is one call or more."""
    asks: Callable[[Sequence[Tool]], str]
    """A system turn that shows the tools."""
    writes: Callable[[str, str], str]
    """(name, arguments as JSON text) -> a call as the model would have written it."""
    triggers: tuple[str, ...] = ()
    starts: Callable[[Sequence[Tool]], list[str]] = field(default=lambda tools: [])
    """What makes the beginning of an answer a call."""
    wakes_per_call: bool = False
    """Every call has marks of its own, with free text between."""
    marks: tuple[str, ...] = ()
    """Which may be special tokens of the vocabulary: the parser must see them."""


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called `name`; "auto": the one whose marks the chat template knows, Llama's where it knows none;
    "none": none. Raises ConfigurationError for any other name."""
    if name == "none":
        return None
    if name == "auto":
        source = template or ""
        known = (f for f in TOOL_FORMATS.values() if any(mark in source for mark in f.marks))
        fallback = HERMES if "<|im_start|>" in source else LLAMA3_JSON
        return next(known, fallback)
    if name not in TOOL_FORMATS:
        raise ConfigurationError(
            f"tool_parser is {name!r}; it must be auto, none, {', '.join(TOOL_FORMATS)}", param="tool_parser"
        )
    return TOOL_FORMATS[name]


# --- grammars --------------------------------------------------------------------------------------------------------

_BLANKS = "WS: /[ \\n]{0,2}/\n"


def _object_rules(tools: Sequence[Tool], arguments_key: str) -> str:
    """`call`: an object with the name of one of the tools and its arguments. Each schema is a grammar of its own, so
    that its references count from its own root."""
    alternatives = []
    rules = ""
    for index, tool in enumerate(tools):
        head = json.dumps('"name":'), json.dumps(json.dumps(tool.name)), json.dumps(f'"{arguments_key}":')
        alternatives.append(f'"{{" WS {head[0]} WS {head[1]} "," WS {head[2]} WS arguments_{index} WS "}}"')
        rules += f"arguments_{index}: %json {json.dumps(rooted(_of_object(tool.parameters)))}\n"
    return f"object: {' | '.join(alternatives)}\n" + rules + _BLANKS


def _hermes_calls(tools: Sequence[Tool], literal: Literal, several: bool) -> str:
    call = f"call: {literal(hermes.START)} WS object WS {literal(hermes.END)}\n"
    return f"calls: call{' (WS call)*' if several else ''}\n" + call + _object_rules(tools, "arguments")


def _llama_calls(tools: Sequence[Tool], literal: Literal, several: bool) -> str:
    more = ' (";" WS object)*' if several else ""
    return f"calls: {literal(llama3_json.START)}? object{more}\n" + _object_rules(tools, "parameters")


def _mistral_calls(tools: Sequence[Tool], literal: Literal, several: bool) -> str:
    more = ' ("," WS object)*' if several else ""
    return f'calls: {literal(mistral.START)} WS "[" WS object{more} WS "]"\n' + _object_rules(tools, "arguments")


def _of_object(parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where a schema does not say so."""
    shaped = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & parameters.keys()
    return parameters if shaped else {"type": "object"} | parameters


_PYTHON_RULES = """value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value ("," " "? value)*)? "]"
dict: "{" (STRING ":" " "? value ("," " "? STRING ":" " "? value)*)? "}"
STRING: /"([^"\\\\\\x00-\\x1f]|\\\\[\\\\"nt])*"/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?/
"""

_PYTHON_TYPES = {"string": "STRING", "number": "NUMBER", "boolean": '("True" | "False")', "null": '"None"'}
_PYTHON_TYPES |= {"integer": "/-?(0|[1-9][0-9]{0,30})/", "array": "list", "object": "dict"}


def _pythonic_calls(tools: Sequence[Tool], literal: Literal, several: bool) -> str:
    """Arguments by name, in the schema's order, each of the type that the schema names; what the schema says beyond
    that is not enforced in this notation."""
    more = ' (", " call)*' if several else ""
    rules = [f'calls: "[" call{more} "]"', "call: " + _alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        rules.append(f'call_{index}: {json.dumps(tool.name + "(")} {_python_arguments(tool.parameters)} ")"')
    return "\n".join(rules) + "\n" + _PYTHON_RULES


def _python_arguments(schema: dict[str, Any]) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ""
    required = [name for name in properties if name in (schema.get("required") or [])]
    optional = [name for name in properties if name not in required]
    terms = [_python_argument(name, properties[name]) for name in required]
    more = [_python_argument(name, properties[name]) for name in optional]
    first = ' ", " '.join(terms)
    if first:
        return " ".join([first, *(f'(", " {term})?' for term in more)])
    # Without a required one, any of the optional ones may be the first.
    tails = [" ".join([term, *(f'(", " {later})?' for later in more[i + 1 :])]) for i, term in enumerate(more)]
    return f"({' | '.join(tails)})?" if tails else ""


def _python_argument(name: str, schema: object) -> str:
    value = "value"
    if isinstance(schema, dict):
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            value = f"({' | '.join(json.dumps(repr(choice)) for choice in schema['enum'])})"
        elif isinstance(schema.get("type"), str):
            value = _PYTHON_TYPES.get(schema["type"], "value")
    return f"{json.dumps(name + '=')} {value}"


def _alternatives(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(count))


# --- words -----------------------------------------------------------------------------------------------------------


def _shown(tools: Sequence[Tool]) -> str:
    return "\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in tools)


def _hermes_asks(tools: Sequence[Tool]) -> str:
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{_shown(tools)}\n</tools>"
        "\n\nFor each function call, return a json object with function name and arguments within "
        f'{hermes.START}{hermes.END} XML tags:\n{hermes.START}\n{{"name": <function-name>, "arguments": '
        f"<args-json-object>}}\n{hermes.END}"
    )


def _llama_asks(tools: Sequence[Tool]) -> str:
    return (
        "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
        'best answers the given prompt. Respond in the format {"name": function name, "parameters": dictionary of '
        f"argument name and its value}}. Do not use variables.\n\n{_shown(tools)}"
    )


def _mistral_asks(tools: Sequence[Tool]) -> str:
    return (
        f"You may call these functions by writing {mistral.START} and then a JSON list of calls, each "
        f'{{"name": ..., "arguments": {{...}}}}:\n\n{_shown(tools)}'
    )


def _pythonic_asks(tools: Sequence[Tool]) -> str:
    return (
        "You may call these functions. If you call any, answer with nothing but a list of calls, "
        f"[func_name1(params_name1=params_value1, ...), func_name2(params)]:\n\n{_shown(tools)}"
    )


def _object_text(name: str, arguments: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def _pythonic_writes(name: str, arguments: str) -> str:
    values = json.loads(arguments)
    written = ", ".join(f"{key}={value!r}" for key, value in values.items()) if isinstance(values, dict) else ""
    return f"[{name}({written})]"


HERMES = ToolFormat(
    "hermes",
    hermes.HermesParser,
    _hermes_calls,
    _hermes_asks,
    lambda name, arguments: f"{hermes.START}\n{_object_text(name, arguments, 'arguments')}\n{hermes.END}",
    triggers=(hermes.START,),
    wakes_per_call=True,
    marks=(hermes.START, hermes.END),
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    llama3_json.Llama3JsonParser,
    _llama_calls,
    _llama_asks,
    lambda name, arguments: _object_text(name, arguments, "parameters"),
    triggers=(llama3_json.START,),
    starts=lambda tools: ['{"name":', '{ "name":'],
    marks=(llama3_json.START,),
)
MISTRAL = ToolFormat(
    "mistral",
    mistral.MistralParser,
    _mistral_calls,
    _mistral_asks,
    lambda name, arguments: f"{mistral.START}[{_object_text(name, arguments, 'arguments')}]",
    triggers=(mistral.START,),
    marks=(mistral.START, mistral.ARGS),
)
PYTHONIC = ToolFormat(
    "pythonic",
    pythonic.PythonicParser,
    _pythonic_calls,
    _pythonic_asks,
    _pythonic_writes,
    starts=lambda tools: [f"[{tool.name}(" for tool in tools],
)
TOOL_FORMATS = {format.name: format for format in (HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC)}
