"""Everything that is wrong with a tree of settings, found at once: plain data against a msgspec Struct.

Knows Structs of Structs, and mappings to them; and no setting by name, except those that are secrets and so are never
shown whole. A problem names its path, its value and what it must be; an unknown key the known name that is nearest.
"""

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from pronghorn.errors import ConfigurationError

Tree = TypeVar("Tree", bound=msgspec.Struct)


@dataclass(frozen=True)
class Problem:
    path: str
    text: str
    """What is wrong, the path in it."""


class Refused(ConfigurationError):
    """Settings with one problem or more, a line for each."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.text for problem in problems), param=problems[0].path)
        self.problems = problems


def wrong(path: str, value: object, bound: str) -> Problem:
    return Problem(path, f"{path} is {shown(path, value)!r}; it must be {bound}")


def refuse(problems: Iterable[Problem]) -> None:
    """Raises Refused where there is any."""
    if found := list(problems):
        raise Refused(found)


def checked(raw: Mapping[str, Any], kind: type[Tree]) -> Tree:
    """Raises Refused with every problem: of single values, and of values that do not go together."""
    problems = list(_of_values(raw, kind, ""))
    if not problems:
        return msgspec.convert(raw, kind)
    bad = {problem.path for problem in problems}
    try:  # with defaults in the place of what is wrong by itself, to hear what is wrong beside it
        msgspec.convert(_without(raw, bad), kind)
    except Refused as together:
        problems += [problem for problem in together.problems if problem.path not in bad]
    except msgspec.ValidationError:
        pass  # something that is needed is missing or wrong: that is among the problems
    raise Refused(problems)


def _of_values(raw: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str) -> Iterator[Problem]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in raw:
        if name not in fields:
            yield Problem(f"{prefix}{name}", f"{prefix}{name} is not known{nearest(str(name), fields)}")
    for name, field in fields.items():
        path = prefix + name
        if name not in raw:
            if field.required:
                yield Problem(path, f"{path} is missing")
            continue
        inner = struct_of(field.type)
        if inner is not None and isinstance(raw[name], Mapping):
            yield from _of_values(raw[name], inner, f"{path}.")
            continue
        if (each := struct_of_each(field.type)) is not None and isinstance(raw[name], Mapping):
            yield from _of_each(raw[name], each, path)
            continue
        try:
            msgspec.convert(raw[name], field.type)
        except msgspec.ValidationError as error:
            size = name.endswith("_bytes") and isinstance(raw[name], str)
            yield wrong(path, raw[name], "a size as 512MiB" if size else _bound(field.type, str(error)))


def _of_each(raw: Mapping[Any, Any], kind: type[msgspec.Struct], path: str) -> Iterator[Problem]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _of_values(value, kind, f"{path}.{key}.")
        else:
            known = ", ".join(field.name for field in msgspec.structs.fields(kind) if field.required)
            yield wrong(f"{path}.{key}", value, f"settings by name, {known} among them")


def _bound(kind: Any, said: str) -> str:
    """What a value of that type must be: from msgspec's words, or from the type where they do not tell."""
    options = [str(option) for literal in _flat(kind) for option in typing.get_args(literal) if _is_literal(literal)]
    if options:
        return f"one of {', '.join(options)}"
    expected, _, place = said.removeprefix("Expected ").partition(" - at `$")
    inside = f" at {place.rstrip('`').lstrip('.')}" if place else ""
    return expected.partition(", got ")[0].replace("`", "") + inside


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _flat(kind: Any) -> list[Any]:
    """The members of a union, those of an annotated type inside."""
    if typing.get_origin(kind) is typing.Annotated:
        return _flat(typing.get_args(kind)[0])
    if _is_literal(kind) or not typing.get_args(kind) or typing.get_origin(kind) in (dict, list, tuple):
        return [kind]
    return [member for part in typing.get_args(kind) for member in _flat(part)]


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    return next((part for part in _flat(kind) if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def struct_of_each(kind: Any) -> type[msgspec.Struct] | None:
    """Of a mapping from any name to settings: what each of them is."""
    if typing.get_origin(kind) is not dict:
        return None
    each = typing.get_args(kind)[1]
    return each if isinstance(each, type) and issubclass(each, msgspec.Struct) else None


def takes_text(kind: Any) -> bool:
    """Whether any text is a value of that type, so that it is not read as a number or a list."""
    return any(part is str or _is_literal(part) for part in _flat(kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """For the end of a sentence; empty where nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _without(raw: Mapping[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without(value, paths, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in raw.items()
        if f"{prefix}{name}" not in paths
    }


# --- secrets ---------------------------------------------------------------------------------------------------------


def shown(path: str, value: object) -> object:
    """`value` as it may be shown to anybody."""
    name = path.rpartition(".")[2]
    if name.endswith("redis_url") and isinstance(value, str):
        return redacted(value)
    return "(a secret)" if name.endswith("seed") and isinstance(value, str) else value


def redacted(url: str) -> str:
    """`url` without its password."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return "the given URL"
    if "password" in parsed.params:
        parsed = parsed.copy_remove_param("password")
    return str(parsed.copy_with(password=None, username=None)) if parsed.password else str(parsed)
