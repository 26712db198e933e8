"""What a client makes of an answer, from answers that a server may give."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from cluster.chaos.load import Asking, Body, Clients, RunningLoad, draw
from cluster.chaos.recorder import Recorder, Request, Verdict
from cluster.chaos.scenario import Load

BODY = Body("once", 2, None)
TEXT = " upon a"


def event(text: str = "", end: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": end}]}) + "\n\n"


def usage(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}) + "\n\n"


ERROR = 'data: {"error": {"code": "node_lost", "message": "gone"}}\n\n'
DONE = "data: [DONE]\n\n"
WHOLE = event(" upon") + event(" a", "length") + usage(2) + DONE


def stream(*parts: str) -> httpx.Response:
    return httpx.Response(200, text="".join(parts), headers={"content-type": "text/event-stream"})


def refusal(status: int) -> httpx.Response:
    body = {"error": {"code": "rate_limit_exceeded", "message": "later"}}
    return httpx.Response(status, json=body, headers={"retry-after": "0"})


async def asked(*answers: httpx.Response | Exception, retries: int = 0) -> Request:
    """What a request came to whose tries were answered so."""
    left: Iterator[httpx.Response | Exception] = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    clients = Clients("http://cluster", "m", 30.0, httpx.MockTransport(answer))
    asking = Asking(clients, Recorder(lambda: 0.0), Load(), [BODY], {BODY: TEXT}, 0)
    try:
        return await asking.ask(0, extra=False, retries=retries)
    finally:
        await clients.close()


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (stream(WHOLE), Verdict.ANSWERED),
        (stream(event(" upon"), event(" a", "length"), usage(2)), Verdict.LOST),
        (stream(event(" upon")), Verdict.LOST),
        (stream(), Verdict.LOST),
        (stream(event(" upon"), event(" a", "length"), usage(3), DONE), Verdict.LOST),
        (stream(event(" upon"), event(" a", "length"), usage(2), DONE, DONE), Verdict.LOST),
        (stream(event(" upon"), event(" upon"), event(" a", "length"), usage(2), DONE), Verdict.DUPLICATED),
        (stream(event(" onto"), event(" it", "length"), usage(2), DONE), Verdict.WRONG),
        (stream(event(" upon"), ERROR, DONE), Verdict.ERROR),
        (refusal(429), Verdict.ERROR),
        (httpx.Response(200, text="data: {no json"), Verdict.LOST),
        (httpx.Response(500, text="Internal Server Error"), Verdict.LOST),
        (httpx.ReadError("reset"), Verdict.LOST),
    ],
)
async def test_an_answer_is_judged_by_all_that_it_must_have(
    answer: httpx.Response | Exception, verdict: Verdict
) -> None:
    assert (await asked(answer)).verdict() is verdict


async def test_a_client_that_was_told_to_come_back_asks_again() -> None:
    request = await asked(refusal(503), stream(WHOLE), retries=1)
    assert [one.how for one in request.tries] == ["rate_limit_exceeded", "answered"]
    assert request.verdict() is Verdict.ANSWERED


async def test_it_asks_no_more_often_than_it_may() -> None:
    request = await asked(*[refusal(503)] * 3, retries=2)
    assert (len(request.tries), request.verdict()) == (3, Verdict.ERROR)


async def test_what_is_wrong_with_the_request_is_not_asked_again() -> None:
    request = await asked(refusal(400), retries=5)
    assert (len(request.tries), request.verdict()) == (1, Verdict.ERROR)


async def test_a_load_ends_with_what_it_has_asked_and_leaves_none_open() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)  # a network makes everybody wait
        return stream(WHOLE)

    clients = Clients("http://cluster", "m", 30.0, httpx.MockTransport(answer))
    recorder = Recorder(lambda: 0.0)
    load = RunningLoad(Asking(clients, recorder, Load(), [BODY], {BODY: TEXT}, 0), streams=3)
    load.start()
    await recorder.until(lambda: recorder.ended >= 9)
    await load.end()
    await clients.close()
    assert recorder.verdicts() == {Verdict.ANSWERED: len(recorder.requests)}


def test_the_same_seed_draws_the_same_prompts_and_the_load_says_of_what_kind() -> None:
    load = Load(prompts=50, prompt_words=[3, 7], new_tokens=[1, 5], seeded=0.5)
    bodies = draw(load, 1)
    assert bodies == draw(load, 1) != draw(load, 2)
    assert {len(body.prompt.split()) for body in bodies} == {3, 7}
    assert {body.new_tokens for body in bodies} == {1, 5}
    assert 0 < sum(body.seed is None for body in bodies) < 50
