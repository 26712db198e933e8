import dataclasses
import math
from typing import Any

import pytest

from pipelines.types.sampling import SamplingParams, SamplingParamsGenerationConfigDefaults, SamplingParamsInput
from pronghorn.errors import InvalidRequest, from_record


@pytest.mark.conformance(14)
def test_defaults() -> None:
    params = SamplingParams()
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (-1, 1, 0.0, 1)
    assert params.repetition_penalty == 1.0 and not params.needs_penalties
    assert params.max_new_tokens is None and params.min_new_tokens == 0 and params.detokenize
    assert 0 <= params.seed < 2**32


@pytest.mark.conformance(14)
def test_each_has_a_seed_of_its_own_and_zero_is_a_seed() -> None:
    assert len({SamplingParams().seed for _ in range(8)}) > 1
    assert SamplingParams(seed=0).seed == 0


@pytest.mark.conformance(15)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("top_k", -2),
        ("top_k", True),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", -1),
        ("thinking_temperature", 3),
        ("frequency_penalty", -2.1),
        ("presence_penalty", math.inf),
        ("max_new_tokens", True),
        ("max_new_tokens", -1),
        ("min_new_tokens", False),
        ("min_new_tokens", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_out_of_bounds_names_field_value_and_bound(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.param == name
    assert caught.value.http_status == 400
    assert "must be" in caught.value.message


def test_the_error_crosses_a_process_as_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(top_p=2)
    received = from_record(caught.value.record())
    assert type(received) is InvalidRequest
    assert (received.message, received.param) == (caught.value.message, "top_p")


@pytest.mark.conformance(15)
@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0), ("min_p", 1), ("temperature", 2), ("frequency_penalty", -2), ("max_new_tokens", 0), ("seed", -1)],
)
def test_bounds_themselves_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.conformance(15)
def test_normalisation() -> None:
    assert SamplingParams(top_k=0).top_k == -1
    assert SamplingParams(temperature=0, top_k=50).top_k == 1
    inherited = SamplingParams(top_k=None, top_p=None)  # type: ignore[arg-type]  # callers may pass None on
    assert (inherited.top_k, inherited.top_p) == (-1, 1.0)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_any_penalty_away_from_neutral_is_needed(name: str) -> None:
    assert SamplingParams(**{name: 0.5}).needs_penalties


def make(input_: dict[str, Any], config: dict[str, Any]) -> SamplingParams:
    return SamplingParams.from_input_and_generation_config(
        SamplingParamsInput(**input_), SamplingParamsGenerationConfigDefaults.from_generation_config(config)
    )


@pytest.mark.conformance(16)
def test_user_over_model_over_default() -> None:
    params = make({"temperature": 0.7}, {"temperature": 0.3, "top_p": 0.9, "max_length": 5, "top_k": None})
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, -1)


@pytest.mark.conformance(16)
def test_do_sample_false_is_greedy_even_over_the_files_own_temperature() -> None:
    params = make({}, {"do_sample": False, "temperature": 0.9, "top_k": 40})
    assert (params.temperature, params.top_k) == (0, 1)


@pytest.mark.conformance(16)
def test_with_do_sample_false_a_temperature_alone_stays_greedy() -> None:
    params = make({"temperature": 0.7}, {"do_sample": False})
    assert (params.temperature, params.top_k) == (0.7, 1)
    assert make({"temperature": 0.7, "top_k": 40}, {"do_sample": False}).top_k == 40


@pytest.mark.conformance(16)
def test_eos_ids_become_stop_token_ids_that_a_user_replaces() -> None:
    assert make({}, {"eos_token_id": 7}).stop_token_ids == [7]
    assert make({}, {"eos_token_id": [7, 8]}).stop_token_ids == [7, 8]
    assert make({"stop_token_ids": [1]}, {"eos_token_id": [7, 8]}).stop_token_ids == [1]


def test_an_explicit_zero_seed_survives() -> None:
    assert make({"seed": 0}, {}).seed == 0


# --- (input, outcome) ------------------------------------------------------------------------------------------------


@pytest.mark.conformance(14)
def test_every_default() -> None:
    values = dataclasses.asdict(SamplingParams())
    del values["seed"]
    assert values == {
        "top_k": -1,
        "top_p": 1,
        "min_p": 0.0,
        "temperature": 1,
        "thinking_temperature": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": None,
        "min_new_tokens": 0,
        "ignore_eos": False,
        "stop": None,
        "stop_token_ids": None,
        "detokenize": True,
        "logits_processors": None,
        "logit_bias": None,
    }


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 0}, {"top_k": -1}),
    ({"top_k": 1}, {"top_k": 1}),
    ({"top_k": None, "top_p": None}, {"top_k": -1, "top_p": 1.0}),
    ({"top_p": 0}, {"top_p": 0}),
    ({"top_p": 1}, {"top_p": 1}),
    ({"min_p": 0}, {"min_p": 0}),
    ({"min_p": 1}, {"min_p": 1}),
    ({"temperature": 0}, {"temperature": 0, "top_k": 1}),
    ({"temperature": 0, "top_k": 9}, {"top_k": 1}),
    ({"temperature": 2}, {"temperature": 2, "top_k": -1}),
    ({"thinking_temperature": 0}, {"thinking_temperature": 0, "top_k": -1}),
    ({"thinking_temperature": 2}, {"thinking_temperature": 2}),
    ({"frequency_penalty": -2, "presence_penalty": 2}, {"frequency_penalty": -2, "presence_penalty": 2}),
    ({"repetition_penalty": 1e-6}, {"repetition_penalty": 1e-6}),
    ({"repetition_penalty": 1e6}, {"repetition_penalty": 1e6}),
    ({"max_new_tokens": 0, "min_new_tokens": 5}, {"max_new_tokens": 0, "min_new_tokens": 5}),
    ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
]


@pytest.mark.conformance(15)
@pytest.mark.parametrize(("given", "expected"), TAKEN)
def test_what_is_taken_and_how_it_is_read(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = SamplingParams(**given)
    assert {name: getattr(made, name) for name in expected} == expected


FRACTION, TEMPERATURE, PENALTY = "a number from 0 to 1", "a number from 0 to 2", "a number from -2 to 2"
COUNT = "a whole number, 0 or more"
REFUSED: list[tuple[str, list[Any], str]] = [
    ("top_k", [-2, -100], "-1 (off) or more"),
    ("top_p", [-1e-9, 1.0000001, math.nan], FRACTION),
    ("min_p", [-1e-9, 1.0000001, math.nan], FRACTION),
    ("temperature", [-1e-9, 2.0000001, math.inf, math.nan], TEMPERATURE),
    ("thinking_temperature", [-1e-9, 2.0000001, math.inf, math.nan], TEMPERATURE),
    ("frequency_penalty", [-2.0000001, 2.0000001, math.nan], PENALTY),
    ("presence_penalty", [-2.0000001, 2.0000001, -math.inf], PENALTY),
    ("repetition_penalty", [0, -1, math.inf, math.nan], "finite and above 0"),
    ("max_new_tokens", [-1, True, 1.0], COUNT),
    ("min_new_tokens", [-1, False, None], COUNT),
]


@pytest.mark.conformance(15)
@pytest.mark.parametrize(("name", "value", "bound"), [(n, v, b) for n, values, b in REFUSED for v in values])
def test_what_is_refused_with_its_bound(name: str, value: Any, bound: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be {bound}"


MERGED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("nothing", {}, {}, {"temperature": 1.0, "top_k": -1, "stop_token_ids": None}),
    ("the model's", {}, {"temperature": 0.3, "top_k": 20}, {"temperature": 0.3, "top_k": 20, "top_p": 1.0}),
    ("none is inherit", {"temperature": None}, {"temperature": 0.3}, {"temperature": 0.3}),
    ("none in the file", {}, {"temperature": None}, {"temperature": 1.0}),
    ("every key that counts", {}, {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 3},
     {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 3}),
    ("keys that do not", {}, {"min_p": 0.5, "seed": 3, "stop": ["x"], "max_length": 5}, {"min_p": 0.0, "stop": None}),
    ("one eos id", {}, {"eos_token_id": 0}, {"stop_token_ids": [0]}),
    ("no eos ids", {}, {"eos_token_id": []}, {"stop_token_ids": []}),
    ("the user's stop ids", {"stop_token_ids": []}, {"eos_token_id": [7]}, {"stop_token_ids": []}),
    ("greedy", {}, {"do_sample": False, "temperature": 0.9, "top_k": 40}, {"temperature": 0.0, "top_k": 1}),
    ("greedy stays", {"temperature": 0.7}, {"do_sample": False}, {"temperature": 0.7, "top_k": 1}),
    ("greedy undone", {"temperature": 0.7, "top_k": 9}, {"do_sample": False}, {"temperature": 0.7, "top_k": 9}),
    ("sampling", {}, {"do_sample": True, "temperature": 0.9}, {"temperature": 0.9, "top_k": -1}),
    ("user's false", {"ignore_eos": False, "detokenize": False}, {}, {"ignore_eos": False, "detokenize": False}),
    ("user's zero", {"min_p": 0.0, "max_new_tokens": 0}, {"max_new_tokens": 9}, {"min_p": 0.0, "max_new_tokens": 0}),
]  # fmt: skip


@pytest.mark.conformance(16)
@pytest.mark.parametrize(("user", "model", "expected"), [c[1:] for c in MERGED], ids=[c[0] for c in MERGED])
def test_user_over_model_over_default_case_by_case(
    user: dict[str, Any], model: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = make(user, model)
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.conformance(16)
def test_what_a_model_recommends_is_validated_too() -> None:
    with pytest.raises(InvalidRequest, match="temperature is 3"):
        make({}, {"temperature": 3})
