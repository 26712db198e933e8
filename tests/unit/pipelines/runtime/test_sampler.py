from typing import Any

import numpy as np
import pytest

from pipelines.runtime.logits_processors import LogitsProcessor
from pipelines.runtime.sampler import prompt_log_probabilities, uniforms
from pipelines.runtime.sampler import sample as sample_choices
from pipelines.text.thinking_region import ThinkingMarkers
from pipelines.types.eos import EOSTracker
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import InternalError
from tests.fakes import logits_processors

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], dtype=np.float32))


def context_of(prompt: list[int] | None = None, generated: list[int] | None = None, **params: Any) -> TextContext:
    context = TextContext(
        max_length=1000,
        tokens=TokenBuffer(np.array(prompt or [0], dtype=np.int64)),
        sampling_params=SamplingParams(**({"seed": 11} | params)),
        eos_tracker=EOSTracker(eos_token_ids={999}),
    )
    for token in generated or []:
        context.tokens.advance_with_token(token)
    return context


def sample(context: TextContext, logits: np.ndarray) -> tuple[int, LogProbabilities | None]:
    """The one token of a request for one sequence."""
    (sampled,) = sample_choices(context, logits)
    return sampled.token, sampled.log_probabilities


def drawn(logits: np.ndarray, count: int = 2000, **params: Any) -> np.ndarray:
    """How often each token comes, over seeds."""
    tokens = [sample(context_of(**params, seed=seed), logits)[0] for seed in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


class TestChoice:
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
    def test_greedy_takes_the_best_whatever_the_seed(self, params: dict[str, Any]) -> None:
        assert {sample(context_of(**params, seed=seed), LOGITS)[0] for seed in range(50)} == {0}

    def test_plain_sampling_follows_the_distribution(self) -> None:
        np.testing.assert_allclose(drawn(LOGITS), np.exp(LOGITS), atol=0.04)

    def test_temperature_sharpens(self) -> None:
        sharp = np.exp(LOGITS * 2)
        np.testing.assert_allclose(drawn(LOGITS, temperature=0.5), sharp / sharp.sum(), atol=0.04)

    def test_top_k_keeps_the_k_best(self) -> None:
        np.testing.assert_allclose(drawn(LOGITS, top_k=2), np.array([5, 2, 0, 0, 0]) / 7, atol=0.04)

    def test_top_k_keeps_k_among_equals(self) -> None:
        assert np.count_nonzero(drawn(np.zeros(5, dtype=np.float32), top_k=2)) == 2

    def test_top_p_keeps_the_least_that_reach_it(self) -> None:
        np.testing.assert_allclose(drawn(LOGITS, top_p=0.69), np.array([5, 2, 0, 0, 0]) / 7, atol=0.04)

    def test_top_p_holds_in_a_flat_vocabulary(self) -> None:
        flat = np.zeros(5000, dtype=np.float32)
        tokens = {sample(context_of(top_p=0.9, seed=seed), flat)[0] for seed in range(300)}
        assert max(tokens) < 4501
        assert max(tokens) > 2000

    def test_min_p_drops_what_is_far_below_the_best(self) -> None:
        np.testing.assert_allclose(drawn(LOGITS, min_p=0.35), np.array([5, 2, 0, 0, 0]) / 7, atol=0.04)

    def test_the_logits_are_not_changed(self) -> None:
        before = LOGITS.copy()
        sample(context_of(generated=[1], frequency_penalty=1.0, temperature=0.7, min_p=0.1, top_p=0.9), LOGITS)
        np.testing.assert_array_equal(LOGITS, before)


class TestRandomness:
    def test_the_numbers_are_a_function_of_seed_position_and_token(self) -> None:
        np.testing.assert_array_equal(uniforms(5, 17, 9), uniforms(5, 17, 12)[:9])
        numbers = np.concatenate([uniforms(seed, position, 9) for seed in range(20) for position in range(20)])
        assert len(set(numbers)) == len(numbers)
        assert 0.0 <= min(numbers) < max(numbers) < 1.0
        assert abs(np.mean(numbers) - 0.5) < 0.03

    @pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.2}])
    def test_the_last_bits_of_logits_decide_next_to_nothing(self, params: dict[str, float]) -> None:
        """Another batch, another chunk or another node rounds otherwise."""
        random = np.random.default_rng(3)
        changed = 0
        for seed in range(150):
            flat = random.normal(scale=0.5, size=20_000).astype(np.float32)
            noisy = flat + random.normal(scale=1e-5, size=20_000).astype(np.float32)
            changed += (
                sample(context_of(seed=seed, **params), flat)[0] != sample(context_of(seed=seed, **params), noisy)[0]
            )
        assert changed == 0

    @pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
    def test_any_64_bit_seed_works(self, seed: int) -> None:
        assert 0.0 <= uniforms(seed, 0, 1)[0] < 1.0

    def test_preemption_does_not_change_the_draw(self) -> None:
        fresh, reset = context_of([1, 2], [3, 4]), context_of([1, 2], [3, 4])
        reset.reset()
        assert sample(fresh, LOGITS) == sample(reset, LOGITS)


class TestPenalties:
    def penalised(self, context: TextContext, logits: list[float]) -> list[float]:
        """The logits after penalties, seen through the log probabilities."""
        context.log_probabilities = len(logits)
        _, logprobs = sample(context, np.array(logits, dtype=np.float32))
        assert logprobs is not None
        return [logprobs.top_log_probabilities[0][token] for token in range(len(logits))]

    def test_frequency_and_presence_count_generated_tokens_alone(self) -> None:
        context = context_of([0, 0, 3], [1, 1, 2], frequency_penalty=0.5, presence_penalty=0.25)
        values = self.penalised(context, [1.0, 1.0, 1.0, 1.0])
        np.testing.assert_allclose(np.array(values) - values[0], [0.0, -1.25, -0.75, 0.0], atol=1e-6)

    def test_repetition_looks_at_the_prompt_too(self) -> None:
        context = context_of([0], [1], repetition_penalty=2.0)
        values = self.penalised(context, [1.0, -1.0, 1.0, -1.0])
        np.testing.assert_allclose(np.array(values) - values[2], [-0.5, -3.0, 0.0, -2.0], atol=1e-6)

    def test_preemption_keeps_generated_tokens_generated(self) -> None:
        context = context_of([0], [1, 1], frequency_penalty=1.0)
        context.reset()
        values = self.penalised(context, [1.0, 1.0])
        np.testing.assert_allclose(values[1] - values[0], -2.0, atol=1e-6)

    def test_an_end_token_waits_for_min_new_tokens(self) -> None:
        context = context_of([3], [1], temperature=0.0, min_new_tokens=2)
        context.eos_tracker.eos_token_ids = {0}
        assert sample(context, LOGITS)[0] == 1
        context.tokens.advance_with_token(1)
        assert sample(context, LOGITS)[0] == 0


class TestLogProbabilities:
    def test_off_by_default(self) -> None:
        assert sample(context_of(), LOGITS)[1] is None

    def test_the_most_likely_and_the_sampled_one(self) -> None:
        context = context_of(temperature=2.0, seed=3)
        context.log_probabilities = 2
        for seed in range(20):
            context.sampling_params.seed = seed
            token, found = sample(context, LOGITS)
            assert found is not None
            (top,) = found.top_log_probabilities
            assert set(top) == {0, 1, token}
            assert found.sampled_token_ids == [token]
            assert found.token_log_probabilities == [top[token]]
            np.testing.assert_allclose(top[token], LOGITS[token], atol=1e-6)

    def test_more_than_the_vocabulary_gives_all_of_it(self) -> None:
        context = context_of()
        context.log_probabilities = 20
        _, found = sample(context, LOGITS)
        assert found is not None
        assert len(found.top_log_probabilities[0]) == len(LOGITS)


class TestExtremes:
    @pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-20, 1e-6])
    def test_a_temperature_that_float32_hardly_knows_is_greedy(self, temperature: float) -> None:
        assert {sample(context_of(temperature=temperature, seed=seed), LOGITS)[0] for seed in range(20)} == {0}

    @pytest.mark.parametrize("temperature", [1e-5, 1e-3])
    def test_a_low_temperature_takes_the_best_of_what_lies_far_apart(self, temperature: float) -> None:
        assert {sample(context_of(temperature=temperature, seed=seed), LOGITS)[0] for seed in range(20)} == {0}

    @pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
    @pytest.mark.parametrize("temperature", [1e-5, 1.0])
    def test_an_extreme_repetition_penalty_leaves_a_distribution(self, penalty: float, temperature: float) -> None:
        """Logits [2, 1, -1]; token 0 was seen: a tiny penalty makes it certain, a huge one leaves it equal to 0."""
        logits = np.array([2.0, 1.0, -1.0], dtype=np.float32)
        params = {"repetition_penalty": penalty, "temperature": temperature}
        found = {sample(context_of([0], **params, seed=seed), logits)[0] for seed in range(200)}
        if penalty < 1:
            assert found == {0}
        else:
            assert 1 in found and found <= {0, 1, 2}


class TestBiasAndProcessors:
    def test_a_bias_forbids_or_forces_a_token(self) -> None:
        assert sample(context_of(logit_bias={0: -100.0}, temperature=0.0), LOGITS)[0] == 1
        assert sample(context_of(logit_bias={4: 100.0}, temperature=0.0), LOGITS)[0] == 4

    def test_a_bias_changes_nothing_for_others(self) -> None:
        before = LOGITS.copy()
        sample(context_of(logit_bias={4: 3.5}), LOGITS)
        assert (LOGITS == before).all()

    def test_named_processors_are_applied_in_the_order_that_was_asked(self) -> None:
        order = []

        def noting(name: str):  # type: ignore[no-untyped-def]
            return lambda tokens, prompt_length, logits: order.append((name, tokens.tolist(), prompt_length))

        context = context_of([3], [1, 2], logits_processors=["b", "a"])
        sample_choices(context, LOGITS, {"a": noting("a"), "b": noting("b")})
        assert order == [("b", [3, 1, 2], 1), ("a", [3, 1, 2], 1)]

    @pytest.mark.parametrize("processor", [logits_processors.fail, logits_processors.forbid_everything])
    def test_a_processor_that_fails_is_named_and_ends_only_its_request(self, processor: LogitsProcessor) -> None:
        with pytest.raises(InternalError, match="'mine'"):
            sample_choices(context_of(logits_processors=["mine"]), LOGITS, {"mine": processor})


class TestThinkingTemperature:
    def test_it_applies_inside_the_region_only(self) -> None:
        def tokens(prompt: list[int]) -> set[int]:
            contexts = [context_of(prompt, seed=s, temperature=0.0, thinking_temperature=1.0) for s in range(60)]
            for context in contexts:
                context.thinking_markers = ThinkingMarkers([7], [8])
            return {sample(context, LOGITS)[0] for context in contexts}

        assert tokens([1, 2]) == tokens([7, 1, 8]) == {0}
        assert len(tokens([7, 1])) > 2


class TestChoices:
    def test_choice_i_begins_as_a_request_with_the_seed_plus_i(self) -> None:
        context = context_of(seed=40)
        context.num_choices = 6
        assert [s.token for s in sample_choices(context, LOGITS)] == [
            sample(context_of(seed=40 + i), LOGITS)[0] for i in range(6)
        ]

    def test_seeds_wrap_around_at_the_ends_of_64_bits(self) -> None:
        assert SamplingParams(seed=2**63 - 1).for_choice(1).seed == -(2**63)

    def test_behind_the_first_tokens_there_is_one_a_context(self) -> None:
        context = context_of(generated=[2])
        context.num_choices = 6
        assert len(sample_choices(context, LOGITS)) == 1


def test_log_probabilities_of_the_prompt_are_those_of_each_row() -> None:
    rows = np.stack([LOGITS, LOGITS[::-1]])
    found = prompt_log_probabilities(rows, np.array([2, 4]), top=1)
    assert found.token_log_probabilities == pytest.approx(np.log([0.15, 0.5]).tolist(), abs=1e-6)
    assert [set(entries) for entries in found.top_log_probabilities] == [{0, 2}, {4}]
    assert found.sampled_token_ids == [2, 4]
