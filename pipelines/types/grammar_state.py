"""How far a request's response format is enforced at this point of its text."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class GrammarState:
    """Plain data, so that it crosses with the context. The matcher itself belongs to the process that samples."""

    enforced: bool = False
    """Tokens are masked now. Off while a tool grammar lies dormant, and inside a thinking region."""
    tools_forced: bool = False
    """A tool call must come: enforcement starts where thinking ends."""
    has_json_schema: bool = False
    """Text that is no tool call must follow the schema: likewise."""
