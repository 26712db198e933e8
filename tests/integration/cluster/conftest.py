"""The one real cluster of the suite: Ray, gRPC, Redis and the real model, started by the command that users type."""

from collections.abc import Iterator

import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, command_line, end, start

NAME = "suite"


@pytest.fixture(scope="session")
def pronghorn() -> Iterator[CommandLine]:
    with command_line() as pronghorn:
        yield pronghorn


@pytest.fixture(scope="session")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    """Two prefill nodes, so that one may be killed, and one decode node, whose cache a test may reason about."""
    started = start(pronghorn, NAME, "--prefill=2", "--decode=1", "--kv-memory=192MiB", "--drain-timeout=10")
    try:
        yield started
        started.assert_ledger_clean()
    finally:
        end(started)
