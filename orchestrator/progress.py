"""What one request has delivered, and how another node goes on from there.

Pure. One sequence goes on from prompt and delivered tokens as one prompt, as after a preemption, with the place where
generated text begins kept: positions, penalties, bounds and grammars are those of a request that never moved. Several
choices share one prompt and have come to different places; they are generated again from the prompt, which their seeds
make the same, and only what was not delivered yet leaves here.

Invariants: each token of each choice leaves once, in order. A replay that says another token than was delivered is
found before anything of it leaves.
"""

from dataclasses import replace

import numpy as np

from pipelines.types.frames import Delta
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import TokenBuffer


class Progress:
    def __init__(self, context: TextContext) -> None:
        self._context = context
        self._delivered: list[list[int]] = [[] for _ in range(context.num_choices)]
        self._ended: set[int] = set()
        self._said = [0] * context.num_choices
        """Tokens of each choice that the current attempt has said, or begins behind."""
        self._cached_told = False
        self._prompt_told = False

    @property
    def begun(self) -> bool:
        return any(self._delivered)

    @property
    def said_tokens(self) -> int:
        """What was delivered of the choice that has said most."""
        return max(map(len, self._delivered))

    @property
    def _replays(self) -> bool:
        return self._context.num_choices > 1

    # --- another attempt ---

    @property
    def tokens(self) -> int:
        """How many the next attempt has to compute before it can say a token."""
        return len(self._context.tokens) + (0 if self._replays else len(self._delivered[0]))

    def context(self) -> TextContext:
        """What the next attempt is sent. The request's own context is left as it is."""
        if self._replays:
            self._said = [0] * len(self._said)
            return self._context
        self._said = [len(self._delivered[0])]
        if not self.begun:
            return self._context
        tokens = np.concatenate([self._context.tokens.all, np.array(self._delivered[0], dtype=np.int64)])
        return replace(self._context, tokens=TokenBuffer(tokens))

    def status(self) -> GenerationStatus:
        """Whether the delivered tokens end the request, though no node has lived to say so."""
        if self._replays or not self.begun:
            return GenerationStatus.ACTIVE
        if self._context.eos_tracker.is_eos(np.array(self._delivered[0], dtype=np.int64)):
            return GenerationStatus.END_OF_SEQUENCE
        full = len(self._context.tokens) + len(self._delivered[0]) >= self._context.max_length
        return GenerationStatus.MAXIMUM_LENGTH if full else GenerationStatus.ACTIVE

    # --- what an attempt says ---

    def diverges(self, delta: Delta) -> bool:
        """Whether the current attempt says of a place something else than was delivered there."""
        said = self._said[delta.choice]
        known = self._delivered[delta.choice][said : said + len(delta.tokens)]
        return delta.tokens[: len(known)] != known

    def fresh(self, delta: Delta) -> int:
        """How many of its tokens were not delivered before."""
        known = len(self._delivered[delta.choice]) - self._said[delta.choice]
        return max(0, len(delta.tokens) - known)

    def take(self, delta: Delta) -> TextGenerationOutput | None:
        """What is to leave of what the current attempt says; None where all of that has left before."""
        choice, fresh = delta.choice, self.fresh(delta)
        self._said[choice] += len(delta.tokens)
        skipped = len(delta.tokens) - fresh
        ended = delta.choice_status is not None or delta.status.is_done
        last_word = delta.status.is_done or (ended and choice not in self._ended)
        if skipped and not fresh and not last_word:
            return None
        self._delivered[choice] += delta.tokens[skipped:]
        if ended:
            self._ended.add(choice)
        output = TextGenerationOutput(
            request_id=self._context.request_id,
            tokens=delta.tokens[skipped:],
            final_status=delta.choice_status or delta.status,
            log_probabilities=_behind(delta.log_probabilities, skipped),
            # Of the prompt; what a later node finds cached includes what an earlier one has generated.
            num_cached_tokens=None if self._cached_told else delta.num_cached_tokens,
            choice=choice,
            prompt_log_probabilities=None if self._prompt_told else delta.prompt_log_probabilities,
        )
        self._cached_told = self._cached_told or delta.num_cached_tokens is not None
        self._prompt_told = self._prompt_told or delta.prompt_log_probabilities is not None
        return output


def _behind(entries: list[LogProbabilities] | None, skipped: int) -> list[LogProbabilities] | None:
    """One entry a token."""
    return None if entries is None else entries[skipped:] or None
