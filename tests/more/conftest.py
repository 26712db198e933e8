from collections.abc import Iterator

import pytest

from tests.fakes.running_cluster import CommandLine, command_line


@pytest.fixture(scope="session")
def pronghorn() -> Iterator[CommandLine]:
    with command_line() as pronghorn:
        yield pronghorn
