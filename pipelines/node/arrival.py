"""What a node asks of a request before its engine hears of it.

An engine computes a whole batch at once, so that what breaks it fails everybody's requests. What another process says
is therefore checked at the door against what the engine can do; whoever sent it is told the field, the value and the
bound. Pure: knows contexts and the engine's own word, neither streams nor blocks.
"""

import math

from pipelines.runtime.messages import EngineReady
from pipelines.types.text_context import TextContext
from pronghorn.errors import InvalidRequest


def check_arrival(context: TextContext, budget_s: float, engine: EngineReady) -> None:
    """Raises InvalidRequest for what `engine` cannot compute, and for a budget that would never end."""
    if not math.isfinite(budget_s):
        raise InvalidRequest(f"budget_s is {budget_s}; it must be a finite number of seconds", param="budget_s")
    tokens = context.tokens.all
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < engine.vocab_size:
            raise InvalidRequest(
                f"the prompt has token {token}; this engine's are 0 to {engine.vocab_size - 1}", param="tokens"
            )
    if context.max_length > engine.max_length:
        raise InvalidRequest(
            f"max_length is {context.max_length}; this engine's is {engine.max_length}", param="max_length"
        )
    if context.is_done:
        raise InvalidRequest(f"the request is over already: its status is {context.status.name}", param="status")


def check_window(context: TextContext) -> None:
    """Raises InvalidRequest unless all of the prompt is still to be computed."""
    tokens = context.tokens
    if tokens.active_length != len(tokens):
        raise InvalidRequest(
            f"the window is {tokens.active_length} of {len(tokens)} tokens; a new request's is all of them",
            param="tokens",
        )
