"""Messages to the text that a model was trained to see, by the Jinja template in its folder.

Rendering is transformers' own: a sandbox that cannot change what it is given nor reach Python's internals. The template
comes from the operator's folder, never from a request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from pronghorn.errors import ConfigurationError, InvalidRequest

_RESERVED = frozenset({"conversations", "messages", "tools", "chat_template", "return_assistant_tokens_mask"})
"""Arguments of the renderer that a request's options must not replace."""

_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What a template can raise over messages that it was not written for."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template, `bos_token` and so on. Raises ConfigurationError where the
        template is not Jinja."""
        self.source = source
        """Jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._render([{"role": "user", "content": ""}], None, {})
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"the model's chat template is broken: {error}") from error
        except _TEMPLATE_FAULTS:
            pass  # it compiles; that it refuses this one message says nothing

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """`options` are further variables; `add_generation_prompt` is true unless they say otherwise. Raises
        InvalidRequest with the template's reason."""
        reserved = sorted(_RESERVED & set(options or {}))
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
        try:
            return self._render(messages, tools, options or {})
        except _TEMPLATE_FAULTS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", param="messages") from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        variables: dict[str, Any] = {"add_generation_prompt": True} | self._special_tokens | dict(options)
        rendered, _ = render_jinja_template(
            [list(messages)], tools=list(tools) if tools else None, chat_template=self.source, **variables
        )
        text: str = rendered[0]
        return text
