from pathlib import Path

import pytest

from tests.conformance.document import DOCUMENT, render
from tests.conformance.markers import claims
from tests.conformance.rows import OPEN, ROWS

TEST = "tests/test_a.py::test_b"


def test_the_committed_document_is_what_the_marks_say() -> None:
    said = DOCUMENT.read_text(encoding="utf-8")
    assert said == render(ROWS, claims(), OPEN), "run: python -m tests.conformance.generate"


def test_there_are_seventy_rows() -> None:
    assert list(ROWS) == list(range(1, 71)) and len(set(ROWS.values())) == 70


def test_a_row_without_a_test_is_later_and_never_done() -> None:
    text = render({1: "one", 2: "two"}, {2: [TEST]}, {})
    assert "| 1 | one | later |" in text and "| 2 | two | `test_a.py::test_b` |" in text
    assert "1 of 2 rows are proven whole, 0 in part, 1 not at all." in text


def test_a_row_that_is_open_in_part_says_so_and_does_not_count_as_whole() -> None:
    text = render({1: "one", 2: "two"}, {2: [TEST]}, {2: "the rest"})
    assert "| 2 | two | `test_a.py::test_b`<br>later: the rest |" in text
    assert "0 of 2 rows are proven whole, 1 in part, 1 not at all." in text
    with pytest.raises(ValueError, match=r"rows \[1\] are open in part"):
        render({1: "one", 2: "two"}, {2: [TEST]}, {1: "the rest"})


def test_a_claim_on_an_unknown_row_is_refused_with_its_test() -> None:
    with pytest.raises(ValueError, match=r"no rows \[71\].*test_a.py::test_b"):
        render({1: "one"}, {71: [TEST]}, {})


def folder(tmp_path: Path, source: str) -> Path:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text(source)
    return tests


def test_marks_on_functions_classes_and_methods_are_read(tmp_path: Path) -> None:
    source = """
import pytest
@pytest.mark.conformance(2)
@pytest.mark.parametrize("x", [1])
async def test_one(x): ...
@pytest.mark.conformance(1, 2)
class TestTwo:
    @pytest.mark.conformance(3)
    def test_three(self): ...
"""
    assert claims(folder(tmp_path, source)) == {
        1: ["tests/test_a.py::TestTwo"],
        2: ["tests/test_a.py::TestTwo", "tests/test_a.py::test_one"],
        3: ["tests/test_a.py::TestTwo::test_three"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "pytestmark = pytest.mark.conformance(1)",
        "@pytest.mark.conformance(1)\ndef helper(): ...",
        "@pytest.mark.conformance(ROW)\ndef test_a(): ...",
        "@pytest.mark.conformance()\ndef test_a(): ...",
        "@pytest.mark.conformance\ndef test_a(): ...",
        "@pytest.mark.conformance(row=1)\ndef test_a(): ...",
    ],
)
def test_a_mark_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match=r"tests/test_a\.py"):
        claims(folder(tmp_path, source))
