import httpx
import msgspec

from cluster.bringup import _readiness
from cluster.config import ServiceConfig
from cluster.model_config import ModelConfig
from orchestrator.ports import ModelState

SERVICE = ServiceConfig(
    model_path="",
    model_name="",
    models={"a": ModelConfig(path="/a", decode=2), "b": ModelConfig(path="/b", prefill=0)},
    redis_url="r",
    key_prefix="k",
)
ALL = [("a", "decode"), ("a", "decode"), ("a", "prefill"), ("b", "decode")]


def readiness(nodes: list[tuple[str, str]], unready: str = "") -> tuple[bool, str]:
    models = [ModelState(name, name != unready, f"of {name}", 0) for name in SERVICE.models]
    found = [{"model": model, "role": role, "healthy": True} for model, role in nodes]
    status = msgspec.json.encode({"ready": True, "reason": "as told", "models": models, "nodes": found})
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=status))
    with httpx.Client(base_url="http://c", transport=transport) as client:
        return _readiness(client, SERVICE)


def test_a_cluster_is_ready_with_every_model_and_all_of_its_nodes() -> None:
    assert readiness(ALL) == (True, "as told")
    assert readiness(ALL, unready="b") == (False, "as told")


def test_nodes_of_one_model_do_not_stand_for_those_of_another() -> None:
    assert readiness([*ALL[1:], ("b", "decode"), ("b", "prefill")]) == (False, "1 decode nodes of a are missing")
