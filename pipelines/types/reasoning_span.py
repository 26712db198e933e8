"""How a model marks its thinking in the text that it generates."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ReasoningSpan:
    """Plain data, so that it crosses with the context. The marks are texts: how they fall into tokens is no matter."""

    start: str
    end: str
    max_tokens: int | None = None
    """Tokens that thinking may take before its end is forced; None: as many as it likes."""
