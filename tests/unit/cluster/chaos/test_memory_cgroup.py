from pathlib import Path

import pytest

from cluster.chaos.memory_cgroup import LIMIT_BYTES, MemoryCgroup, why_not
from pronghorn.errors import Unavailable


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest, tmp_path: Path) -> int:
    number: int = request.param
    if number == 1:
        (tmp_path / "memory").mkdir()
        (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    else:
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    return number


def test_a_process_is_taken_where_there_is_no_room_and_its_end_is_counted(tmp_path: Path, version: int) -> None:
    cgroup = MemoryCgroup("tight", tmp_path)
    made = (tmp_path / "memory" if version == 1 else tmp_path) / "tight"
    limit, told = ("memory.limit_in_bytes", "memory.oom_control") if version == 1 else ("memory.max", "memory.events")
    assert int((made / limit).read_text()) == LIMIT_BYTES
    cgroup.take(4711)
    assert (made / "cgroup.procs").read_text() == "4711"
    (made / told).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert cgroup.kills() == 1


def test_what_it_has_not_ended_is_let_go(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.chaos.memory_cgroup.REMOVED_S", 0.0)  # files of a made-up one stay where they are
    cgroup = MemoryCgroup("tight", tmp_path)
    cgroup.take(4711)
    cgroup.remove()
    assert ((tmp_path / "memory" if version == 1 else tmp_path) / "cgroup.procs").read_text() == "4711"


def test_without_a_memory_controller_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids")
    assert why_not(tmp_path) == f"a memory cgroup needs a memory controller below {tmp_path}"
    with pytest.raises(Unavailable, match="needs a memory controller"):
        MemoryCgroup("tight", tmp_path)


@pytest.mark.usefixtures("version")
def test_a_cgroup_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no memory cgroup can be made"):
        MemoryCgroup("no/such/parent", tmp_path)
