import pytest

from pipelines.types.status import GenerationStatus
from pronghorn.errors import NodeLost
from tests.fakes.api_client import Served, error_of, events_of
from tests.fakes.scripted_generator import Fail, Stall, Tokens, spoken


def echo(job):
    """Says the prompt again."""
    return spoken(bytes(job.context.tokens.prompt.tolist()).decode(), status=GenerationStatus.MAXIMUM_LENGTH)


@pytest.mark.conformance(58)
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_form_of_prompt_gives_a_choice_per_prompt(prompt, texts, stream) -> None:
    served = Served(echo)
    response = await served.complete(prompt=prompt, stream=stream, max_tokens=50)
    found = dict.fromkeys(range(len(texts)), "")
    reasons = {}
    chunks = events_of(response.text)[:-1] if stream else [response.json()]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert [found[i] for i in range(len(texts))] == texts
    assert set(reasons.values()) == {"length"}
    assert served.generator.all_closed


@pytest.mark.conformance(58)
async def test_usage_is_the_sum_over_the_prompts() -> None:
    body = (await Served(echo).complete(prompt=["ab", "cde"])).json()
    assert body["object"] == "text_completion"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 5)


async def test_the_output_is_16_tokens_at_most_unless_asked_for_more() -> None:
    served = Served()
    await served.complete()
    assert served.generator.job.context.max_length == len("hi") + 16


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_fails_ends_the_others(stream: bool) -> None:
    def script(job):
        first = job.context.tokens.prompt.tolist() == [*b"a"]
        return [Fail(NodeLost("gone"))] if first else [Stall()]

    served = Served(script)
    assert error_of(await served.complete(prompt=["b", "a", "c"], stream=stream), 503)["code"] == "node_lost"
    assert len(served.generator.runs) == 3
    assert served.generator.all_closed


async def test_a_fault_nobody_foresaw_in_one_of_several_prompts_is_a_500(caplog) -> None:
    served = Served(lambda job: [Fail(RuntimeError("boom"))] if job.context.tokens[0] == 97 else [Stall()])
    error_of(await served.complete(prompt=["b", "a"]), 500)
    assert served.generator.all_closed


async def test_stop_strings_end_only_their_own_choice() -> None:
    served = Served(echo)
    body = (await served.complete(prompt=["xENDy", "abc"], stop="END")).json()
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("x", "stop"), ("abc", "length")]


async def test_ids_are_distinct_per_prompt() -> None:
    served = Served(echo)
    await served.complete(prompt=["a", "b"])
    ids = [str(run.job.context.request_id) for run in served.generator.runs]
    assert [i.rpartition("_")[2] for i in ids] == ["0", "1"]
    assert len({i.rpartition("_")[0] for i in ids}) == 1


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ([], "prompt", "empty"),
        ("", "prompt", "empty"),
        (["a", ""], "prompt[1]", "empty"),
        ([[1], []], "prompt[1]", "empty"),
        (["a", 1], "prompt", "one kind"),
        ([True], "prompt", "one kind"),
        ([1.5], "prompt", "one kind"),
        ([[1, "a"]], "prompt", ""),
        (7, "prompt", "string"),
        ({"a": 1}, "prompt", "string"),
        ([-1], "prompt", ""),
        ([257], "prompt", "256"),
        (["a"] * 65, "prompt", "at most 64"),
    ],
)
async def test_a_wrong_prompt_is_refused_by_name(prompt, param, says) -> None:
    served = Served()
    error = error_of(await served.complete(prompt=prompt), 400)
    assert error["param"].startswith(param)
    assert says in error["message"]
    assert served.generator.runs == []


async def test_a_missing_prompt_is_named() -> None:
    error = error_of(await Served().request("POST", "/v1/completions", json={"model": ""}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"best_of": 2}])
async def test_what_is_not_supported_yet_is_refused_by_name(field) -> None:
    error = error_of(await Served().complete(**field), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] in field
    assert "null" in error["message"]


async def test_a_broken_last_character_is_shown_once_the_text_is_over() -> None:
    served = Served([Tokens([*b"a", 0xE2]), Tokens([0x82], GenerationStatus.MAXIMUM_LENGTH)])
    text = (await served.complete()).json()["choices"][0]["text"]
    assert text.startswith("a\N{REPLACEMENT CHARACTER}")
