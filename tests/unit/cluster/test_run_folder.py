import os
import stat
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, ServiceConfig
from cluster.run_folder import Run, RunFolder, RunState, names
from pronghorn.errors import ConfigurationError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root", "one")


def run_of(folder: RunFolder) -> Run:
    service = ServiceConfig(model_path="/m", model_name="m", redis_url="", key_prefix="k")
    return Run(
        "one-1", str(folder.make_temp_dir(folder.root.parent)), ClusterConfig(name="one", service=service), "serve"
    )


def test_only_one_may_claim_a_name(folder: RunFolder) -> None:
    assert not folder.is_supervised()
    folder.claim()
    other = RunFolder(folder.root, "one")
    assert other.is_supervised()
    with pytest.raises(ConfigurationError, match="running already"):
        other.claim()


def test_a_claim_ends_with_whoever_holds_it(folder: RunFolder) -> None:
    folder.claim()
    folder.remove()
    again = RunFolder(folder.root, "one")
    assert not again.is_supervised()
    again.claim()


def test_records_are_read_back(folder: RunFolder) -> None:
    folder.claim()
    run, state = run_of(folder), RunState("ready", 1, url="http://127.0.0.1:1")
    folder.write(run)
    folder.write(state)
    assert (folder.run(), folder.state()) == (run, state)
    assert names(folder.root) == ["one"]


def test_a_damaged_record_counts_as_none(folder: RunFolder) -> None:
    folder.claim()
    (folder.path / "run.json").write_text('{"run_id": 3')
    assert folder.run() is None


def test_removing_leaves_nothing(folder: RunFolder) -> None:
    folder.claim()
    run = run_of(folder)
    folder.write(run)
    folder.remove()
    assert not folder.root.exists()
    assert not Path(run.temp_dir).exists()


def test_others_may_not_read_it(folder: RunFolder) -> None:
    folder.claim()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "root").symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="not a folder of this user"):
        RunFolder(tmp_path / "root", "one").claim()


def test_whoever_holds_it_is_known_by_its_pid(folder: RunFolder) -> None:
    assert folder.holder_pid() is None
    folder.claim()
    assert folder.holder_pid() == os.getpid()


def test_records_hold_a_password_and_are_for_their_owner_alone(folder: RunFolder) -> None:
    folder.claim()
    folder.write(RunState("ready", 1, redis_url="redis://:secret@127.0.0.1:1/0"))
    assert stat.S_IMODE((folder.path / "state.json").stat().st_mode) == 0o600


def test_what_is_forgotten_is_not_read_back(folder: RunFolder) -> None:
    folder.claim()
    folder.write(run_of(folder))
    folder.write(RunState("ready", 1))
    folder.forget()
    assert (folder.run(), folder.state()) == (None, None)


def test_a_folder_that_is_removed_amid_a_claim_is_made_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver = RunFolder(folder.root, "one")
    leaver.claim()
    real_open = os.open

    def removed_after_opening(path: Path, *arguments: int) -> int:
        fd = real_open(path, *arguments)
        monkeypatch.setattr(os, "open", real_open)
        leaver.remove()
        return fd

    monkeypatch.setattr(os, "open", removed_after_opening)
    folder.claim()
    assert RunFolder(folder.root, "one").is_supervised()
    assert folder.holder_pid() == os.getpid()
