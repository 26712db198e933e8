"""The committed stubs are what `make protos` makes of the .proto files."""

from pathlib import Path

from protos.generate import ROOT, generate


def test_committed_stubs_are_current(tmp_path: Path) -> None:
    generate(tmp_path)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert made, "the generator made nothing"
    for path in made:
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed.name} is stale: run `make protos`"
