import json

import pytest

from orchestrator.explanation import RequestRecord
from orchestrator.ports import GenerationJob
from pipelines.types.frames import NodeReport
from pronghorn.ids import Incarnation, NodeName
from tests.fakes.api_client import MODEL, Served, error_of
from tests.fakes.scripted_generator import Step, spoken


@pytest.mark.conformance(59)
async def test_the_served_model_is_listed_and_found() -> None:
    listed = (await Served().request("GET", "/v1/models")).json()
    card = {"id": MODEL, "object": "model", "created": 17, "owned_by": "pronghorn", "max_model_len": 200}
    assert listed == {"object": "list", "data": [card]}
    assert (await Served().request("GET", f"/v1/models/{MODEL}")).json() == card
    assert error_of(await Served().request("GET", "/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.conformance(59)
async def test_health_asks_nobody_and_ready_asks_the_cluster() -> None:
    served = Served()
    served.view.readiness = (False, "no decode node is registered")
    assert (await served.request("GET", "/health")).json() == {"status": "ok"}
    response = await served.request("GET", "/ready")
    assert error_of(response, 503)["message"] == "no decode node is registered"
    assert response.headers["retry-after"] == "1"
    served.view.readiness = (True, "fine")
    assert (await served.request("GET", "/ready")).json() == {"status": "ready", "reason": "fine"}


@pytest.mark.field("production-stack#1091")
async def test_health_tells_of_many_nodes_that_fail_and_stays_200() -> None:
    """A process that is restarted for it would do no better."""
    served = Served()
    served.view.trouble = "9 of the last 12 nodes that were picked failed"
    response = await served.request("GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "degraded", "reason": served.view.trouble})


@pytest.mark.conformance(59)
async def test_the_version_is_told() -> None:
    assert (await Served().request("GET", "/version")).json() == {"version": "1.2.3"}


@pytest.mark.conformance(68)
async def test_the_prefix_cache_is_reset_unless_there_is_none() -> None:
    served = Served()
    assert (await served.request("POST", "/reset_prefix_cache")).status_code == 200
    assert served.view.resets == 1
    error_of(await Served(prefix_caching=False).request("POST", "/reset_prefix_cache"), 400)


async def test_the_status_shows_the_cluster() -> None:
    served = Served()
    report = NodeReport(
        name=NodeName("decode-1"),
        role="decode",
        model=MODEL,
        address="127.0.0.1:1",
        incarnation=Incarnation("a" * 32),
        healthy=True,
        in_flight=1,
        total_blocks=8,
        free_blocks=7,
        held_blocks=1,
        cached_blocks=2,
        waiting=0,
        running=1,
        awaiting_blocks=0,
    )
    served.view.reports.append(report)
    body = (await served.request("GET", "/internal/status")).json()
    assert body["nodes"][0]["name"] == "decode-1"
    assert body["nodes"][0]["held_blocks"] == 1
    assert body["counters"] == {"attempts": 3}
    assert (body["in_flight"], body["ready"]) == (2, True)


@pytest.mark.conformance(61)
@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v2/models"])
async def test_an_unknown_route_is_an_envelope(path: str) -> None:
    error = error_of(await Served().request("GET", path), 404)
    assert error["code"] == "unknown_url"
    assert path in error["message"]


async def test_a_wrong_method_is_an_envelope_that_says_the_right_one() -> None:
    response = await Served().request("GET", "/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_supported"
    assert response.headers["allow"] == "POST"


@pytest.mark.conformance(67)
async def test_the_clients_request_id_comes_back_and_names_nothing_inside() -> None:
    served = Served()
    response = await served.chat(headers={"X-Request-ID": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert str(served.generator.job.context.request_id) != "mine-1"
    assert served.generator.job.key == "mine-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>"])
async def test_a_request_id_out_of_bounds_is_refused_by_name(given: str) -> None:
    response = await Served().chat(headers={"X-Request-ID": given})
    error = error_of(response, 400)
    assert error["param"] == "X-Request-ID"
    assert "1 to 128" in error["message"]


@pytest.mark.conformance(67)
@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "<script>"])
async def test_a_fresh_request_id_replaces_one_of_no_use(given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    ids = {(await Served().request("GET", "/nope", headers=headers)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(i) == 32 for i in ids)


async def test_a_500_has_a_request_id_too(caplog) -> None:
    served = Served()

    def broken() -> tuple[bool, str]:
        raise RuntimeError("boom")

    served.view.ready = broken  # type: ignore[method-assign]  # a fault on purpose
    response = await served.request("GET", "/ready", headers={"X-Request-ID": "r1"})
    error_of(response, 500)
    assert response.headers["x-request-id"] == "r1"
    assert "r1" in caplog.text


async def test_the_openapi_page_has_the_bodies() -> None:
    page = (await Served().request("GET", "/openapi.json")).json()
    schemas = page["components"]["schemas"]
    for path, body in (("/v1/chat/completions", "ChatCompletionRequest"), ("/v1/completions", "CompletionRequest")):
        post = page["paths"][path]["post"]
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{body}"
        assert schemas[body]["additionalProperties"] is False
        assert "400" in post["responses"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    temperature = schemas["ChatCompletionRequest"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert "HTTPValidationError" not in schemas
    assert references(page) <= {f"#/components/schemas/{name}" for name in schemas}


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


async def test_a_requests_record_is_found_by_its_id_and_stands_in_a_header_when_asked_for() -> None:
    served = Served()
    served.view.records["abc"] = RequestRecord("abc", MODEL, 4)
    for name in ("abc", "chatcmpl-abc", "cmpl-abc"):
        assert (await served.request("GET", f"/internal/requests/{name}")).json()["prompt_tokens"] == 4
    error_of(await served.request("GET", "/internal/requests/other"), 404)


async def test_an_answer_has_its_explanation_in_a_header_where_that_was_asked_for() -> None:
    def script(job: GenerationJob) -> list[Step]:
        request_id = str(job.context.request_id)
        served.view.records[request_id] = RequestRecord(request_id, MODEL, 4, session=job.session)
        return spoken("hello")

    served = Served(script)
    plain = await served.complete()
    assert plain.status_code == 200 and "x-explanation" not in plain.headers
    for stream in (False, True):
        asked = await served.complete({"X-Explain": "1", "X-Session-ID": "talk"}, stream=stream)
        assert json.loads(asked.headers["x-explanation"])["session"] == "talk"
