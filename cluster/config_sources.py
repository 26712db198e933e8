"""Where settings come from, and which wins: what follows from others, a file, the environment, flags; each over those
before it.

A source is plain data of the same tree (`ClusterConfig`), and every value remembers its source. Nothing is checked here
but that a source can be read; `Settings.config` checks the whole, and names the source of what is wrong.
"""

import re
import tomllib
import typing
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from cluster import config
from cluster.config import ClusterConfig
from cluster.config_problems import Problem, Refused, checked, shown, struct_of, struct_of_each, takes_text
from cluster.model import served_name
from cluster.processes import RUN_VARIABLE
from pronghorn.errors import ConfigurationError

PREFIX = "PRONGHORN_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
NOT_SETTINGS = {FILE_VARIABLE, config.HOME_VARIABLE, config.CACHE_VARIABLE, RUN_VARIABLE}
OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP)(_\w+)?$")
"""Kubernetes tells every pod of its namespace's Services so, and a Service may be called pronghorn."""

Place = tuple[str, ...]
"""Of a value in the tree; a key that has dots is one part of it."""


class Value(NamedTuple):
    value: Any
    source: str


class Row(msgspec.Struct, frozen=True):
    path: str
    value: Any
    source: str


class Settings:
    """All sources together. `flags` are values by place, and the name of the flag."""

    def __init__(self, path: str | None, environ: Mapping[str, str], flags: Mapping[Place, Value]) -> None:
        """Raises ConfigurationError where the file cannot be read."""
        path = path or environ.get(FILE_VARIABLE)
        said: dict[Place, Value] = dict(_of_file(Path(path)) if path else {})
        said |= dict(_of_environment(environ))
        said |= flags
        self._values = _derived(said) | said

    def config(self) -> ClusterConfig:
        """Raises Refused with every problem, and where what is wrong comes from."""
        try:
            return checked(_tree(self._values), ClusterConfig)
        except Refused as refused:
            raise Refused([self._with_source(problem) for problem in refused.problems]) from None

    def rows(self) -> list[Row]:
        """Every value of the tree that is checked, secrets hidden."""
        told = {place: value.source for place, value in self._values.items()}
        rows = []
        for place, value in _flat(msgspec.to_builtins(self.config())):
            path = ".".join(place)
            rows.append(Row(path, shown(path, value), told.get(place, "default")))
        return rows

    def _with_source(self, problem: Problem) -> Problem:
        for place, value in self._values.items():
            if ".".join(place) in (problem.path, f"service.{problem.path}") and value.source != DERIVED:
                return Problem(problem.path, f"{problem.text} (from {value.source})")
        return problem


DERIVED = "what else is set"


def _derived(said: Mapping[Place, Value]) -> dict[Place, Value]:
    def of(name: str, default: Any) -> Any:
        value = said.get((name,), Value(default, "")).value
        return value if isinstance(value, str) else default

    several = any(place[:2] == ("service", "models") for place in said)
    found = {
        "model_path": "",  # found when the cluster is started
        "model_name": "" if several else served_name(of("model", None)),
        "redis_url": "",
        "key_prefix": f"pronghorn:{of('name', config.DEFAULT_CLUSTER_NAME)}",
        "threads": config.usable_cores(),
    }
    return {("service", name): Value(value, DERIVED) for name, value in found.items()}


# --- the sources -----------------------------------------------------------------------------------------------------


def _of_file(path: Path) -> dict[Place, Value]:
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".yaml" | ".yml":
                raw = yaml.load(text, _Loader)
            case ".toml":
                raw = tomllib.loads(text)
            case other:
                raise ConfigurationError(f"--config is {path}; a name ending in {other!r} is neither .yaml nor .toml")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config is {path}, which cannot be read: {error}") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(raw or {}, Mapping):
        raise ConfigurationError(f"{path} holds {type(raw).__name__}; it must hold settings by name")
    return {place: Value(_read(place, value), str(path)) for place, value in _flat(raw or {})}


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML's own readers take the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def variable(place: Place) -> str:
    return PREFIX + "__".join(place).upper()


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[Place, Value]]:
    if url := environ.get(config.REDIS_VARIABLE):
        yield ("service", "redis_url"), Value(url, config.REDIS_VARIABLE)
    for name, text in sorted(environ.items()):
        foreign = name in NOT_SETTINGS or OF_KUBERNETES.search(name) or text.startswith(("tcp://", "udp://"))
        if name.startswith(PREFIX) and not foreign:
            place = tuple(name.removeprefix(PREFIX).lower().split("__"))
            value = _read(place, text)
            for inner, part in _flat(value) if isinstance(value, dict) else [((), value)]:
                yield place + inner, Value(part, name)


def written(text: str) -> tuple[Place, Value]:
    """ "service.decode=2", as `--option` takes it. Raises ConfigurationError."""
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise ConfigurationError(f"--option is {text!r}; write it as path=value, as service.decode=2")
    place = _place(path)
    return place, Value(_read(place, value), "--option")


def _place(path: str) -> Place:
    """Below a mapping everything is one key, dots and all; but where that is of settings by name, a key ends before the
    first part that is a setting."""
    kind: Any = ClusterConfig
    place: list[str] = []
    left = path.split(".")
    while left:
        if (each := struct_of_each(kind)) is not None:
            names = {field.name for field in msgspec.structs.fields(each)}
            end = next((at for at, part in enumerate(left) if at and part in names), len(left))
            kind = each
        elif (inner := struct_of(kind)) is not None:
            end = 1
            kind = next((field.type for field in msgspec.structs.fields(inner) if field.name == left[0]), None)
        else:
            end = len(left)
        place.append(".".join(left[:end]))
        left = left[end:]
    return tuple(place)


def _read(place: Place, value: Any) -> Any:
    """Text as what is meant at that place: a size in bytes, JSON, or text."""
    if not isinstance(value, str):
        return value
    if place[-1].endswith("_bytes"):
        try:
            return config.parse_bytes(value, ".".join(place))
        except ConfigurationError:
            return value  # refused with everything else
    if takes_text(_type_at(place)):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _type_at(place: Place) -> Any:
    kind: Any = ClusterConfig
    for part in place:
        if typing.get_origin(kind) is dict:
            return typing.get_args(kind)[1]
        inner = struct_of(kind)
        fields = msgspec.structs.fields(inner) if inner is not None else ()
        kind = next((field.type for field in fields if field.name == part), None)
    return kind


# --- trees -----------------------------------------------------------------------------------------------------------


def _flat(raw: Mapping[Any, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    for name, value in raw.items():
        place = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, place)
        else:
            yield place, value


def _tree(values: Mapping[Place, Value]) -> dict[str, Any]:
    """What stands in the place of a branch and is none wins over what stands below it: it is the mistake to tell."""
    tree: dict[str, Any] = {}
    for place, value in sorted(values.items(), key=lambda item: len(item[0])):
        branch: Any = tree
        for part in place[:-1]:
            if branch.get(part) is None:
                branch[part] = {}
            branch = branch[part]
            if not isinstance(branch, dict):
                break
        else:
            branch[place[-1]] = value.value
    return tree
