"""What one sequence carries between steps that draft tokens and verify them."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SpeculativeDecodingState:
    draft_tokens_to_verify: list[int] = field(default_factory=list)
    """Proposed by the draft; the next step tells which of them the model would have chosen."""
    maybe_accepted_draft_tokens: list[int] = field(default_factory=list)
    """Verified on the device, whose answer has not come back yet."""
