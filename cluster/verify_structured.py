"""Structured output, tools and thinking as features of `pronghorn verify parity --features`.

Knows how each is asked for, as a context. Answers are short and mostly cut off, so that beginnings are compared
above all; the models would say nothing of this by themselves, so that it is the masks that are held equal.
"""

from typing import Any

from cluster.verify_features import Case, Feature
from pipelines.text.grammar import json_schema_source, regex_source
from pipelines.text.tool_format import TOOL_FORMATS, Tool
from pipelines.types.grammar_state import GrammarState
from pipelines.types.reasoning_span import ReasoningSpan

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -20, "maximum": 900},
        "kind": {"enum": ["x", "yes", "no"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TOOLS = [Tool("look", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}), Tool("go", {})]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def structured_features() -> list[Feature]:
    schema = {"json_schema": json_schema_source(SCHEMA).text}
    value = {"json_schema": json_schema_source({}).text}
    digits = {"grammar": regex_source("([0-9]{2}-)*[a-f]").text}
    return [
        Feature("json_schema", lambda c: c.context(more=schema)),
        Feature("json_schema, seeded, with logprobs", lambda c: _warm(c, schema | {"log_probabilities": 4})),
        Feature("json_schema of any value", lambda c: _warm(c, value)),
        Feature("regex", lambda c: _warm(c, digits)),
        Feature("regex with n", lambda c: _warm(c, digits | {"num_choices": 3})),
        Feature("regex with min_tokens and penalties", lambda c: _bent(c, digits)),
        *(Feature(f"tools required: {name}", lambda c, name=name: _warm(c, _calls(name))) for name in TOOL_FORMATS),  # type: ignore[misc]  # a name of its own each
        Feature("tools auto, woken by the text", lambda c: _warm(c, _dormant())),
        Feature("thinking with a budget", lambda c: c.context(more=_thinking(3))),
        Feature("thinking, then json_schema", lambda c: _warm(c, schema | _thinking(2))),
    ]


def _warm(case: Case, more: dict[str, Any]) -> Any:
    return case.context(temperature=1.1, more=more)


def _bent(case: Case, more: dict[str, Any]) -> Any:
    return case.context(temperature=0.8, min_new_tokens=4, presence_penalty=1.0, more=more)


def _calls(name: str) -> dict[str, Any]:
    rules = TOOL_FORMATS[name].calls(TOOLS, lambda mark: f'"{mark}"', True)
    state = GrammarState(enforced=True, tools_forced=True)
    return {"grammar": "start: calls\n" + rules, "grammar_state": state}


def _dormant() -> dict[str, Any]:
    """The first small letter begins a call."""
    return {"grammar": 'start: /[a-z]/ ":" /[0-9]{2}/', "grammar_state": GrammarState(triggers=list(LETTERS))}


def _thinking(budget: int) -> dict[str, Any]:
    span = ReasoningSpan(start="<think>", end="</think>", max_tokens=budget)
    return {"in_reasoning_phase": True, "reasoning": span}
