"""The walls of ARCHITECTURE.md, read from the sources with `ast`: nothing is imported, so nothing can hide."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "pronghorn": set(),
    "protos": set(),
    "kvcache": {"pronghorn", "protos"},
    "operations": {"pronghorn"},
    "pipelines": {"pronghorn", "protos", "kvcache", "operations"},
    "prefill_nodes": {"pronghorn", "protos", "kvcache", "operations", "pipelines"},
    "decode_nodes": {"pronghorn", "protos", "kvcache", "operations", "pipelines"},
    "orchestrator": {"pronghorn", "protos", "kvcache", "operations", "pipelines.types", "pipelines.text"},
    "cluster": {
        "pronghorn", "protos", "kvcache", "operations", "pipelines", "prefill_nodes", "decode_nodes", "orchestrator",
    },
}  # fmt: skip
"""Rooms, lowest first, and what each may import besides itself: a room, or one package of it."""

ROOMS = tuple(MAY_IMPORT)

ONLY_IN: dict[str, tuple[str, ...]] = {
    "redis": ("kvcache/redis_*.py", "cluster/chaos/local_site.py"),
    "torch": (
        "kvcache/storage.py",
        "pipelines/models/*",
        "pipelines/runtime/*",
        "cluster/verify_logits.py",
        "cluster/random_models.py",
    ),
    "numba": ("kvcache/digested_copy.py", "pipelines/models/*", "pipelines/runtime/*"),
    "transformers": (
        "pipelines/models/*",
        "pipelines/text/*",
        "pipelines/runtime/*",
        "cluster/verify_logits.py",
        "cluster/random_models.py",
    ),
    "tokenizers": ("pipelines/models/*", "pipelines/text/*"),
    "llguidance": ("pipelines/text/grammar.py",),
    "gguf": ("pipelines/models/*", "pipelines/text/*"),
    "safetensors": ("pipelines/models/*",),
    "ray": ("*/deployment.py", "cluster/*"),
    "grpc": (
        "pronghorn/credentials.py",
        "pipelines/node/session_service.py",
        "pipelines/node/stream_service.py",
        "pipelines/node/stream_client.py",
        "orchestrator/node_client.py",
        "cluster/simulator/channel.py",
        "cluster/drain.py",
    ),
    "aiohttp": ("operations/server.py",),
    "prometheus_client": ("operations/metrics.py",),
    "fastapi": ("orchestrator/api/*",),
    "starlette": ("orchestrator/api/*",),
    "typer": ("cluster/*",),
    "rich": ("cluster/*",),
}
"""Foreign libraries that live behind one wall, and the files that may name them."""


class Import(NamedTuple):
    module: str
    line: int
    inside_function: bool


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.name.endswith("_pb2.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, inside
        yield from _walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imports(path: Path) -> list[Import]:
    found: list[Import] = []
    for node, inside in _walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [Import(name if is_module(name) else module, node.lineno, inside) for name in names]
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def room_of(module: str) -> str | None:
    room = module.split(".")[0]
    return room if room in MAY_IMPORT else None


def _covers(allowed: str, module: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
class TestEveryFile:
    def test_imports_only_from_the_rooms_above(self, path: Path) -> None:
        own = room_of(module_name(path))
        assert own is not None
        for module, line, _ in imports(path):
            if room_of(module) in (None, own):
                continue
            assert any(_covers(allowed, module) for allowed in MAY_IMPORT[own]), (
                f"{path}:{line}: {own} imports {module}"
            )

    def test_names_confined_libraries_only_behind_their_wall(self, path: Path) -> None:
        place = path.relative_to(ROOT).as_posix()
        for module, line, _ in imports(path):
            files = ONLY_IN.get(module.split(".")[0])
            assert files is None or any(fnmatch(place, pattern) for pattern in files), (
                f"{place}:{line}: {module} may be imported only in {', '.join(files or ())}"
            )

    def test_has_no_first_party_import_inside_a_function(self, path: Path) -> None:
        hidden = [f"{path}:{line}: {name}" for name, line, inside in imports(path) if inside and room_of(name)]
        assert not hidden, "the wall is in the wrong place: " + ", ".join(hidden)

    def test_leaves_the_environment_to_the_configuration(self, path: Path) -> None:
        if path.relative_to(ROOT).as_posix() == "cluster/config.py":
            return
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            of_os = named and isinstance(node.value, ast.Name) and node.value.id == "os"  # type: ignore[attr-defined]
            assert not of_os, f"{path}:{node.lineno}: the environment is read in cluster/config.py"  # type: ignore[attr-defined]
            from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
            assert not (from_os and {"environ", "getenv"} & {alias.name for alias in node.names}), path  # type: ignore[attr-defined]

    def test_creates_tasks_only_through_an_owner(self, path: Path) -> None:
        if path.relative_to(ROOT).as_posix() == "pronghorn/tasks.py":
            return
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in ("create_task", "ensure_future"), (
                    f"{path}:{node.lineno}: tasks are started by pronghorn.tasks.Owner"
                )


def test_no_two_modules_import_each_other() -> None:
    known = {module_name(path): path for path in sources()}
    graph = {name: {i.module for i in imports(path) if i.module in known} - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_only_the_three_named_rooms_serve_and_they_do_not_know_each_other() -> None:
    assert "decode_nodes" not in MAY_IMPORT["prefill_nodes"]
    assert "prefill_nodes" not in MAY_IMPORT["decode_nodes"]


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in sources()
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent, f"modules without a docstring: {silent}"
