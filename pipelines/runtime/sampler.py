"""From logits to the next token, one sequence at a time.

Greedy, or one uniform number per token turned into a token by the inverse of the cumulative distribution. That number
is a pure function of (seed, position): Philox4x64 with the seed as key and the position as counter (Salmon et al.
2011). So the same seed gives the same text whatever else is in the batch, on whichever node, after any preemption.

Order, as in vLLM: penalties, masking of end tokens below min_new_tokens, log probabilities, temperature, min_p, top_k,
top_p. Knows nothing of models or blocks.
"""

import numpy as np
from numpy.typing import NDArray

from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext

_UINT64 = 2**64 - 1
_GREEDY_BELOW = 1e-5
"""A lower temperature means the most likely token, as in vLLM: a quotient by less soon leaves float32."""
_LARGEST_PENALISED = 1e30
"""An extreme repetition penalty moves a logit no further than this, so that differences stay finite in float32."""
_USUALLY_ENOUGH = 1024
"""Tokens that hold top_p of the probability, nearly always."""


def sample(context: TextContext, logits: NDArray[np.float32]) -> tuple[int, LogProbabilities | None]:
    """The token after `context`, from finite `logits` [vocab], which are not changed."""
    params = context.sampling_params
    if params.needs_penalties or context.below_min_new_tokens:
        logits = logits.copy()
        _penalise(logits, context)
        if context.below_min_new_tokens:
            ends = [token for token in context.eos_tracker.eos_token_ids if token < len(logits)]
            if len(ends) < len(logits):
                logits[ends] = -np.inf
    if params.top_k == 1 or params.temperature < _GREEDY_BELOW:
        token = int(np.argmax(logits))
    else:
        token = _draw(logits, params, uniform(params.seed, len(context.tokens)))
    return token, _log_probabilities(logits, token, context.log_probabilities) if context.log_probabilities else None


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the number that chooses the token at `position` of a sequence with this seed."""
    bits = np.random.Philox(key=seed & _UINT64, counter=[position, 0, 0, 0]).random_raw()
    return float(bits >> 11) * 2.0**-53


def _penalise(logits: NDArray[np.float32], context: TextContext) -> None:
    """Frequency and presence count what was generated; repetition looks at the prompt too."""
    params = context.sampling_params
    if params.repetition_penalty != 1.0:
        seen = np.unique(context.tokens.all)
        repeated = logits[seen].astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            penalised = np.where(
                repeated > 0, repeated / params.repetition_penalty, repeated * params.repetition_penalty
            )
        logits[seen] = penalised.clip(-_LARGEST_PENALISED, _LARGEST_PENALISED)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        tokens, counts = np.unique(context.tokens.all[context.original_prompt_length :], return_counts=True)
        logits[tokens] -= params.frequency_penalty * counts.astype(np.float32) + params.presence_penalty


def _draw(logits: NDArray[np.float32], params: SamplingParams, number: float) -> int:
    """The token at `number`, in [0, 1), of the cumulative distribution over the tokens that stay."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature)).astype(np.float64)  # the best has 1
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    total = float(weights.sum())
    if 0 < params.top_k < len(weights):
        tokens = _most_likely(weights, params.top_k)
        total = float(weights[tokens].sum())
    elif params.top_p < 1.0:
        tokens = _most_likely(weights, _USUALLY_ENOUGH)
        if weights[tokens].sum() < params.top_p * total:
            tokens = _most_likely(weights, len(weights))
    else:
        tokens = np.arange(len(weights))
    sums = np.cumsum(weights[tokens])
    if params.top_p < 1.0:
        # The first token that reaches top_p is the last to stay; one always does.
        sums = sums[: int(np.searchsorted(sums, params.top_p * total)) + 1]
    chosen = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return int(tokens[min(chosen, len(sums) - 1)])


def _most_likely(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The `count` most likely tokens, in falling order, equal ones by id. Partitions first: a sort of the whole
    vocabulary costs milliseconds."""
    if count < len(weights):
        lowest = np.partition(weights, len(weights) - count)[len(weights) - count]
        few = np.flatnonzero(weights >= lowest)
    else:
        few = np.arange(len(weights))
    return few[np.argsort(-weights[few], kind="stable")][:count]


def _log_probabilities(logits: NDArray[np.float32], token: int, top: int) -> LogProbabilities:
    """Of the distribution before temperature and truncation; the `top` most likely, and the sampled one."""
    largest = float(logits.max())
    normaliser = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    top = min(top, len(logits))
    best = np.argpartition(-logits, top - 1)[:top]
    best = best[np.lexsort((best, -logits[best]))]
    entries = {int(t): float(logits[t]) - normaliser for t in best}
    entries.setdefault(token, float(logits[token]) - normaliser)
    return LogProbabilities([entries[token]], [entries], [token])
