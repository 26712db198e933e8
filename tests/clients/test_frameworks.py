"""Frameworks over the API: LangChain, LiteLLM, Pydantic AI, LlamaIndex."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import litellm
import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.timeout(300)

QUESTION = "What is the capital of France?"
LLAMAINDEX = Path(sys.prefix) / "llamaindex" / "bin" / "python"
"""Its client wants an older SDK than the rest, and so an environment of its own: `make test-more` makes it."""


class Verdict(BaseModel):
    """Which city it is."""

    answer: Literal["Paris", "London"]
    certain: bool


@pytest.fixture
def chat(server: Any) -> ChatOpenAI:
    return ChatOpenAI(model=server.model, base_url=server.v1, api_key="unused", temperature=0, max_tokens=64)


def test_langchain_invokes_and_streams(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(chat: ChatOpenAI, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Verdict, method=method).invoke(QUESTION), Verdict)


def test_langchain_speaks_responses(server: Any) -> None:
    options: dict[str, Any] = {"base_url": server.v1, "api_key": "unused", "temperature": 0, "max_tokens": 16}
    chat = ChatOpenAI(model=server.model, use_responses_api=True, **options)
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole.text


@pytest.mark.filterwarnings("ignore::UserWarning")  # pydantic, about types of its own
def test_litellm_completes_streams_and_calls(server: Any) -> None:
    asked: dict[str, Any] = {
        "model": f"openai/{server.model}",
        "api_base": server.v1,
        "api_key": "unused",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = litellm.completion(**asked)
    assert "Paris" in whole.choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    tool = {"type": "function", "function": {"name": "verdict", "parameters": Verdict.model_json_schema()}}
    called = litellm.completion(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert Verdict.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput])
@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai_gets_its_type(server: Any, kind: Any, model: Any) -> None:
    async with AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        agent = Agent(
            model(server.model, provider=OpenAIProvider(openai_client=client)),
            output_type=kind(Verdict),
            model_settings={"temperature": 0, "max_tokens": 96},
        )
        assert isinstance((await agent.run(QUESTION)).output, Verdict)


def test_llamaindex_completes_and_streams(server: Any) -> None:
    script = Path(__file__).with_name("llamaindex_session.py")
    done = subprocess.run(
        [LLAMAINDEX, script, server.v1, server.model], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "Paris" in said["chat"]
    assert said["streamed"] == said["chat"]
    assert said["completed"]
