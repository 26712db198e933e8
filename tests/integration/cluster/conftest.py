"""The one real cluster of the suite: Ray, gRPC, Redis and the real model, started by the command that users type."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start

NAME = "suite"


@pytest.fixture(scope="session")
def pronghorn() -> Iterator[CommandLine]:
    # Not tmp_path: Unix sockets live below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as home:
        yield CommandLine(Path(home))


@pytest.fixture(scope="session")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    """Two prefill nodes, so that one may be killed, and one decode node, whose cache a test may reason about."""
    started = start(pronghorn, NAME, "--prefill=2", "--decode=1", "--kv-memory=192MiB", "--drain-timeout=10")
    try:
        yield started
    finally:
        end(started)
