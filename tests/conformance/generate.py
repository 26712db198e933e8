"""`python -m tests.conformance.generate`: writes docs/conformance.md anew."""

from tests.conformance.document import DOCUMENT, render
from tests.conformance.markers import claims
from tests.conformance.rows import OPEN, ROWS

if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render(ROWS, claims(), OPEN), encoding="utf-8")
