from collections.abc import AsyncIterator

import pytest

from kvcache import dkv_connector, fetch_plan
from tests.integration.nodes.rig import Rig, new_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with new_rig() as rig:
        yield rig


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory and those who are asked for blocks have the time of a busy machine to answer, and that one was slow
    to bring blocks once does not make computing them cheaper."""
    monkeypatch.setattr(dkv_connector, "DIRECTORY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(fetch_plan, "MIN_WAIT_S", 60.0)
    monkeypatch.setattr(fetch_plan.BlockPrices, "cheaper_to_bring", lambda *_: True)
