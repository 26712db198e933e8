"""What one request makes this process do holds up no other."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from orchestrator.api.preparation import Arrival
from orchestrator.api.workshop import Workshop
from tests.fakes.api_client import MODEL, Served, error_of, settings

ARRIVAL = Arrival("a" * 32, "/v1/chat/completions", {}, 0.0)
BOUND_S = 60.0
"""A hundred times what each of these takes alone; without their bounds some would take hours."""


@pytest.mark.parametrize(
    ("raw", "elsewhere"),
    [
        (b'{"messages": []}', False),
        (b'{"response_format": {}}', True),
        (b'{"tools": []}', True),
        (b'{"text": {"format": {}}}', True),
        (b'{"t\\u006fols": []}', True),
        (b'{"a": "\\u4f60"}', False),
        (b" " * 5000, True),
    ],
)
async def test_what_may_take_long_leaves_the_event_loop(raw: bytes, elsewhere: bool) -> None:
    workshop = Workshop(settings())
    try:
        thread = await workshop.prepare(lambda raw, _: threading.current_thread(), raw, ARRIVAL)
    finally:
        workshop.close()
    assert (thread is not threading.current_thread()) == elsewhere


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "regex of nested counts": {"response_format": {"type": "regex", "regex": "((a{1,100}){1,100}){1,100}"}},
    "regex that backtracks": {"response_format": {"type": "regex", "regex": "(a+)+$" * 50}},
    "schema of long strings": _json_schema({"type": "string", "minLength": 10**12, "maxLength": 10**13}),
    "schema of many items": _json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "schema that refers to itself": _json_schema({"$ref": "#"}),
    "schema of doubled branches": _json_schema(_nested(14)),
    "schema of many names": _json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}),
    "schema of a huge number": _json_schema({"type": "integer", "maximum": 10**300}),
    "grammar that is endless": {"response_format": {"type": "grammar", "grammar": "start: start start | start"}},
    "options of the template": {"chat_template_kwargs": {"x": [["y"] * 1000] * 1000, "loop": {}, "raise_exception": 1}},
    "many tools": {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(512)]},
}


@pytest.mark.conformance(65)
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_costs_its_own_request_and_that_within_a_bound(name: str) -> None:
    served = Served(max_length=100_000)
    await served.chat(response_format={"type": "json_object"})  # the compiler is made with the first
    began_s = time.monotonic()
    hostile = asyncio.ensure_future(served.chat(**HOSTILE[name]))
    answers = 0
    while not hostile.done() or not answers:
        await asyncio.sleep(0)
        assert (await served.chat()).status_code == 200
        answers += 1
    response = await hostile
    assert time.monotonic() - began_s < BOUND_S
    if response.status_code != 200:
        error_of(response, 400)


@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": ' + b"[" * 1_000_000,
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 1_000_000 + b"}",
        b'{"temperature": 0.' + b"9" * 1_000_000 + b"1e5}",
        b'{"temperature": 1e' + b"9" * 100_000 + b"}",
        b'{"metadata": ' + b"9" * 1_000_000 + b"}",
        b'{"prompt": "' + b"\\ud83d" * 10_000 + b'"}',
    ],
    ids=["arrays", "objects", "whole", "fraction", "exponent", "unchecked", "half characters"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
async def test_deep_nesting_and_huge_numbers_are_refused_within_a_bound(raw: bytes, path: str) -> None:
    served = Served()
    began_s = time.monotonic()
    error_of(await served.request("POST", path, content=raw), 400)
    assert time.monotonic() - began_s < BOUND_S


async def test_a_body_beyond_the_limit_is_refused_by_its_length() -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 2000}).encode()
    for path in ("/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        error_of(await Served(max_request_bytes=1000).request("POST", path, content=body), 413)
