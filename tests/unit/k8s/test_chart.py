"""The Helm chart, rendered by Helm and held to every schema that there is without a cluster: its own of the values,
Kubernetes' of built-in kinds, KubeRay's of a RayService, Serve's of the application in it, and ours of the arguments.

No live cluster was used. KubeRay's schemas are read from `../shared/kuberay-crds`; where that is absent, what needs
them skips.
"""

import copy
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from cluster import config
from cluster.config import ServiceConfig
from k8s.render import CHART, main, render
from pronghorn.errors import ConfigurationError

KUBERNETES = "1.37"
CRDS = Path(__file__).parents[4] / "shared" / "kuberay-crds"
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpus": {
        "image": {"tag": "0.1.0-cuda", "pullSecrets": ["registry"]},
        "prefill": {"gpus": 1, "replicas": 3, "nodeSelector": {"gpu": "h200"}, "tolerations": [{"operator": "Exists"}]},
        "decode": {"gpus": 1},
        "model": {"name": "m", "path": "/models/m", "existingClaim": "models"},
        "service": {"policy": "least_request", "block_tokens": 32},
        "valkey": {"storageClassName": "fast"},
    },
    "small": {
        "gateway": {"replicas": 1},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
        "podDisruptionBudgets": False,
        "upgradeStrategy": "None",
        "http": {"type": "NodePort"},
        "deadlineSeconds": 60,
    },
}


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for text in render(values).values() for each in yaml.safe_load_all(text) if each]


def the_service(values: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each for each in objects(values) if each["kind"] == "RayService"]
    return found


def application(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(the_service(values)["spec"]["serveConfigV2"])
    return found


@pytest.fixture(params=list(VALUES))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VALUES[request.param]


def test_helm_finds_no_fault_in_the_chart() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


def test_built_in_kinds_are_strictly_valid(values: dict[str, Any]) -> None:
    built_in = [each for each in objects(values) if not each["apiVersion"].startswith("ray.io/")]
    assert {each["kind"] for each in built_in} >= {"Service", "StatefulSet"}
    for each in built_in:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_pods_of_ray_are_strictly_valid(values: dict[str, Any]) -> None:
    """As templates of a StatefulSet: KubeRay's schema leaves much of a pod open."""
    (pattern,) = [
        each
        for each in objects(values)
        if each["metadata"]["name"].endswith("valkey-gcs") and each["kind"] != "Service"
    ]
    cluster = the_service(values)["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = copy.deepcopy(group["template"])
        pattern["spec"]["template"] = pod
        pod["metadata"]["labels"] |= pattern["spec"]["selector"]["matchLabels"]
        kubernetes_validate.validate(pattern, KUBERNETES, strict=True)
        (container,) = pod["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["timeoutSeconds"] >= 5
        assert pod["spec"]["securityContext"]["runAsNonRoot"]


def closed(schema: Any) -> Any:
    """The schema of a CRD as one of JSON Schema's draft 7 that refuses unknown fields."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def kuberay() -> jsonschema.Draft7Validator:
    path = CRDS / "ray.io_rayservices.yaml"
    if not path.is_file():
        pytest.skip("KubeRay's schemas are not here: the RayService is held to Kubernetes' and Serve's schemas alone")
    (version,) = [v for v in yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"] if v["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def test_the_ray_service_is_what_kuberay_takes(values: dict[str, Any], kuberay: jsonschema.Draft7Validator) -> None:
    faults = [f"{each.json_path}: {each.message[:200]}" for each in kuberay.iter_errors(the_service(values))]
    assert faults == []


@pytest.mark.parametrize(
    "path",
    [("rayClusterConfig", "headGroupSpec"), ("rayClusterConfig", "gcsFaultToleranceOptions"), ("serveService",), ()],
)
def test_a_typo_in_a_field_of_kuberay_is_found(path: tuple[str, ...], kuberay: jsonschema.Draft7Validator) -> None:
    service = the_service({})
    place = service["spec"]
    for name in path:
        place = place[name]
    place["tempalte"] = {}
    assert any("tempalte" in each.message for each in kuberay.iter_errors(service))


def unknown_to_serve(planned: dict[str, Any]) -> list[str]:
    """Fields that Serve's schema does not have: Serve itself passes over those of deployments in silence."""
    ServeDeploySchema.model_validate(planned)
    levels: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (ServeDeploySchema, planned),
        (HTTPOptionsSchema, planned["http_options"]),
    ]
    for each in planned["applications"]:
        levels.append((ServeApplicationSchema, each))
        for deployment in each["deployments"]:
            levels += [(DeploymentSchema, deployment), (RayActorOptionsSchema, deployment["ray_actor_options"])]
    return [name for schema, fields in levels for name in fields if name not in schema.model_fields]


def test_the_application_is_what_serve_and_the_builder_take(values: dict[str, Any]) -> None:
    assert unknown_to_serve(application(values)) == []
    (deployed,) = application(values)["applications"]
    service = config.parse(deployed["args"], ServiceConfig)
    assert service.redis_url == ""
    assert {each["name"] for each in deployed["deployments"]} == {"orchestrator", "prefill", "decode"}


def test_a_typo_in_the_application_is_found() -> None:
    planted = application({})
    planted["applications"][0]["deployments"][0]["max_replica_per_node"] = 1
    planted["applications"][0]["deployments"][1]["ray_actor_options"]["label_selectors"] = {}
    planted["http_options"]["hots"] = "0.0.0.0"
    assert unknown_to_serve(planted) == ["hots", "max_replica_per_node", "label_selectors"]
    planted["applications"][0]["deployments"][0] = {"name": "decode", "num_replicas": "many"}
    with pytest.raises(ValueError, match="num_replicas"):
        ServeDeploySchema.model_validate(planted)
    with pytest.raises(ConfigurationError, match="polcy"):
        config.parse(application({"service": {"polcy": "random"}})["applications"][0]["args"], ServiceConfig)


def test_whatever_leaves_has_longer_than_the_longest_stream(values: dict[str, Any]) -> None:
    (deployed,) = application(values)["applications"]
    deadline_s, drain_s = deployed["args"]["deadline_s"], deployed["args"]["drain_timeout_s"]
    (serve_s,) = {each["graceful_shutdown_timeout_s"] for each in deployed["deployments"]}
    cluster = the_service(values)["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        ray_s = int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert deadline_s <= drain_s < serve_s < ray_s < pod["terminationGracePeriodSeconds"]


def test_every_pool_has_its_workers_and_the_head_none(values: dict[str, Any]) -> None:
    cluster = the_service(values)["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (deployed,) = application(values)["applications"]
    groups = {each["labels"]["pronghorn.io/pool"]: each["replicas"] for each in cluster["workerGroupSpecs"]}
    args = deployed["args"]
    assert groups == {"gateway": args["orchestrators"], "prefill": args["prefill"], "decode": args["decode"]}
    selected = {each["name"]: each["ray_actor_options"]["label_selector"] for each in deployed["deployments"]}
    assert selected["orchestrator"] == {"pronghorn.io/pool": "gateway"}
    assert {selected[role]["pronghorn.io/pool"] for role in ("prefill", "decode")} == {"prefill", "decode"}
    assert {(each["max_replicas_per_node"], each["max_surge_percent"]) for each in deployed["deployments"]} == {(1, 0)}


def test_gpus_are_asked_for_where_they_are_used() -> None:
    (deployed,) = application(VALUES["gpus"])["applications"]
    assert deployed["args"]["device"] == "cuda"
    on = {each["name"]: each["ray_actor_options"]["num_gpus"] for each in deployed["deployments"]}
    assert on == {"orchestrator": 0, "prefill": 1, "decode": 1}
    groups = the_service(VALUES["gpus"])["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = {g["groupName"]: g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in groups}
    assert {name: each.get("nvidia.com/gpu") for name, each in limits.items()} == {
        "gateway": None,
        "prefill": 1,
        "decode": 1,
    }


def test_another_model_or_image_gets_a_directory_of_its_own() -> None:
    def prefix(values: dict[str, Any]) -> str:
        return str(application(values)["applications"][0]["args"]["key_prefix"])

    assert prefix({}) != prefix({"image": {"tag": "0.2.0"}})
    assert prefix({}) != prefix({"model": {"path": "/models/other"}})
    assert prefix({}) == prefix({"decode": {"replicas": 7}, "deadlineSeconds": 61})


def test_no_manifest_holds_a_secret() -> None:
    assert not [each for each in objects({}) if each["kind"] == "Secret"]
    for text in render({}).values():
        assert "redis://:$(VALKEY_PASSWORD)@" in text or "redis://" not in text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefil": {}}, "prefil"),
        ({"prefill": {"replica": 3}}, "replica"),
        ({"decode": {"replicas": 0}}, "replicas"),
        ({"decode": {"gpus": 2}}, "gpus"),
        ({"decode": {"gpus": 1}}, "both pools have a device each"),
        ({"deadlineSeconds": 0}, "deadlineSeconds"),
        ({"nodes": {"kvMemory": "4 GB"}}, "kvMemory"),
        ({"service": {"redis_url": "redis://elsewhere"}}, "redis_url"),
        ({"rayVersion": "2.59.0"}, "rayVersion"),
        ({"upgradeStrategy": "Rolling"}, "upgradeStrategy"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_manifests_are_written_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "values.yaml").write_text("decode: {replicas: 5}")
    assert main(["--values", str(tmp_path / "values.yaml"), "--out", str(tmp_path / "out")]) == 0
    written = yaml.safe_load((tmp_path / "out" / "rayservice.yaml").read_text())
    assert written["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]["replicas"] == 5
    (tmp_path / "values.yaml").write_text("decode: {replicas: many}")
    assert main(["--values", str(tmp_path / "values.yaml")]) == 1
    assert "replicas" in capsys.readouterr().err
