"""Two models behind one API, over scripted generation."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from orchestrator.api.app import build_app
from orchestrator.api.served_models import ServedModels
from tests.fakes.api_client import error_of, settings
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.scripted_generator import ScriptedGenerator, ScriptedView, spoken

OTHER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}


@pytest.fixture
def generator() -> ScriptedGenerator:
    return ScriptedGenerator(spoken("hello"))


@pytest.fixture
def app(generator: ScriptedGenerator) -> FastAPI:
    a = (byte_tokenizer(), settings(model_name="a", max_length=200))
    b = (byte_tokenizer(OTHER), settings(model_name="org/b", max_length=100))
    return build_app(generator, ScriptedView(), ServedModels([a, b]))


async def ask(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        return await client.request(method, path, **kwargs)


async def test_all_are_listed_each_with_its_own_limit(app: FastAPI) -> None:
    listed = (await ask(app, "GET", "/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("a", 200), ("org/b", 100)]
    for card in listed:
        assert (await ask(app, "GET", f"/v1/models/{card['id']}")).json() == card


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["a", "org/b"])
async def test_every_route_answers_as_the_model_that_was_asked(app: FastAPI, path: str, model: str) -> None:
    answer = await ask(app, "POST", path, json={"model": model, **PATHS[path]})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", model) == model


@pytest.mark.parametrize("path", PATHS)
async def test_another_model_is_refused_with_the_names_of_those_that_there_are(app: FastAPI, path: str) -> None:
    error = error_of(await ask(app, "POST", path, json={"model": "b", **PATHS[path]}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'b' does not exist; served: 'a', 'org/b'" in error["message"]
    assert error_of(await ask(app, "GET", "/v1/models/b"), 404)["message"] == error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_one_of_several_must_be_named(app: FastAPI, path: str) -> None:
    error = error_of(await ask(app, "POST", path, json=PATHS[path]), 400)
    assert error["param"] == "model"
    assert "it must be one of 'a', 'org/b'" in error["message"]


async def test_a_request_is_prepared_by_its_own_models_template_and_limits(
    app: FastAPI, generator: ScriptedGenerator
) -> None:
    for model in ("a", "org/b"):
        await ask(app, "POST", "/v1/chat/completions", json={"model": model, **PATHS["/v1/chat/completions"]})
    first, second = (run.job for run in generator.runs)
    assert [first.model, second.model] == ["a", "org/b"]
    assert [first.context.max_length, second.context.max_length] == [200, 100]
    texts = [run.job.context.tokens.all.tolist() for run in generator.runs]
    assert texts[1] == list(b"<user>hi") != texts[0]


async def test_what_is_wrong_beside_the_model_is_told_first(app: FastAPI) -> None:
    error = error_of(await ask(app, "POST", "/v1/completions", json={"model": 3, "prompt": "hi"}), 400)
    assert error["param"] == "model"
