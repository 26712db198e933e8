"""A Ray cluster of three machines that is joined: pools stand where they were asked to, Serve's own tool brings up what
is printed for it, and streams outlive a machine."""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import config
from cluster.chaos.machines import RayCluster, machines
from cluster.ports import free_port
from cluster.redis_server import RedisServer
from tests.fakes.running_cluster import ROOT, CommandLine, end, start
from tests.fakes.steady_load import PROMPTS, steady_load
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 300.0
TOKENS = 400
SIZES = ["--decode=2", "--kv-memory=16MiB", "--threads=1"]
HEAD_ONLY = "--option=proxy_location=HeadOnly"
"""All machines have the same loopback, where their proxies could not be told apart."""
PLACED = (
    "service.placement.orchestrator.labels.machine=2",
    "service.placement.prefill.labels.machine=2",
    "service.placement.decode.labels.machine=!2",
    "service.placement.decode.max_per_machine=1",
)


@dataclass(frozen=True)
class Place:
    """The machines, and a Redis with a password, which stands in the environment of every one of them."""

    ray: RayCluster
    redis_url: str
    pronghorn: CommandLine
    options: list[str]

    def of_ray(self) -> list[str]:
        """What the doctor says of the machines and of Redis."""
        done = self.pronghorn("doctor", "--json", f"--address={self.ray.address}", f"--redis-url={self.redis_url}")
        return [finding["what"] for finding in json.loads(done.stdout) if finding["check"] in ("ray", "redis")]

    def application(self) -> dict[str, Any]:
        """As Serve tells of it on Ray's dashboard."""
        token = self.ray.environ["RAY_AUTH_TOKEN_PATH"]
        shown = httpx.get(
            f"{self.ray.dashboard_url}/api/serve/applications/",
            headers={"Authorization": f"Bearer {Path(token).read_text()}"},
            timeout=60.0,
            trust_env=False,
        )
        found: dict[str, Any] = shown.json()["applications"]["pronghorn"]
        return found

    def serve(self, *arguments: str) -> None:
        """Serve's own command."""
        command = [str(Path(sys.executable).with_name("serve")), *arguments, "--address", self.ray.dashboard_url]
        done = subprocess.run(
            command,
            env=self.ray.environ,
            cwd=self.pronghorn.home,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def place(pronghorn: CommandLine) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="pv-", dir="/tmp") as folder:
        redis = RedisServer(Path(folder), config.environment())
        redis.start()
        environ = {config.REDIS_VARIABLE: redis.url, "PYTHONPATH": str(ROOT)}
        try:
            with machines("three", (0, 0, 0), environ, dashboard=True) as ray:
                token = {name: value for name, value in ray.environ.items() if name.startswith("RAY_AUTH")}
                model = write_tiny_model(pronghorn.home / "tiny")
                options = [f"--address={ray.address}", f"--redis-url={redis.url}", f"--model={model}", HEAD_ONLY]
                yield Place(ray, redis.url, CommandLine(pronghorn.home, token), options)
        finally:
            redis.stop()


def hosts(status: dict[str, Any], role: str) -> Counter[str]:
    """How many nodes of that kind each machine has."""
    return Counter(
        node["address"].rsplit(":", 1)[0]
        for node in status["nodes"]
        if node["role"] == role and node["healthy"] and not node["draining"]
    )


def works(status: dict[str, Any], host: str) -> bool:
    return any(node["in_flight"] > 0 for node in status["nodes"] if node["address"].startswith(f"{host}:"))


def essentials(application: dict[str, Any]) -> dict[str, Any]:
    """What makes two applications the same."""
    return {
        "args": application["deployed_app_config"]["args"] | {"redis_url": None},
        "import_path": application["deployed_app_config"]["import_path"],
        "sizes": {name: of["deployment_config"]["num_replicas"] for name, of in application["deployments"].items()},
    }


def await_nodes(url: str, **wanted: int) -> dict[str, Any]:
    """The status that says that so many of each kind serve."""
    give_up_s = time.monotonic() + PATIENCE_S
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as client:
        while True:
            try:
                answer = client.get("/internal/status")
            except httpx.TransportError as error:
                said = repr(error)
            else:
                said = answer.text
                if answer.status_code == httpx.codes.OK and all(
                    hosts(answer.json(), role).total() == count for role, count in wanted.items()
                ):
                    found: dict[str, Any] = answer.json()
                    return found
            assert time.monotonic() < give_up_s, said
            time.sleep(0.2)  # other processes, which tell nobody else


def test_streams_and_pools_outlive_a_machine(place: Place) -> None:
    cluster = start(place.pronghorn, "lost", *place.options, *SIZES, *(f"--option={option}" for option in PLACED))
    try:
        placed = cluster.status()
        assert hosts(placed, "prefill") == {"127.0.0.2": 1}
        assert hosts(placed, "decode") == {"127.0.0.3": 1, "127.0.0.4": 1}

        with steady_load(cluster.url, TOKENS, model="tiny") as load:
            place.ray.kill_machine("127.0.0.3")
            cluster.wait_until(lambda status: hosts(status, "decode") == {"127.0.0.4": 1}, PATIENCE_S)
            cluster.wait_until(lambda status: status["counters"].get("stream_migrated", 0) > 0, PATIENCE_S)
            load.wait_for(len(PROMPTS))
        said = load.texts()
        assert "127.0.0.3 is dead" in place.of_ray()[0]

        replaced = place.ray.add_machine()
        cluster.wait_until(lambda status: hosts(status, "decode") == {"127.0.0.4": 1, replaced: 1}, PATIENCE_S)
        with steady_load(cluster.url, TOKENS, model="tiny") as load:
            cluster.wait_until(lambda status: works(status, replaced), PATIENCE_S)
        for prompt, texts in load.texts().items():
            assert len(said[prompt] | texts) == 1, "a stream that moved says something else"
        cluster.wait_until_at_rest()
    finally:
        end(cluster)


@pytest.mark.chaos  # for its time
def test_packed_nodes_share_a_machine_and_serves_own_tool_spreads_the_same_application(place: Place) -> None:
    packed = start(place.pronghorn, "same", *place.options, *SIZES, "--option=scheduling=pack")
    try:
        status = packed.status()
        (machine,) = hosts(status, "prefill")
        assert hosts(status, "decode") == {machine: 2}
        brought_up = essentials(place.application())
    finally:
        end(packed)

    port = free_port()
    done = place.pronghorn("up", "--name=same", "--print-serve-config", f"--port={port}", *place.options, *SIZES)
    assert done.returncode == 0, done.stderr
    assert str(httpx.URL(place.redis_url).password) not in done.stdout
    (place.pronghorn.home / "serve.yaml").write_text(done.stdout)
    place.serve("deploy", "serve.yaml")
    try:
        status = await_nodes(f"http://127.0.0.1:{port}", prefill=1, decode=2)
        assert len(hosts(status, "prefill") | hosts(status, "decode")) > 1
        assert essentials(place.application()) == brought_up
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        body |= {"ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        place.serve("shutdown", "--yes")
