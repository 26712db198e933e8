"""What a chat body says about thinking: variables of the template, a budget, what is told of it.

Precedence, highest first: `chat_template_kwargs`, `reasoning_effort`, `reasoning`, `thinking`. Effort "none" and a bare
`reasoning: {}` turn thinking off.
"""

from typing import Any

from orchestrator.api.schema import ChatCompletionRequest

ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


def template_options(body: ChatCompletionRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    asked = body.reasoning
    effort = body.reasoning_effort or (asked.effort if asked is not None else None)
    if body.thinking is not None:
        options |= OFF if body.thinking.type == "disabled" else ON
    if asked is not None and asked.enabled is not None:
        options |= ON if asked.enabled else OFF
    if effort == "none" or (asked is not None and not asked.model_fields_set and body.reasoning_effort is None):
        options |= OFF
    elif effort is not None:
        options["reasoning_effort"] = effort
    return options | (body.chat_template_kwargs or {})
