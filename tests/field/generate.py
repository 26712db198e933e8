"""`python -m tests.field.generate`: writes docs/field.md and docs/fault-matrix.md anew."""

from tests.conformance.markers import cell_claims, field_claims
from tests.field import matrix
from tests.field.document import DOCUMENT, render
from tests.field.rows import ROWS

if __name__ == "__main__":
    DOCUMENT.write_text(render(ROWS, field_claims()), encoding="utf-8")
    matrix.DOCUMENT.write_text(matrix.render(cell_claims()), encoding="utf-8")
