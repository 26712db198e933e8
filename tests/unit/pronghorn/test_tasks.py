import asyncio

import pytest

from pronghorn.tasks import Owner


async def test_stop_cancels_what_still_runs() -> None:
    owner = Owner("test")
    task = owner.start(asyncio.Event().wait(), "forever")
    assert owner.running == ["test/forever"]
    await owner.stop(grace_s=1.0)
    assert task.cancelled() and owner.running == []


async def test_the_first_failure_is_reported_once_with_its_name() -> None:
    seen: list[tuple[str, str]] = []
    owner = Owner("test", lambda name, error: seen.append((name, str(error))))

    async def fail(why: str) -> None:
        raise ValueError(why)

    with pytest.raises(ValueError, match="one"):
        await owner.start(fail("one"), "a")
    with pytest.raises(ValueError, match="two"):
        await owner.start(fail("two"), "b")
    assert seen == [("test/a", "one")]
    await owner.stop(grace_s=1.0)


async def test_a_stopped_owner_starts_nothing() -> None:
    owner = Owner("test")
    await owner.stop(grace_s=0.1)
    with pytest.raises(RuntimeError, match="test is stopped"):
        owner.start(asyncio.sleep(0), "late")


async def test_a_task_may_stop_its_own_owner() -> None:
    owner = Owner("test")
    other = owner.start(asyncio.Event().wait(), "other")
    await owner.start(owner.stop(grace_s=1.0), "stopper")
    assert other.cancelled()
