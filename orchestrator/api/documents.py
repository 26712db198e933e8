"""What the served OpenAPI page says about the bodies that the routes read themselves, and about what is refused.

A route names the model of its body here; the page is made of these models, so that it says what is checked.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from orchestrator.api.schema import ErrorBody

REFERENCE = "#/components/schemas/{model}"

_REFUSALS = {
    400: "A field is wrong.",
    404: "No such model or endpoint.",
    409: "A request of the same X-Request-ID still runs; see Retry-After.",
    413: "The body is too large.",
    429: "Too many requests; see Retry-After.",
    500: "A fault of the server.",
    503: "No node can take it; see Retry-After.",
    504: "The deadline passed.",
}

Responses = dict[int | str, dict[str, Any]]


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    schema = {"$ref": REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def refusals(*statuses: int) -> Responses:
    """For the `responses` of a route: errors in OpenAI's envelope."""
    return {status: {"model": ErrorBody, "description": _REFUSALS[status]} for status in statuses}


def answers(body: type[BaseModel]) -> Responses:
    """For the `responses` of a route that generates text."""
    stream = {"text/event-stream": {"schema": {"description": "With `stream`: chunks as events."}}}
    return {200: {"model": body, "content": stream}} | refusals(*_REFUSALS)


def body_schemas(*bodies: type[BaseModel]) -> dict[str, Any]:
    """The schemas that `request_body` refers to, with all that they refer to."""
    named = [(body, "validation") for body in bodies]
    _, definitions = models_json_schema(named, ref_template=REFERENCE)  # type: ignore[arg-type]  # literals widen
    return dict(definitions["$defs"])
