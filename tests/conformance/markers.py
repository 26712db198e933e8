"""Which tests claim which rows, read from the sources: nothing is imported and nothing collected.

A claim is the decorator `@pytest.mark.conformance(12)` or `(12, 13)` on a test or on a class of tests, or, of what the
field has suffered, `@pytest.mark.field("vllm#50754")`. Numbers and names are written out, so that reading is enough.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

TESTS = Path(__file__).resolve().parent.parent

Row = TypeVar("Row", int, str)


def claims(tests: Path = TESTS) -> dict[int, list[str]]:
    """Node ids by row, sorted. Raises ValueError, with the place, where a claim is not plain numbers on a test."""
    return _claims(tests, "conformance", int)


def field_claims(tests: Path = TESTS) -> dict[str, list[str]]:
    """The same of `field` marks, whose rows are names of public issues."""
    return _claims(tests, "field", str)


def cell_claims(tests: Path = TESTS) -> dict[str, list[str]]:
    """The same of `cells` marks, whose rows are faults at phases."""
    return _claims(tests, "cells", str)


def _claims(tests: Path, mark: str, kind: type[Row]) -> dict[Row, list[str]]:
    found: dict[Row, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests.parent).as_posix()
        for row, test in _claims_of(ast.parse(path.read_text(encoding="utf-8")), place, mark, kind):
            found.setdefault(row, []).append(f"{place}::{test}")
    return {row: sorted(found[row]) for row in sorted(found)}


def _claims_of(module: ast.Module, place: str, mark: str, kind: type[Row]) -> Iterator[tuple[Row, str]]:
    full = f"pytest.mark.{mark}"
    marked = [node for node in ast.walk(module) if isinstance(node, ast.Attribute) and ast.unparse(node) == full]
    read = 0
    for name, node in _tests(module):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == full:
                read += 1
                for row in _rows(decorator, place, mark, kind):
                    yield row, name
    if read != len(marked):
        raise ValueError(f"{place}: {len(marked) - read} marks stand where they are not read: mark tests or classes")


def _tests(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                    yield f"{node.name}::{inner.name}", inner


def _rows(call: ast.Call, place: str, mark: str, kind: type[Row]) -> list[Row]:
    rows = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and type(arg.value) is kind]
    if not rows or len(rows) != len(call.args) or call.keywords:
        raise ValueError(f"{place}:{call.lineno}: a {mark} mark takes rows ({kind.__name__}), written out")
    return rows
