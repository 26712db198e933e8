import os
from pathlib import Path

import pytest

from cluster.chaos import namespaces
from cluster.chaos.commands import wants_namespaces
from cluster.chaos.namespaces import PROGRAMS, SmallDisk
from cluster.chaos.scenario import Scenario, read

LOSES = "about: x\nfaults: [{kind: lose-packets, percent: 5, for_s: 1, at: {s: 0}}]"


@pytest.fixture
def loses() -> list[Scenario]:
    return [read("about: x\nfaults: []", "nothing"), read(LOSES, "loses")]


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/sbin/{program}")


@pytest.mark.usefixtures("granted")
def test_where_packets_are_to_be_lost_a_network_of_its_own_is_entered_once(
    loses: list[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wants_namespaces(loses)
    assert not wants_namespaces(loses[:1])
    monkeypatch.setenv("CHAOS_NETWORK", os.readlink("/proc/self/ns/net"))
    assert not wants_namespaces(loses)


def test_a_disk_is_filled_to_its_last_byte_and_freed(tmp_path: Path) -> None:
    (tmp_path / "filler").symlink_to("/dev/full")
    disk = SmallDisk(tmp_path)
    assert disk.fill() == 0
    disk.free()
    assert list(tmp_path.iterdir()) == []


def test_a_network_entered_by_another_is_not_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_NETWORK", "net:[1]")
    assert not namespaces.is_entered()


@pytest.mark.parametrize("missing", sorted(PROGRAMS))
@pytest.mark.usefixtures("granted")
def test_a_missing_program_is_named_with_its_package(
    missing: str, loses: list[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program == missing else f"/usr/sbin/{program}")
    assert namespaces.why_not() == f"namespaces of its own need {missing} ({PROGRAMS[missing]})"
    assert not wants_namespaces(loses)


def test_who_is_not_root_is_told(loses: list[Scenario], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.why_not() == "namespaces of its own need root"
    assert not wants_namespaces(loses)
