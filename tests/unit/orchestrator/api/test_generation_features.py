"""What clients may ask of a generation beside its text: choices, log probabilities, echoes, ids, biases."""

from typing import Any

import pytest

from orchestrator.ports import GenerationJob
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from tests.fakes.api_client import Served, error_of, events_of
from tests.fakes.byte_tokenizer import END
from tests.fakes.scripted_generator import Step, Tokens

LENGTH = GenerationStatus.MAXIMUM_LENGTH
STOP = GenerationStatus.END_OF_SEQUENCE


def logged(token: int, logprob: float = -0.5) -> list[LogProbabilities]:
    return [LogProbabilities([logprob], [{token: logprob, ord("?"): -3.0}], [token])]


def said(text: str) -> list[Step]:
    tokens = [Tokens([byte], log_probabilities=logged(byte)) for byte in text.encode()]
    return [*tokens, Tokens([END], STOP, log_probabilities=logged(END))]


def choices_of(response: Any, stream: bool) -> dict[int, dict[str, Any]]:
    """By index: text, finish reason and log probabilities, streamed ones put together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in events_of(response.text)[:-1] if stream else [response.json()]:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content")
            seen = found.setdefault(choice["index"], {"text": "", "logprobs": [], "token_ids": []})
            seen["text"] += text or ""
            seen["token_ids"] += choice.get("token_ids", [])
            if (told := choice["logprobs"]) is not None:
                seen["logprobs"] += told["content"] if "content" in told else zip(*told.values(), strict=True)
            seen["finish_reason"] = choice["finish_reason"] or seen.get("finish_reason")
    return found


# --- n -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_n_choices_come_from_one_job(route: str, stream: bool) -> None:
    script = [
        Tokens([*b"a"], cached=2),
        Tokens([*b"x"], choice=1),
        Tokens([*b"b"], LENGTH),
        Tokens([*b"y"], choice=1),
        Tokens([END], STOP, choice=1),
    ]
    served = Served(script)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await getattr(served, route)(n=2, stream=stream, seed=7, **options)
    found = choices_of(response, stream)
    assert [(found[i]["text"], found[i]["finish_reason"]) for i in (0, 1)] == [("ab", "length"), ("xy", "stop")]
    assert served.generator.job.context.num_choices == 2
    usage = (events_of(response.text)[-2] if stream else response.json())["usage"]
    assert usage["prompt_tokens"] == served.generator.job.context.original_prompt_length, "counted once"
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert served.generator.all_closed


async def test_indices_run_over_the_choices_of_each_prompt() -> None:
    def script(job: GenerationJob) -> list[Step]:
        first = job.context.tokens[0]
        return [Tokens([first, 48 + choice], LENGTH, choice=choice) for choice in (1, 0)]

    for stream in (False, True):
        found = choices_of(await Served(script).complete(prompt=["a", "b"], n=2, stream=stream), stream)
        assert [found[i]["text"] for i in range(4)] == ["a0", "a1", "b0", "b1"]


async def test_a_stop_string_ends_its_choice_and_no_other() -> None:
    script = [
        Tokens([*b"aENDb"]),
        Tokens([*b"x"], choice=1),
        Tokens([*b"c"]),
        Tokens([*b"y"], LENGTH, choice=1),
    ]
    served = Served(script)
    found = choices_of(await served.complete(n=2, stop="END"), False)
    assert [(found[i]["text"], found[i]["finish_reason"]) for i in (0, 1)] == [("a", "stop"), ("xy", "length")]
    assert served.generator.all_closed


async def test_a_request_may_not_have_too_many_choices_in_all() -> None:
    error = error_of(await Served(max_choices=5).complete(prompt=["a", "b"], n=3), 400)
    assert error["param"] == "n" and "5" in error["message"]


@pytest.mark.parametrize(("best_of", "status"), [(2, 200), (3, 400), (1, 400)])
async def test_best_of_is_refused_by_name_unless_it_is_n(best_of: int, status: int) -> None:
    script = [Tokens([65], LENGTH, choice=choice) for choice in (0, 1)]
    response = await Served(script).complete(n=2, best_of=best_of)
    assert response.status_code == status
    if status == 400:
        assert error_of(response, 400)["param"] == "best_of"


# --- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.conformance(69)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "computed", "shown"), [({}, 1, 1), ({"top_logprobs": 2}, 2, 2)])
async def test_chat_tells_each_token_with_its_bytes(
    asked: dict[str, int], computed: int, shown: int, stream: bool
) -> None:
    served = Served(said("hé"))
    found = choices_of(await served.chat(logprobs=True, stream=stream, **asked), stream)[0]
    assert found["text"] == "hé"
    assert [bytes(entry["bytes"]) for entry in found["logprobs"]] == [b"h", b"\xc3", b"\xa9"], "not the end token"
    assert [len(entry["top_logprobs"]) for entry in found["logprobs"]] == [shown] * 3
    assert found["logprobs"][0]["top_logprobs"][0] == {"token": "h", "logprob": -0.5, "bytes": [104]}
    assert served.generator.job.context.log_probabilities == computed


@pytest.mark.parametrize("stream", [False, True])
async def test_without_being_asked_nothing_is_told(stream: bool) -> None:
    served = Served(said("h"))
    assert choices_of(await served.chat(stream=stream, logprobs=False, top_logprobs=0), stream)[0]["logprobs"] == []
    assert served.generator.job.context.log_probabilities == 0


async def test_alternatives_without_logprobs_are_refused() -> None:
    assert error_of(await Served().chat(top_logprobs=3), 400)["param"] == "top_logprobs"


@pytest.mark.conformance(69)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_leads_with_the_prompt_and_what_the_model_thought_of_it(stream: bool) -> None:
    prompt = LogProbabilities([-1.0], [{105: -1.0, 63: -0.25}], [105])
    script = [Tokens([65], log_probabilities=logged(65), prompt=prompt), Tokens([END], STOP)]
    served = Served(script)
    found = choices_of(await served.complete(echo=True, logprobs=1, stream=stream), stream)[0]
    assert found["text"] == "hiA"
    assert found["logprobs"] == [
        ("h", None, None, 0),
        ("i", -1.0, {"?": -0.25, "i": -1.0}, 1),
        ("A", -0.5, {"A": -0.5}, 2),
    ]
    assert served.generator.job.context.log_probabilities_echo


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_echoes_and_tells_nothing_more(stream: bool) -> None:
    prompt = LogProbabilities([-1.0], [{105: -1.0}], [105])
    served = Served([Tokens([65], LENGTH, log_probabilities=logged(65), prompt=prompt)])
    response = await served.complete(echo=True, logprobs=0, max_tokens=0, stream=stream)
    found = choices_of(response, stream)[0]
    assert (found["text"], found["finish_reason"]) == ("hi", "length")
    assert [entry[0] for entry in found["logprobs"]] == ["h", "i"]
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


async def test_an_echo_without_logprobs_costs_no_logits() -> None:
    served = Served(said("A"))
    assert choices_of(await served.complete(prompt=[*b"hi"], echo=True), False)[0]["text"] == "hiA"
    assert not served.generator.job.context.log_probabilities_echo


# --- ids, biases, processors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_without_detokenizing_a_choice_has_ids(route: str, stream: bool) -> None:
    response = await getattr(Served(said("hé")), route)(detokenize=False, stream=stream)
    found = choices_of(response, stream)[0]
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("", [*"hé".encode()], "stop")


async def test_stop_strings_need_text() -> None:
    assert error_of(await Served().chat(detokenize=False, stop="x"), 400)["param"] == "stop"


async def test_biases_processors_and_thinking_reach_the_context() -> None:
    served = Served(logits_processors=frozenset({"mine"}))
    body = {"logit_bias": {"65": -100, "66": 2.5}, "logits_processors": ["mine"], "thinking_temperature": 0.3}
    assert (await served.chat(**body)).status_code == 200
    params = served.generator.job.context.sampling_params
    assert (params.logit_bias, params.logits_processors) == ({65: -100.0, 66: 2.5}, ["mine"])
    assert params.thinking_temperature == 0.3
    markers = served.generator.job.context.thinking_markers
    assert markers is not None and bytes(markers.begin) == b"<think>", "as it is written, in a vocabulary without it"


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"logit_bias": {"65": 101}}, "100"),
        ({"logit_bias": {"x": 1}}, "token ids"),
        ({"logit_bias": {"-1": 1}}, "token ids"),
        ({"logit_bias": {"9" * 40: 1}}, "token ids"),
        ({"logit_bias": {"257": 1}}, "256"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "1024"),
        ({"logits_processors": ["nobody"]}, "this server has: mine"),
        ({"thinking_temperature": 2.5}, "2"),
        ({"n": 0}, "1"),
        ({"n": 129}, "128"),
        ({"n": True}, "integer"),
        ({"top_logprobs": 21, "logprobs": True}, "20"),
    ],
)
@pytest.mark.conformance(15, 61)
async def test_a_wrong_value_is_refused_by_name_and_bound(field: dict[str, Any], says: str) -> None:
    served = Served(logits_processors=frozenset({"mine"}))
    error = error_of(await served.chat(**field), 400)
    assert error["param"].startswith(next(iter(field)))
    assert says in error["message"]
    assert served.generator.runs == []
