import os

import pytest

from cluster.chaos import own_network
from cluster.chaos.commands import wants_own_network
from cluster.chaos.own_network import PROGRAMS
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
    assert wants_own_network(loses)
    assert not wants_own_network(loses[:1])
    monkeypatch.setenv("CHAOS_NETWORK", os.readlink("/proc/self/ns/net"))
    assert not wants_own_network(loses)


def test_a_network_entered_by_another_is_not_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_NETWORK", "net:[1]")
    assert not own_network.is_entered()


@pytest.mark.parametrize("missing", sorted(PROGRAMS))
@pytest.mark.usefixtures("granted")
def test_a_missing_program_is_named_with_its_package(
    missing: str, loses: list[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None if program == missing else f"/usr/sbin/{program}")
    assert own_network.why_not() == f"a network of its own needs {missing} ({PROGRAMS[missing]})"
    assert not wants_own_network(loses)


def test_who_is_not_root_is_told(loses: list[Scenario], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert own_network.why_not() == "a network of its own needs root"
    assert not wants_own_network(loses)
