import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_cluster import CommandLine


@pytest.fixture(scope="session")
def pronghorn() -> Iterator[CommandLine]:
    # Not tmp_path: Unix sockets live below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as home:
        yield CommandLine(Path(home))
