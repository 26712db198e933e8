"""What the served OpenAPI page says about the bodies that the routes read themselves."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from orchestrator.api.schema import ChatCompletionRequest, CompletionRequest, ErrorBody

REFERENCE = "#/components/schemas/{model}"


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    schema = {"$ref": REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route that generates text."""
    stream = {"text/event-stream": {"schema": {"type": "string", "description": "With `stream`: chunks as events."}}}
    refusals = {400: "A field is wrong.", 404: "No such model or endpoint.", 413: "The body is too large."}
    refusals |= {429: "Too many requests; see Retry-After.", 503: "No node can take it; see Retry-After."}
    refusals |= {504: "The deadline passed."}
    described: dict[int | str, dict[str, Any]] = {200: {"model": body, "content": stream}}
    for status, text in refusals.items():
        described[status] = {"model": ErrorBody, "description": text}
    return described


def body_schemas() -> dict[str, Any]:
    """The schemas that `request_body` refers to, with all that they refer to."""
    bodies = [(ChatCompletionRequest, "validation"), (CompletionRequest, "validation")]
    _, definitions = models_json_schema(bodies, ref_template=REFERENCE)  # type: ignore[arg-type]  # literals widen
    return dict(definitions["$defs"])
