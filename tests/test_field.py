"""docs/field.md says what the marks say."""

import pytest

from tests.conformance.markers import field_claims
from tests.field.document import DOCUMENT, render
from tests.field.rows import NOT_YET, ROWS, Row

TEST = "tests/test_a.py::test_b"


def test_the_committed_document_is_what_the_marks_say() -> None:
    said = DOCUMENT.read_text(encoding="utf-8")
    assert said == render(ROWS, field_claims()), "run: python -m tests.field.generate"


def test_hangs_leaks_and_cancellation_are_shown_whole() -> None:
    """Overload and soaks aside, which have a row that says so."""
    open_ = {row.issues[0] for row in ROWS if row.section in "BCE" and row.later is not None}
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
