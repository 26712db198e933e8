"""From logits to the next token, one sequence at a time.

Greedy, or a race: each token that stays draws an exponential time, divided by its probability, and the first one wins,
which makes each as likely as it should be (Yellott 1977, the Gumbel-max trick). The times are a pure function of seed,
position and token: Philox4x64 with the seed as key (Salmon et al. 2011). So the same seed gives the same text whatever
else is in the batch, on whichever node, after any preemption. What differs there are the last bits of logits; they
decide only where the two first are that close. (The inverse of a cumulative distribution adds those bits up over the
vocabulary: of some 300 tokens sampled from flat distributions one came out differently apart and in one process.)

Order: penalties, logit_bias, the operator's processors, masking of end tokens below min_new_tokens, the mask of a
grammar, log probabilities, temperature, min_p, top_k, top_p. Log probabilities of the prompt's tokens are of the
logits as they come. Knows nothing of models or blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.runtime.logits_processors import LogitsProcessor
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampled_token import SampledToken
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pronghorn.errors import InternalError

NO_PROCESSORS: Mapping[str, LogitsProcessor] = {}
_UINT64 = 2**64 - 1
_GREEDY_BELOW = 1e-5
"""A lower temperature means the most likely token, as in vLLM: a quotient by less soon leaves float32."""
_LARGEST_PENALISED = 1e30
"""An extreme repetition penalty moves a logit no further than this, so that differences stay finite in float32."""
_TRIES = 64
"""Tokens that may be drawn and refused by a gate at one place. More than a few never were."""
_ROWS_AT_ONCE = 32
"""Rows of a prompt whose log probabilities are found together: each takes some times its own memory meanwhile."""
_USUALLY_ENOUGH = 1024
"""Tokens that hold top_p of the probability, nearly always."""


class Gate(Protocol):
    """What a response format lets through, of one sequence."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """[vocab], or None where every token may come."""

    def accept(self, token: int) -> bool:
        """Go on by `token`; False, and nothing has happened, where it may not come after all."""


def sample(
    context: TextContext,
    logits: NDArray[np.float32],
    processors: Mapping[str, LogitsProcessor] = NO_PROCESSORS,
    gates: Sequence[Gate] = (),
) -> list[SampledToken]:
    """The token after `context`, from finite `logits` [vocab], which are not changed.

    Behind the prompt of a request for several choices: the first tokens of all of them, in order. `gates` are theirs,
    or there are none. Raises InternalError where a processor fails or no gate lets anything through, and what gates
    raise.
    """
    logits = _adjusted(context, logits, processors)
    params = [context.sampling_params.for_choice(choice) for choice in range(first_tokens(context))]
    if not gates:
        return [_sample(context, logits, of_choice) for of_choice in params]
    return [_sample_through(gate, context, logits, p) for gate, p in zip(gates, params, strict=True)]


def first_tokens(context: TextContext) -> int:
    """How many tokens `sample` draws: one of each choice behind the prompt, one elsewhere."""
    return context.num_choices if context.num_generated_tokens == 0 else 1


def _sample_through(
    gate: Gate, context: TextContext, logits: NDArray[np.float32], params: SamplingParams
) -> SampledToken:
    allowed = gate.allowed()
    for _ in range(_TRIES):
        if allowed is not None and not allowed.any():
            break
        sampled = _sample(context, logits if allowed is None else _masked(logits, allowed), params)
        if gate.accept(sampled.token):
            return sampled
        allowed = np.ones(len(logits), dtype=np.bool_) if allowed is None else allowed
        allowed[sampled.token] = False
    raise InternalError(
        f"no token follows token {context.num_generated_tokens} of the answer under the request's response format"
    )


def _masked(logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """An end token that alone may come goes before min_new_tokens, which forbade it."""
    masked = np.where(allowed, logits, np.float32(-np.inf))
    if not np.isfinite(masked).any():
        masked = np.where(allowed, np.float32(0.0), np.float32(-np.inf))
    return masked


def _sample(context: TextContext, logits: NDArray[np.float32], params: SamplingParams) -> SampledToken:
    temperature = context.temperature
    if params.top_k == 1 or temperature < _GREEDY_BELOW:
        token = int(np.argmax(logits))
    else:
        token = _draw(logits, params, temperature, uniforms(params.seed, len(context.tokens), len(logits)))
    top = context.log_probabilities
    return SampledToken(token, _log_probabilities(logits[None], [token], top) if top else None)


def prompt_log_probabilities(logits: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> LogProbabilities:
    """Of `tokens` [n], each under its row of `logits` [n, vocab]: what the model thought of the prompt that it read."""
    whole = LogProbabilities([], [], [])
    for first in range(0, len(tokens), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        part = _log_probabilities(logits[rows], tokens[rows].tolist(), top)
        whole.token_log_probabilities += part.token_log_probabilities
        whole.top_log_probabilities += part.top_log_probabilities
        whole.sampled_token_ids += part.sampled_token_ids
    return whole


def _adjusted(
    context: TextContext, logits: NDArray[np.float32], processors: Mapping[str, LogitsProcessor]
) -> NDArray[np.float32]:
    params = context.sampling_params
    names, masked = params.logits_processors or (), context.below_min_new_tokens
    if not (params.needs_penalties or params.logit_bias or names or masked):
        return logits
    logits = logits.copy()
    _penalise(logits, context)
    for token, bias in (params.logit_bias or {}).items():
        if token < len(logits):
            logits[token] += bias
    for name in names:
        _process(name, processors[name], context, logits)
    if masked:
        ends = [token for token in context.eos_tracker.eos_token_ids if token < len(logits)]
        if len(ends) < len(logits):
            logits[ends] = -np.inf
    return logits


def _process(name: str, processor: LogitsProcessor, context: TextContext, logits: NDArray[np.float32]) -> None:
    try:
        processor(context.tokens.all, context.original_prompt_length, logits)
    except Exception as error:  # somebody else's code, which must not end the engine
        raise InternalError(f"the logits processor {name!r} failed: {error!r}") from error
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise InternalError(f"the logits processor {name!r} left no logits to choose by")


def uniforms(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """In [0, 1), one for each of the first `count` tokens: the numbers that choose the token at `position` of a
    sequence with this seed."""
    return np.random.Generator(np.random.Philox(key=seed & _UINT64, counter=[0, position, 0, 0])).random(count)


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


def _draw(logits: NDArray[np.float32], params: SamplingParams, temperature: float, numbers: NDArray[np.float64]) -> int:
    """The winner among the tokens that stay; `numbers` are in [0, 1), one a token of the vocabulary."""
    weights = np.exp((logits - logits.max()) / np.float32(temperature)).astype(np.float64)  # the best has 1
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
        tokens = np.flatnonzero(weights)
    if params.top_p < 1.0:
        # The first token that reaches top_p is the last to stay; one always does.
        sums = np.cumsum(weights[tokens])
        tokens = tokens[: int(np.searchsorted(sums, params.top_p * total)) + 1]
    staying = weights[tokens]
    if not staying.all():
        tokens, staying = tokens[staying > 0.0], staying[staying > 0.0]
    return int(tokens[_first_to_arrive(numbers[tokens], staying)])


def _first_to_arrive(numbers: NDArray[np.float64], weights: NDArray[np.float64]) -> int:
    """The least -log(1 - number) / weight; weights are above 0. Since -log(1 - x) is at least x, a quotient rules
    nearly all out before a logarithm is taken, of which a vocabulary's worth would cost most of the draw."""
    least = numbers / weights
    early = int(np.argmin(least))
    few = np.flatnonzero(least <= -np.log1p(-numbers[early]) / weights[early])
    return int(few[np.argmin(-np.log1p(-numbers[few]) / weights[few])])


def _most_likely(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The `count` most likely tokens, in falling order, equal ones by id. Partitions first: a sort of the whole
    vocabulary costs milliseconds."""
    if count < len(weights):
        lowest = np.partition(weights, len(weights) - count)[len(weights) - count]
        few = np.flatnonzero(weights >= lowest)
    else:
        few = np.arange(len(weights))
    return few[np.argsort(-weights[few], kind="stable")][:count]


def _log_probabilities(logits: NDArray[np.float32], tokens: list[int], top: int) -> LogProbabilities:
    """Of the distributions before temperature and truncation, [n, vocab]; the `top` most likely of each, and its
    token."""
    largest = logits.max(axis=1)
    exponentials = np.exp(logits - largest[:, None], dtype=np.float32)
    normalisers = largest.astype(np.float64) + np.log(exponentials.sum(axis=1, dtype=np.float64))
    top = min(top, logits.shape[1])
    best = np.argpartition(-logits, top - 1, axis=1)[:, :top]
    entries: list[dict[int, float]] = []
    for row, normaliser, few, token in zip(logits, normalisers, best, tokens, strict=True):
        few = few[np.lexsort((few, -row[few]))]
        of_row = {int(t): float(row[t]) - float(normaliser) for t in few if np.isfinite(row[t])}
        of_row.setdefault(token, float(row[token]) - float(normaliser))
        entries.append(of_row)
    return LogProbabilities([e[t] for e, t in zip(entries, tokens, strict=True)], entries, tokens)
