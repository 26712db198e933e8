"""JSON Schema conformance: every text drawn at random through the masks, by the real sampler, is valid by `jsonschema`.

The logits are random and favour nothing but an end of the text, so that what keeps the text valid is the mask alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import bench
from pipelines.runtime.constraints import Constraints
from pipelines.runtime.sampler import sample
from pipelines.text.grammar import json_schema_source, regex_source
from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.eos import EOSTracker
from pipelines.types.reasoning_span import ReasoningSpan
from pipelines.types.sampled_token import SampledToken
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError, InvalidRequest
from tests.fakes.tokenizer_folder import write_tokenizer_folder

SCHEMAS: dict[str, Any] = json.loads((Path(bench.__file__).parent / "grammar_schemas.json").read_text())
END = 2
VOCAB_SIZE = 320
FREE_TOKENS = 60
"""Tokens after which a draw is led towards the end of its text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(folder)


@pytest.fixture
def constraints(folder: Path) -> Iterator[Constraints]:
    made = Constraints(folder, VOCAB_SIZE)
    yield made
    made.close()


def context_of(seed: int = 0, max_tokens: int = 900, **fields: Any) -> TextContext:
    return TextContext(
        max_length=max_tokens + 1,
        tokens=TokenBuffer(np.array([5], dtype=np.int64)),
        eos_tracker=EOSTracker(eos_token_ids={END}),
        sampling_params=SamplingParams(seed=seed, temperature=1.0),
        **fields,
    )


class Logits:
    """Of a model that has no idea."""

    def __init__(self, seed: int, tokenizer: TextTokenizer) -> None:
        self._rng = np.random.default_rng(seed)
        ids = {text: tokenizer.encode(text, add_special_tokens=False)[0] for text in '"}],cat'}
        self._leads = [[ids['"']], [ids["}"], ids["]"], ids[","]]]
        self._cat = [ids[letter] for letter in "cat"]

    def after(self, num_tokens: int) -> np.ndarray:
        logits = self._rng.normal(0, 2, VOCAB_SIZE).astype(np.float32)
        if num_tokens > FREE_TOKENS:
            logits[END] += 200
            leads = [*self._leads, [self._cat[num_tokens % 3]]]
            logits[leads[self._rng.integers(3)]] += 60
        return logits


def next_token(constraints: Constraints, context: TextContext, logits: np.ndarray) -> SampledToken:
    (sampled,) = sample(context, logits, gates=constraints.gates(context))
    return sampled


def say(constraints: Constraints, context: TextContext, logits: np.ndarray) -> None:
    sampled = next_token(constraints, context, logits)
    context.update(sampled.token, sampled.log_probabilities)


def drawn(constraints: Constraints, context: TextContext, logits: Logits, tokenizer: TextTokenizer) -> str:
    while not context.is_done:
        say(constraints, context, logits.after(context.num_generated_tokens))
    return tokenizer.decode(context.tokens[1:].tolist())


@pytest.mark.conformance(13)
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_under_a_schema_is_valid(
    name: str, constraints: Constraints, tokenizer: TextTokenizer
) -> None:
    schema = SCHEMAS[name]
    judged = 0
    for seed in range(4):
        context = context_of(seed, json_schema=json_schema_source(schema).text)
        text = drawn(constraints, context, Logits(seed, tokenizer), tokenizer)
        if context.status.value == "end_of_sequence":
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            judged += 1
    assert judged >= 3, "too few texts came to their end"


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    constraints: Constraints, tokenizer: TextTokenizer
) -> None:
    schema = json_schema_source(SCHEMAS["nested_3"]).text
    whole = drawn(constraints, context_of(3, json_schema=schema), Logits(3, tokenizer), tokenizer)
    context, logits = context_of(3, json_schema=schema), Logits(3, tokenizer)
    while not context.is_done:
        say(constraints, context, logits.after(context.num_generated_tokens))
        if context.num_generated_tokens % 7 == 0 and not context.is_done:
            context.reset()
            constraints.release(context.request_id)  # on another node nothing is known of it
    assert tokenizer.decode(context.tokens[1:].tolist()) == whole


def test_log_probabilities_name_no_token_that_could_not_come(constraints: Constraints) -> None:
    context = context_of(json_schema=json_schema_source({"enum": [True, False]}).text, log_probabilities=20)
    entries = next_token(constraints, context, np.zeros(VOCAB_SIZE, dtype=np.float32)).log_probabilities
    assert entries is not None
    (top,) = entries.top_log_probabilities
    assert all(np.isfinite(value) for value in top.values())
    assert np.exp(list(top.values())).sum() == pytest.approx(1.0)


def test_the_end_comes_before_min_tokens_where_nothing_else_may(constraints: Constraints) -> None:
    context = context_of(grammar=regex_source("a").text)
    context.sampling_params.min_new_tokens = 5
    for _ in range(2):
        say(constraints, context, np.zeros(VOCAB_SIZE, dtype=np.float32))
    assert context.tokens[-1] == END


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(constraints: Constraints) -> None:
    good, bad = context_of(grammar=regex_source("a+").text), context_of(grammar="start: nowhere")
    constraints.prepare([bad, good])
    with pytest.raises(InvalidRequest, match="nowhere"):
        next_token(constraints, bad, np.zeros(VOCAB_SIZE, dtype=np.float32))
    assert next_token(constraints, good, np.zeros(VOCAB_SIZE, dtype=np.float32))


def test_a_first_token_that_breaks_the_grammar_ends_the_request(
    constraints: Constraints, tokenizer: TextTokenizer
) -> None:
    context = context_of(grammar=regex_source("[0-9]+").text)
    context.update(tokenizer.encode("x", add_special_tokens=False)[0])
    with pytest.raises(InternalError, match="does not fit"):
        next_token(constraints, context, np.zeros(VOCAB_SIZE, dtype=np.float32))


def test_a_folder_without_a_tokenizer_takes_requests_without_a_grammar(tmp_path: Path) -> None:
    constraints = Constraints(tmp_path, VOCAB_SIZE)
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    try:
        assert next_token(constraints, context_of(reasoning=ReasoningSpan(start="<t>", end="</t>")), logits)
        with pytest.raises(InvalidRequest, match="tokenizer.json"):
            next_token(constraints, context_of(grammar=regex_source("a").text), logits)
    finally:
        constraints.close()


def test_every_choice_obeys_from_its_first_token(constraints: Constraints, tokenizer: TextTokenizer) -> None:
    context = context_of(grammar=regex_source("[0-9]+").text, num_choices=5)
    firsts = sample(context, np.zeros(VOCAB_SIZE, dtype=np.float32), gates=constraints.gates(context))
    texts = [tokenizer.decode([sampled.token]) for sampled in firsts]
    assert len(texts) == 5
    assert all(text.isdigit() for text in texts)
    assert len(set(texts)) > 1
    context.update(firsts[0].token)
    sibling = context.sibling(3, firsts[3])
    assert tokenizer.decode([next_token(constraints, sibling, np.zeros(VOCAB_SIZE, dtype=np.float32)).token]).isdigit()
