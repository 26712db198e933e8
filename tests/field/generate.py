"""`python -m tests.field.generate`: writes docs/field.md anew."""

from tests.conformance.markers import field_claims
from tests.field.document import DOCUMENT, render
from tests.field.rows import ROWS

if __name__ == "__main__":
    DOCUMENT.write_text(render(ROWS, field_claims()), encoding="utf-8")
