"""Many clients, some of whom leave, while a prefill node is killed: every request ends, and nothing stays held."""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from tests.fakes.running_cluster import RunningCluster
from tests.fakes.storm import Storm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

REQUESTS = 80
LIMIT_S = 120.0


def test_every_request_ends_though_clients_leave_and_a_prefill_node_is_killed(cluster: RunningCluster) -> None:
    def on_ended(count: int) -> None:
        if count == REQUESTS // 3:
            os.kill(cluster.replica_pids("prefill")[0], signal.SIGKILL)

    ended = asyncio.run(Storm(cluster.url, 5, REQUESTS, LIMIT_S, on_ended).rage())
    assert ended.total() == REQUESTS
    assert set(ended) == {"answered", "cut"}, ended
    cluster.wait_until_at_rest()
    status = cluster.status()
    assert (status["in_flight"], status["blocks"]["held"]) == (0, 0)


def test_the_killed_node_is_replaced(cluster: RunningCluster) -> None:
    def both_there(status: dict[str, Any]) -> bool:
        return sum(node["role"] == "prefill" and node["healthy"] for node in status["nodes"]) == 2

    cluster.wait_until(both_there, 120.0)


def test_an_engine_ends_with_its_node(cluster: RunningCluster) -> None:
    engines = [
        child
        for pid in cluster.replica_pids("prefill")
        for child in psutil.Process(pid).children()
        if "prefill_nodes.engine" in " ".join(child.cmdline())
    ]
    assert len(engines) == 2
