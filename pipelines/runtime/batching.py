"""What fits in one step: the token budget that both schedulers fill, and the chunks that it cuts.

Knows contexts' windows. Must not know blocks, queues or events.
Invariants: the windows taken add up to `max_input_tokens` at most; only the last one taken can be a chunk.
"""

from pipelines.types.text_context import TextContext


class StepBudget:
    def __init__(self, max_input_tokens: int) -> None:
        self.tokens_left = max_input_tokens

    def take(self, context: TextContext) -> bool:
        """Put `context`'s active window into the step, cut to what is left of the budget. False where nothing is."""
        if self.tokens_left == 0:
            return False
        if context.tokens.active_length > self.tokens_left:
            context.tokens.chunk(self.tokens_left)
        self.tokens_left -= context.tokens.active_length
        return True


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
