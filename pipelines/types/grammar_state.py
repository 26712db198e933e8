"""How far a request's response format is enforced at this point of its text."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class GrammarState:
    """Plain data, so that it crosses with the context. The matcher itself belongs to the process that samples, which
    makes it anew from this and the tokens generated so far: nothing here changes while a sequence runs.

    A context with a grammar and no state is enforced from its first token.
    """

    enforced: bool = False
    """Tokens are masked from the first on. Off while a tool grammar lies dormant."""
    tools_forced: bool = False
    """A tool call must come: enforcement starts where thinking ends."""
    has_json_schema: bool = False
    """Text that is no tool call must follow the schema: likewise."""
    triggers: list[str] = field(default_factory=list)
    """A dormant grammar wakes where one of these appears, and its text starts with it."""
    triggers_at_start: list[str] = field(default_factory=list)
    """The same, where the answer begins with it."""
    repeats: bool = True
    """Once its text is complete a grammar that was woken lies dormant again; else nothing but the end may follow."""
