from collections.abc import AsyncIterator

import pytest

from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as cluster:
        yield cluster


@pytest.fixture
async def client() -> AsyncIterator[Owner]:
    """Who runs the requests of a test."""
    owner = Owner("client")
    yield owner
    await owner.stop(1.0)
