"""Two nodes of each kind under load while parts of the cluster are killed: requests end, and everything comes back."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start
from tests.fakes.storm import Storm
from tests.fakes.streams import streams

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]  # test_soak plays the same under more faults

DEADLINE_S = 60.0
REQUESTS = 200
BROKEN = {"node_lost", "engine_died"}
"""What a client of a killed decode node may hear: a stream that has begun is not begun again elsewhere."""
REPLACED_S = 120.0


@pytest.fixture(scope="module")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    started = start(pronghorn, "storm", "--prefill=2", "--decode=2", "--kv-memory=192MiB", f"--deadline={DEADLINE_S}")
    try:
        yield started
    finally:
        end(started)


def rage(cluster: RunningCluster, requests: int, kill_at: dict[int, str]) -> dict[str, int]:
    """How a storm ended in which a node of the pool `kill_at[n]` was killed when `n` requests had ended."""

    def on_ended(count: int) -> None:
        if count in kill_at:
            os.kill(cluster.replica_pids(kill_at[count])[0], signal.SIGKILL)

    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201  # shown where the test fails
    return dict(asyncio.run(Storm(cluster.url, seed, requests, DEADLINE_S + 10.0, on_ended).rage()))


def wait_until_whole(cluster: RunningCluster) -> None:
    def whole(status: dict[str, Any]) -> bool:
        healthy = [node["role"] for node in status["nodes"] if node["healthy"]]
        return healthy.count("prefill") == 2 and healthy.count("decode") == 2

    cluster.wait_until(whole, REPLACED_S)


def assert_at_rest(cluster: RunningCluster) -> None:
    cluster.wait_until_at_rest()
    status = cluster.status()
    assert (status["in_flight"], status["blocks"]["held"]) == (0, 0)


def test_every_node_takes_part(cluster: RunningCluster) -> None:
    ended = rage(cluster, 32, {})
    assert set(ended) == {"answered", "cut"}
    for node in cluster.status()["nodes"]:
        done = node["counters"]["blocks_sent" if node["role"] == "prefill" else "pull_committed"]
        assert done > 0, node
    assert_at_rest(cluster)


def test_every_request_ends_though_nodes_of_both_kinds_are_killed(cluster: RunningCluster) -> None:
    ended = rage(cluster, REQUESTS, {REQUESTS // 3: "prefill", 2 * REQUESTS // 3: "decode"})
    assert sum(ended.values()) == REQUESTS
    assert set(ended) <= {"answered", "cut"} | BROKEN
    assert ended["answered"] > REQUESTS // 2
    assert_at_rest(cluster)
    wait_until_whole(cluster)
    cluster.assert_ledger_clean()


@pytest.mark.cells("F11 P10")
def test_streams_run_on_while_redis_is_killed_and_every_node_is_registered_again(cluster: RunningCluster) -> None:
    [server] = [p for p in cluster.processes() if "valkey-server" in p.name() or "redis-server" in p.name()]
    before = cluster.status()["redis"]
    assert len(before["registered"]) == 4
    with streams(cluster.url, count=3, tokens=200) as running:
        server.send_signal(signal.SIGKILL)
        with streams(cluster.url, count=1, tokens=4) as meanwhile:
            assert [stream.ended() for stream in meanwhile] == ["answered"]
        assert [stream.ended() for stream in running] == ["answered"] * 3
    after = cluster.status()["redis"]
    assert after["url"] == before["url"]
    assert after["registered"] == before["registered"]
    assert not psutil.pid_exists(server.pid)
    assert_at_rest(cluster)
    cluster.assert_ledger_clean()
