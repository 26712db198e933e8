import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from cluster.config import ClusterConfig, ServiceConfig
from cluster.run_folder import Run, RunFolder, RunState
from cluster.status import ModelStatus, gather, show
from pronghorn.errors import ConfigurationError

SERVICE = ServiceConfig(model_path="/m", model_name="m", redis_url="", key_prefix="k")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root", "one")


def write_run(folder: RunFolder) -> None:
    temp_dir = folder.make_temp_dir(folder.root.parent)
    folder.write(Run("one-1", str(temp_dir), ClusterConfig(name="one", service=SERVICE), "serve"))


def test_no_cluster_is_an_error_that_says_how_to_start_one(folder: RunFolder) -> None:
    with pytest.raises(ConfigurationError, match="pronghorn up"):
        gather(folder)


def test_it_is_starting_from_the_moment_that_somebody_holds_the_folder(folder: RunFolder) -> None:
    folder.claim()
    assert (gather(folder).phase, gather(folder).ready) == ("starting", False)
    write_run(folder)
    assert gather(folder).phase == "starting"


def test_it_is_stopping_while_its_supervisor_says_so(folder: RunFolder) -> None:
    folder.claim()
    write_run(folder)
    folder.write(RunState("stopping", 1))
    assert gather(folder).phase == "stopping"


def test_it_is_abandoned_where_nobody_holds_the_folder(folder: RunFolder, tmp_path: Path) -> None:
    folder.claim()
    write_run(folder)
    folder.write(RunState("ready", 1))
    (tmp_path / "copy").mkdir()
    for record in ("lock", "run.json", "state.json"):
        (tmp_path / "copy" / record).write_bytes((folder.path / record).read_bytes())
    assert gather(RunFolder(tmp_path, "copy")).phase == "abandoned"


def test_each_model_is_shown_with_its_pools_and_what_it_lacks(folder: RunFolder) -> None:
    folder.claim()
    models = [
        ModelStatus("a", True, "fine", 0, {"prefill": 1, "decode": 2}),
        ModelStatus("org/b", False, "no decode node is usable", 0, {"prefill": 1, "decode": 0}),
    ]
    console = Console(file=io.StringIO(), width=160)
    show(replace(gather(folder), models=models), console)
    assert isinstance(console.file, io.StringIO)
    said = " ".join(console.file.getvalue().split())
    assert "a: 1 prefill, 2 decode; org/b: 1 prefill, 0 decode, not ready (no decode node is usable)" in said
