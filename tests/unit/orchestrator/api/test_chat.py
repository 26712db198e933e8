import pytest

from pipelines.types.sampling import SamplingParams
from pipelines.types.status import GenerationStatus
from pronghorn.errors import DeadlineExceeded, EndpointNotFound, InsufficientBlocks, NodeLost, Overloaded, Unavailable
from tests.fakes.api_client import MODEL, Served, error_of, events_of
from tests.fakes.byte_tokenizer import END
from tests.fakes.scripted_generator import Fail, Stall, Tokens, spoken


def text_of(events: list[dict]) -> str:
    return "".join(c["delta"].get("content", "") for e in events if e != "[DONE]" for c in e["choices"])


@pytest.mark.conformance(58)
async def test_a_whole_answer_has_text_reason_and_usage() -> None:
    served = Served([Tokens(b"hel", cached=16), Tokens([*b"lo", END], GenerationStatus.END_OF_SEQUENCE)])
    body = (await served.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = served.generator.job.context.tokens.prompt_length
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert served.generator.all_closed


async def test_the_prompt_is_the_template_over_the_messages() -> None:
    served = Served()
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    assert (await served.chat(messages=messages)).status_code == 200
    tokens = served.generator.job.context.tokens.prompt.tolist()
    assert tokens == [*b"[system]be kind", END, *b"[user]a\nb", END, *b"[assistant]"]


@pytest.mark.conformance(57)
async def test_prompt_tokens_win_over_messages() -> None:
    served = Served()
    assert (await served.chat(prompt_tokens=[1, 2, 3])).status_code == 200
    assert served.generator.job.context.tokens.prompt.tolist() == [1, 2, 3]


@pytest.mark.conformance(58, 62)
async def test_a_stream_ends_in_one_done_and_joins_to_the_whole_text() -> None:
    served = Served(spoken("héllo €", end=[END]))
    response = await served.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert text_of(events) == "héllo €"
    assert [e["choices"][0]["delta"].get("role") for e in events[:-1]] == ["assistant", *[None] * (len(events) - 2)]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [*[None] * (len(events) - 2), "stop"]
    assert all("usage" not in e for e in events[:-1])
    assert len({e["id"] for e in events[:-1]}) == 1


@pytest.mark.conformance(62)
async def test_usage_comes_last_when_asked_for_and_is_null_before() -> None:
    response = await Served().chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


async def test_the_limit_of_length_is_told() -> None:
    served = Served(spoken("abc", status=GenerationStatus.MAXIMUM_LENGTH))
    assert (await served.chat()).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.conformance(24, 70)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it_and_the_work_on_the_node(stream: bool) -> None:
    served = Served([*(Tokens([b]) for b in b"one STOP two"), Stall()])
    response = await served.chat(stop=["STOP"], stream=stream)
    if stream:
        events = events_of(response.text)
        assert text_of(events) == "one "
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    (run,) = served.generator.runs
    assert run.closed.is_set()
    assert run.played == len("one STOP")


async def test_sampling_reaches_the_context() -> None:
    served = Served()
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 0,
        "stop": "x",
        "max_tokens": 9,
        "max_completion_tokens": 4,
        "frequency_penalty": 1,
        "presence_penalty": -1.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
    }
    assert (await served.chat(**body)).status_code == 200
    context = served.generator.job.context
    assert context.sampling_params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=0,
        stop=["x"],
        max_new_tokens=4,
        frequency_penalty=1,
        presence_penalty=-1.5,
        repetition_penalty=1.1,
        min_new_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
    )
    assert context.max_length == context.original_prompt_length + 4


async def test_null_counts_as_left_out() -> None:
    body = dict.fromkeys(["temperature", "stop", "n", "tools", "stream", "logprobs", "user", "stream_options"])
    assert (await Served().chat(**body)).status_code == 200


async def test_an_empty_model_is_the_served_one() -> None:
    assert (await Served().chat(model="")).status_code == 200


async def test_fields_of_openai_that_ask_for_nothing_are_accepted() -> None:
    body = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "n": 1,
        "logprobs": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "modalities": ["text"],
    }
    assert (await Served().chat(**body)).status_code == 200


@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after_s=2.2), 429, "rate_limit_exceeded"),
        (Unavailable("no decode node"), 503, "unavailable"),
        (InsufficientBlocks("no room"), 503, "insufficient_blocks"),
        (EndpointNotFound("no such node", param="target_endpoint"), 404, "endpoint_not_found"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(error, status, code, stream) -> None:
    response = await Served([Fail(error)]).chat(stream=stream)
    assert error_of(response, status)["code"] == code
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


@pytest.mark.conformance(62)
async def test_an_error_after_the_first_token_is_the_last_event_and_no_done() -> None:
    response = await Served([Tokens(b"h"), Fail(NodeLost("decode-1 is gone"))]).chat(stream=True)
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert text_of(chunks) == "h"
    assert last == {"error": {"message": "decode-1 is gone", "type": "api_error", "param": None, "code": "node_lost"}}


async def test_an_error_after_the_first_token_of_a_whole_answer_is_a_status() -> None:
    error_of(await Served([Tokens(b"h"), Fail(NodeLost("gone"))]).chat(), 503)


async def test_a_stream_that_ends_without_a_last_word_is_an_error() -> None:
    assert error_of(await Served([Tokens(b"h")]).chat(), 500)["code"] == "internal_error"
    *_, last = events_of((await Served([Tokens(b"h")]).chat(stream=True)).text)
    assert last["error"]["code"] == "internal_error"


async def test_a_fault_nobody_foresaw_is_a_500_that_says_nothing_of_it(caplog) -> None:
    error = error_of(await Served([Fail(RuntimeError("secret"))]).chat(), 500)
    assert error["type"] == "api_error"
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


async def test_a_fault_nobody_foresaw_in_a_stream_is_its_last_event(caplog) -> None:
    response = await Served([Tokens(b"h"), Fail(RuntimeError("secret"))]).chat(stream=True)
    *_, last = events_of(response.text)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_a_request_that_never_gets_its_first_token(stream: bool) -> None:
    served = Served([Stall()])
    error_of(await served.chat(timeout=0.05, stream=stream), 504)
    assert served.generator.all_closed


async def test_the_deadline_ends_a_stream_with_an_error_event() -> None:
    served = Served([Tokens(b"h"), Stall()])
    *_, last = events_of((await served.chat(timeout=0.2, stream=True)).text)
    assert last["error"]["code"] == "deadline_exceeded"
    assert served.generator.all_closed


async def test_usage_comes_once_where_a_load_client_asks_for_it_with_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of((await Served(spoken("hi")).chat(stream=True, stream_options=options)).text)
    assert [event["usage"] is not None for event in events[:-1]].count(True) == 1
