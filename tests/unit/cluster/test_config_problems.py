from typing import Annotated, Literal

import msgspec
import pytest

from cluster.config_problems import Problem, Refused, checked, redacted, refuse, takes_text


class Wing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    feathers: Annotated[int, msgspec.Meta(ge=1)] = 3
    colour: Literal["red", "black"] = "red"
    widths: dict[str, float] = {}


class Bird(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    redis_url: str = ""
    nest: str | None = None
    wing: Wing = Wing()
    spare: Wing | None = None

    def __post_init__(self) -> None:
        refuse([Problem("nest", f"nest is {self.nest!r}; too high")] if self.nest == "tree" else [])


def problems(raw: dict[str, object]) -> list[str]:
    with pytest.raises(Refused) as refused:
        checked(raw, Bird)
    return [problem.text for problem in refused.value.problems]


def test_what_is_right_is_taken() -> None:
    bird = checked({"name": "wren", "wing": {"feathers": 9}, "spare": {"colour": "black"}}, Bird)
    assert (bird.wing.feathers, bird.spare) == (9, Wing(colour="black"))


def test_every_problem_is_told_with_its_path_value_and_bound() -> None:
    found = problems({"nest": 3, "wing": {"feathers": 0, "colour": "blue", "widths": {"a": "wide"}}})
    assert found == [
        "name is missing",
        "nest is 3; it must be str | null",
        "wing.feathers is 0; it must be int >= 1",
        "wing.colour is 'blue'; it must be one of red, black",
        "wing.widths is {'a': 'wide'}; it must be float at [...]",
    ]


def test_what_is_wrong_together_is_told_beside_what_is_wrong_alone() -> None:
    assert problems({"name": "wren", "nest": "tree", "wing": {"feathers": -1}}) == [
        "wing.feathers is -1; it must be int >= 1",
        "nest is 'tree'; too high",
    ]


def test_an_unknown_key_is_told_with_the_nearest_that_is_known() -> None:
    assert problems({"name": "wren", "wing": {"fethers": 1}, "zzz": 1}) == [
        "zzz is not known",
        "wing.fethers is not known; did you mean feathers?",
    ]


def test_a_branch_that_is_no_branch_is_told() -> None:
    assert problems({"name": "wren", "wing": 4})[0].startswith("wing is 4; it must be object")


def test_a_password_is_never_told() -> None:
    class Port(msgspec.Struct, frozen=True, kw_only=True):
        redis_url: Annotated[str, msgspec.Meta(max_length=5)]

    with pytest.raises(Refused) as refused:
        checked({"redis_url": "redis://:secret@host/0"}, Port)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("url", ["redis://:pw@h:1/0", "redis://u:pw@h", "redis://h/0?password=pw", "redis://:pw@h:x"])
def test_no_form_of_url_shows_it(url: str) -> None:
    assert "pw" not in redacted(url)


def test_text_is_left_as_text_where_it_may_be_text() -> None:
    kinds = {
        field.name: takes_text(field.type) for field in [*msgspec.structs.fields(Bird), *msgspec.structs.fields(Wing)]
    }
    assert {name for name, takes in kinds.items() if takes} == {"name", "redis_url", "nest", "colour"}
