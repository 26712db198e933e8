import pytest

from pipelines.runtime.logits_processors import load_processors
from pronghorn.errors import ConfigurationError
from tests.fakes import logits_processors


def test_a_processor_is_found_where_the_configuration_says() -> None:
    loaded = load_processors({"mine": "tests.fakes.logits_processors:no_repeat"})
    assert loaded == {"mine": logits_processors.no_repeat}


@pytest.mark.parametrize(
    "place",
    ["no.such.module:f", "tests.fakes.logits_processors:nothing", "tests.fakes.logits_processors:NOT_A_FUNCTION", ""],
)
def test_one_that_cannot_be_had_is_named(place: str) -> None:
    with pytest.raises(ConfigurationError, match="'mine'") as raised:
        load_processors({"mine": place})
    assert raised.value.param == "logits_processors"
