"""Nodes leave under load and others come: no client hears an error, no text changes, nothing stays held."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import psutil
import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start
from tests.fakes.steady_load import PROMPTS, SteadyLoad, steady_load
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

MODEL = "tiny"
REPLACED_S = 180.0
Texts = dict[int, set[str]]


@pytest.fixture(scope="module")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    model = write_tiny_model(pronghorn.home / MODEL)  # four decode nodes and a new one beside them must fit
    sizes = ("--prefill=1", "--decode=2", "--orchestrators=2", "--kv-memory=16MiB", "--threads=1")
    started = start(pronghorn, "leaving", "--model", str(model), *sizes, "--drain-timeout=60")
    try:
        yield started
    finally:
        end(started)


@pytest.fixture(scope="module")
def undisturbed(cluster: RunningCluster) -> Texts:
    with asking(cluster) as load:
        load.wait_for(2 * len(PROMPTS))
    texts = load.texts()
    assert {len(said) for said in texts.values()} == {1}, "greedy streams differ though nothing happens"
    return texts


def asking(cluster: RunningCluster) -> AbstractContextManager[SteadyLoad]:
    return steady_load(cluster.url, tokens=400, model=MODEL)


def run(cluster: RunningCluster, *arguments: str) -> str:
    done = cluster.pronghorn(*arguments, "--name", cluster.name, timeout_s=600.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def nodes(status: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [node for node in status["nodes"] if node["role"] == role and node["healthy"] and not node["draining"]]


def wait_for_pools(cluster: RunningCluster, prefill: int, decode: int, without: frozenset[str] = frozenset()) -> None:
    def there(status: dict[str, Any]) -> bool:
        pools = [nodes(status, role) for role in ("prefill", "decode")]
        known = {node["name"] for node in status["nodes"]}
        return [len(pool) for pool in pools] == [prefill, decode] and not known & without

    cluster.wait_until(there, REPLACED_S)


def assert_nothing_was_lost(cluster: RunningCluster, load: SteadyLoad, undisturbed: Texts) -> None:
    assert load.texts() == undisturbed
    cluster.wait_until_at_rest()
    status = cluster.status()
    assert (status["in_flight"], status["blocks"]["held"]) == (0, 0)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_drained_node_goes_and_another_comes_in_its_place(
    cluster: RunningCluster, undisturbed: Texts, role: str
) -> None:
    wait_for_pools(cluster, 1, 2)
    leaving = nodes(cluster.status(), role)[0]
    pids = set(cluster.replica_pids(role))
    with asking(cluster) as load:
        assert f"{leaving['name']} has left" in run(cluster, "drain", leaving["name"])
        wait_for_pools(cluster, 1, 2, frozenset({leaving["name"]}))
        load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)
    assert len(pids - set(cluster.replica_pids(role))) == 1, "its process has ended"


def test_streams_that_outlast_the_grace_go_on_from_another_node(cluster: RunningCluster, undisturbed: Texts) -> None:
    wait_for_pools(cluster, 1, 2)
    leaving = nodes(cluster.status(), "decode")[0]["name"]
    with asking(cluster) as load:
        load.wait_for(1)  # and others are in the middle
        run(cluster, "drain", "--timeout=0", leaving)
        wait_for_pools(cluster, 1, 2, frozenset({leaving}))
        load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)


@pytest.mark.chaos
def test_a_drained_node_that_is_not_replaced_makes_its_pool_smaller_and_scaling_brings_it_back(
    cluster: RunningCluster, undisturbed: Texts
) -> None:
    wait_for_pools(cluster, 1, 2)
    leaving = nodes(cluster.status(), "decode")[0]["name"]
    with asking(cluster) as load:
        run(cluster, "drain", "--no-replace", leaving)
        wait_for_pools(cluster, 1, 1, frozenset({leaving}))
        load.wait_for(len(PROMPTS))
        run(cluster, "scale", "--decode=2")
        wait_for_pools(cluster, 1, 2)
        load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)


@pytest.mark.field("dynamo#13559")
def test_pools_are_scaled_down_and_up_again(cluster: RunningCluster, undisturbed: Texts) -> None:
    wait_for_pools(cluster, 1, 2)
    with asking(cluster) as load:
        for decode in (1, 4, 2, 4, 2):
            run(cluster, "scale", f"--decode={decode}")
            wait_for_pools(cluster, 1, decode)
            load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)


def test_every_process_is_replaced_by_a_redeployment(cluster: RunningCluster, undisturbed: Texts) -> None:
    wait_for_pools(cluster, 1, 2)
    before = {role: set(cluster.replica_pids(role)) for role in ("decode", "prefill", "orchestrator")}
    with asking(cluster) as load:
        run(cluster, "redeploy")
        wait_for_pools(cluster, 1, 2)
        load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)
    for role, pids in before.items():
        after = set(cluster.replica_pids(role))
        assert len(after) == len(pids) and not after & pids, role


@pytest.mark.field("dynamo#13559")
@pytest.mark.parametrize(
    "role",
    [
        "decode",
        pytest.param("prefill", marks=pytest.mark.chaos),
        pytest.param("orchestrator", marks=pytest.mark.chaos),
    ],
)
def test_a_process_that_gets_sigterm_lets_what_it_runs_end_and_is_replaced(
    cluster: RunningCluster, undisturbed: Texts, role: str
) -> None:
    wait_for_pools(cluster, 1, 2)
    pids = set(cluster.replica_pids(role))
    leaving = psutil.Process(min(pids))
    with asking(cluster) as load:
        leaving.terminate()
        psutil.wait_procs([leaving], timeout=REPLACED_S)
        assert not leaving.is_running()
        cluster.wait_until(lambda _: len(cluster.replica_pids(role)) == len(pids), REPLACED_S)
        wait_for_pools(cluster, 1, 2)
        load.wait_for(len(PROMPTS))
    assert_nothing_was_lost(cluster, load, undisturbed)


@pytest.mark.chaos
def test_an_engine_that_is_told_to_end_is_noticed_and_its_node_replaced(cluster: RunningCluster) -> None:
    wait_for_pools(cluster, 1, 2)
    [pid] = cluster.replica_pids("prefill")
    [engine] = [c for c in psutil.Process(pid).children() if "prefill_nodes.engine" in " ".join(c.cmdline())]
    leaving = nodes(cluster.status(), "prefill")[0]["name"]
    os.kill(engine.pid, signal.SIGTERM)
    wait_for_pools(cluster, 1, 2, frozenset({leaving}))
    cluster.wait_until_at_rest()


def test_the_nodes_there_are_are_named_where_the_one_asked_for_is_not(cluster: RunningCluster) -> None:
    done = cluster.pronghorn("drain", "nobody", "--name", cluster.name)
    assert done.returncode == 1
    assert "no node is called 'nobody'" in done.stderr and "prefill-" in done.stderr
