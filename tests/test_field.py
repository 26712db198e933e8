"""docs/field.md and docs/fault-matrix.md say what the marks say."""

import pytest

from tests.conformance.markers import cell_claims, field_claims
from tests.field import matrix
from tests.field.document import DOCUMENT, render
from tests.field.rows import NOT_YET, ROWS, Row

TEST = "tests/test_a.py::test_b"


def test_the_committed_document_is_what_the_marks_say() -> None:
    said = DOCUMENT.read_text(encoding="utf-8")
    assert said == render(ROWS, field_claims()), "run: python -m tests.field.generate"


def test_hangs_leaks_cancellation_and_growth_are_shown_whole() -> None:
    """So is what grows. Overload and soaks aside, which have a row that says so."""
    open_ = {row.issues[0] for row in ROWS if row.section in "BCEF" and row.later is not None}
    assert open_ <= {"sglang#10110"}


def test_a_row_without_a_test_must_say_what_is_to_come() -> None:
    with pytest.raises(ValueError, match="no test is marked"):
        render([Row("A", ("x#1",), "it works")], {})
    assert "| A | x#1, x#2 | it works | `test_a.py::test_b` |" in render(
        [Row("A", ("x#1", "x#2"), "it works")], {"x#2": [TEST]}
    )
    assert f"| A | x#1 | it works | `test_a.py::test_b`<br>later: {NOT_YET} |" in render(
        [Row("A", ("x#1",), "it works", NOT_YET)], {"x#1": [TEST]}
    )


def test_a_mark_that_names_no_row_is_refused_with_its_test() -> None:
    with pytest.raises(ValueError, match=r"no row names \['x#2'\].*test_a.py::test_b"):
        render([Row("A", ("x#1",), "it works", NOT_YET)], {"x#2": [TEST]})


def test_the_committed_matrix_of_faults_is_what_the_marks_say() -> None:
    said = matrix.DOCUMENT.read_text(encoding="utf-8")
    assert said == matrix.render(cell_claims()), "run: python -m tests.field.generate"


@pytest.mark.parametrize("claim", ["F21 P1", "F1", "F1 P12", "F1 P5-P3", "F1 P0", "queued"])
def test_a_claim_that_names_no_cell_is_refused(claim: str) -> None:
    with pytest.raises(ValueError, match=claim):
        list(matrix.cells(claim))


def test_a_cell_that_nothing_plays_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="nothing plays F1 at P1, and no reason"):
        matrix.render({})
