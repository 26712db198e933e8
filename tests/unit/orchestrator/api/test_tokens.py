import pytest

from tests.fakes.api_client import MODEL, Served, error_of

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_a_prompt_becomes_tokens_and_text_again() -> None:
    told = (await Served().request("POST", "/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert told["tokens"] == list("hé".encode()) and told["count"] == 3
    assert (told["token_strs"][0], told["max_model_len"]) == ("h", 200)
    back = (await Served().request("POST", "/detokenize", json={"model": MODEL, "tokens": told["tokens"]})).json()
    assert back == {"prompt": "hé"}


async def test_a_conversation_has_the_tokens_that_its_chat_computes() -> None:
    served = Served()
    told = (await served.request("POST", "/tokenize", json={"messages": MESSAGES})).json()
    await served.chat(messages=MESSAGES)
    assert told["tokens"] == [int(token) for token in served.generator.job.context.tokens.all][: told["count"]]


async def test_a_conversation_may_come_without_what_opens_the_answer() -> None:
    served = Served(template="{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")
    for given, ended in ((True, "hi>"), (False, "hi")):
        body = {"messages": MESSAGES, "add_generation_prompt": given}
        assert bytes((await served.request("POST", "/tokenize", json=body)).json()["tokens"]).decode() == ended


@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": 1}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [257]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [2**70]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ],
)
async def test_what_is_not_taken_is_refused(path: str, body: dict, status: int) -> None:
    error_of(await Served().request("POST", path, json=body), status)
