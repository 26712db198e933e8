"""Ray's own calls fail, by Ray's own switch, before they are sent, on their way or on their way back; a node dies
meanwhile. No token goes through Ray, and a pool heals all the same. Where Serve takes calls that failed for a dead
replica it ends a living one; then its clients are told, and nothing is lost or wrong."""

import json
from collections.abc import AsyncIterator

import pytest

from cluster.chaos.local_site import LocalSite
from cluster.chaos.own_cluster import own_cluster
from cluster.chaos.recorder import Verdict
from cluster.chaos.runner import Runner
from cluster.chaos.scenario import Cluster, read
from tests.fakes.running_cluster import ROOT, command_line
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ONE_IN_TEN = {"num_failures": -1, "req_failure_prob": 4, "resp_failure_prob": 3, "in_flight_failure_prob": 3}
ONE_IN_FIFTY = {"num_failures": -1, "req_failure_prob": 1, "in_flight_failure_prob": 1}
FAILING = {
    "NodeManagerService.grpc_client.RequestWorkerLease": ONE_IN_TEN,
    "ray::rpc::ActorInfoGcsService.grpc_client.CreateActor": ONE_IN_TEN,
    "CoreWorkerService.grpc_client.PushTask": ONE_IN_FIFTY,
}
"""With one in ten of the calls by which Serve starts a replica, Serve gives the application up."""
SCENARIO = """
about: x
cluster: {prefill: 1, decode: 2}
load: {streams: 8, requests: 32, prompts: 8, new_tokens: [150], deadline_s: 240}
checks: {errors: null, recovered_within_s: 300}
faults:
  - {kind: kill, process: decode, at: {pieces: 500}}
"""


@pytest.fixture
async def site() -> AsyncIterator[LocalSite]:
    with command_line(PYTHONPATH=str(ROOT)) as pronghorn:
        home = pronghorn.home / "p"
        settings = {
            "PRONGHORN_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "RAY_testing_rpc_failure": json.dumps(FAILING),
        }
        model = write_tiny_model(pronghorn.home / "tiny")
        async with own_cluster(
            home, Cluster(prefill=1, decode=2), print, f"--model={model}", settings=settings
        ) as running:
            yield running


async def test_requests_and_pools_outlive_it_that_calls_of_ray_fail(site: LocalSite) -> None:
    outcome = await Runner(site, seed=1, say=print).run(read(SCENARIO, "failing calls"))
    assert outcome.failures == []
    assert set(outcome.requests) <= {Verdict.ANSWERED, Verdict.ERROR} and outcome.total(Verdict.ANSWERED) > 0
    logs = [log.read_text(errors="replace") for log in site.temp_dir.glob("r/session_*/logs/*") if log.is_file()]
    failed = {call: sum(log.count(f"failure for {call}") for log in logs) for call in FAILING}
    assert failed["CoreWorkerService.grpc_client.PushTask"] > 0, failed
