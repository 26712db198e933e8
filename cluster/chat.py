"""One question to a running cluster, its answer streamed as it comes, the way any OpenAI client would do it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from pronghorn.errors import ConfigurationError, PronghornError, Unavailable

CONNECT_TIMEOUT_S = 5.0


def answer(
    url: str,
    message: str,
    *,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int,
    temperature: float,
) -> Iterator[str]:
    """The pieces of the answer. `model` may be None where the cluster serves one alone.

    Raises a PronghornError with what the cluster said, before or amid them.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    body: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": max_tokens, "temperature": temperature}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=timeout) as client:
            body["model"] = model or _only_model(client)
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refusal(response)
                yield from _pieces(response.iter_lines())
    except httpx.TransportError as error:
        raise ConfigurationError(f"no cluster answers at {url}: {error}") from None


def _only_model(client: httpx.Client) -> str:
    response = client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
    if response.status_code != httpx.codes.OK:
        raise _refusal(response)
    served = [str(model["id"]) for model in response.json()["data"]]
    if len(served) > 1:
        raise ConfigurationError(f"the cluster serves {', '.join(served)}; say which with --model", param="model")
    return served[0]


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise Unavailable(chunk["error"]["message"], code=chunk["error"].get("code"))
        for choice in chunk.get("choices", []):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise Unavailable("the answer broke off before its end")


def _refusal(response: httpx.Response) -> PronghornError:
    try:
        return ConfigurationError(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ConfigurationError(f"the cluster answered {response.status_code}: {response.text[:200]}")
