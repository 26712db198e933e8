"""Requests that no server may take, and whether one was refused as it must be."""

import random

import httpx
import msgspec


def wrong_body(rng: random.Random, model: str, number: int) -> tuple[str, bytes]:
    """A body that no server may take, and what is wrong with it."""
    good = {"model": model, "prompt": "one", "max_tokens": 1}
    wrong: list[tuple[str, bytes]] = [
        ("bytes", rng.randbytes(rng.randrange(1, 200))),
        ("half a body", msgspec.json.encode(good)[: rng.randrange(1, 20)]),
        ("a list", msgspec.json.encode([good])),
        ("another model", msgspec.json.encode({**good, "model": "no-such-model"})),
        ("a negative length", msgspec.json.encode({**good, "max_tokens": -rng.randrange(1, 1000)})),
        ("a length of text", msgspec.json.encode({**good, "max_tokens": "many"})),
        ("a temperature", msgspec.json.encode({**good, "temperature": 1e9})),
        ("a prompt of numbers", msgspec.json.encode({**good, "prompt": [2**40, -1]})),
        ("depth", b"[" * 5000),
    ]
    return wrong[number % len(wrong)]


def refused_well(answer: httpx.Response) -> bool:
    """As the client's fault, in words."""
    if not 400 <= answer.status_code < 500:
        return False
    try:
        return bool(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return False
