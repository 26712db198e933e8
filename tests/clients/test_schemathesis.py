"""Whatever is made after the served OpenAPI page, or to miss it, is answered as the page says, and without a fault.

In process and over a scripted generator: what the nodes make of a request is other tests' concern.
"""

from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from orchestrator.ports import GenerationJob
from tests.fakes.api_client import Served
from tests.fakes.scripted_generator import Step, Tokens, spoken

CASES_WITH_BODY = 200
CASES_WITHOUT = 10
PATIENCE_S = 60.0
"""With a body, of either mode: 2,000 and more in all."""

load_all_checks()
CHECKED = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


def every_choice(job: GenerationJob) -> list[Step]:
    """Each says the same, one after another."""
    said = [step for step in spoken("hello") if isinstance(step, Tokens)]
    return [replace(step, choice=choice) for choice in range(job.context.num_choices) for step in said]


served = Served(every_choice, max_length=100_000).app


async def ever_alive(scope: Any, receive: Any, send: Any) -> None:
    """The application; each case would otherwise start and end it."""
    if scope["type"] != "lifespan":
        await served(scope, receive, send)
        return
    for moment in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{moment}.complete"})


api = schemathesis.openapi.from_asgi("/openapi.json", ever_alive)
OPERATIONS = [found.ok() for found in api.get_all_operations()]


def _modes(operation: Any) -> list[GenerationMode]:
    """Without a body there is nothing that could miss the page."""
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]


def _give_time(body: Any) -> None:
    """Who allows no time is rightly told 504, which is a server's error to whoever judges by the status alone."""
    if isinstance(body, dict) and type(asked_s := body.get("timeout")) in (int, float) and 0.0 < asked_s < PATIENCE_S:
        body["timeout"] = PATIENCE_S


@pytest.mark.timeout(200)
@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    ("operation", "mode"),
    [(operation, mode) for operation in OPERATIONS for mode in _modes(operation)],
    ids=lambda value: getattr(value, "label", None) or value.value,
)
def test_no_case_made_of_the_page_is_a_fault_of_the_server(operation: Any, mode: GenerationMode) -> None:
    @settings(
        max_examples=CASES_WITH_BODY if operation.body else CASES_WITHOUT,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        _give_time(case.body)
        case.call_and_validate(checks=CHECKED)

    check()


def test_the_cases_are_two_thousand() -> None:
    with_body = sum(bool(operation.body) for operation in OPERATIONS)
    assert with_body * 2 * CASES_WITH_BODY + (len(OPERATIONS) - with_body) * CASES_WITHOUT >= 2000
