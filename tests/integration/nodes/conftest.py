from collections.abc import AsyncIterator

import pytest

from tests.integration.nodes.rig import Rig, new_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with new_rig() as rig:
        yield rig
