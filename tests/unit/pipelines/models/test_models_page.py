from tests.conformance.models_page import PAGE, page


def test_the_page_of_models_says_what_the_code_does() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.conformance.models_page`"
