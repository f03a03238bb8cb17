# SPDX-License-Identifier: Apache-2.0
"""The structure of mhc_inductor/routing: small functions, operators in their folder."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

import mhc_inductor.routing
from benchmarks.imports import imported_names, module_name

ROOT = pathlib.Path(mhc_inductor.routing.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LINES, BRANCHES = 60, 15

OPERATORS = ("mhc", "e79", "selection", "sinkhorn", "hyper", "recurrence", "attention", "index_topk")
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def _functions(file: pathlib.Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(file.read_text())
    yield from (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _sizes(function: ast.AST) -> tuple[int, int]:
    """Returns the lines of a function from its signature on, and the number of its branches."""
    lines = function.end_lineno - function.lineno + 1  # type: ignore[attr-defined]
    return lines, sum(isinstance(n, _BRANCHES) for n in ast.walk(function))


def test_functions_are_small() -> None:
    found = {
        f"{file.relative_to(ROOT).as_posix()}: {function.name}": sizes
        for file in FILES
        for function in _functions(file)
        if (sizes := _sizes(function))[0] > LINES or sizes[1] > BRANCHES
    }
    assert not found


def _code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the lines and texts of identifiers, imported names, and strings without spaces."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                yield from ((line, a.name) for a in names)
            case ast.ImportFrom(module=module, names=names):
                yield from ((line, f"{module}.{a.name}") for a in names)
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                yield line, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield line, text
            case ast.Constant(value=str(text)) if " " not in text.strip():
                yield line, text


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_only_operators_name_operators(file: pathlib.Path) -> None:
    if "operators" in file.relative_to(ROOT).parts:
        return
    named = [
        (line, text)
        for line, text in _code(ast.parse(file.read_text()))
        if any(name in text.replace("mhc_inductor", "").lower() for name in OPERATORS)
    ]
    assert not named, f"{file.name} names an operator: {named}"


BUDGETS = {
    ".": 20_820, "masks": 2_390, "operators/selection": 4_633,
    "operators/index": 1_587, "operators/mhc": 3_337, "operators/e79": 2_129,
}  # fmt: skip
"""Lines that a folder may have: what it has, so that it can only shrink. docs/design.md (11 and 16) has the aims."""


@pytest.mark.parametrize("folder", BUDGETS)
def test_folders_do_not_grow(folder: str) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py"))
    assert lines <= BUDGETS[folder]


@pytest.mark.parametrize(
    "folder", sorted(f.name for f in (ROOT / "operators").iterdir() if (f / "__init__.py").exists())
)
def test_no_operator_imports_from_the_folder_of_another(folder: str) -> None:
    ours = f"mhc_inductor.routing.operators.{folder}."
    others = [
        f"{file.name}: {text}"
        for file in (ROOT / "operators" / folder).rglob("*.py")
        for _, text in _code(ast.parse(file.read_text()))
        if text.startswith("mhc_inductor.routing.operators.") and not text.startswith((ours, ours[:-1]))
    ]
    assert not [x for x in others if "operators.kernels." not in x]


def test_imports_have_no_circle() -> None:
    """Counts imports inside functions too, but not those for types alone."""
    files = {module_name(file.relative_to(ROOT.parents[1])): file for file in FILES}
    imports: dict[str, set[str]] = {}
    for name, file in files.items():
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        read = {full if full in files else full.rpartition(".")[0] for full in imported_names(tree)}
        imports[name] = read & files.keys() - {name}
    assert sum(map(len, imports.values())) > 3 * len(imports)
    tuple(graphlib.TopologicalSorter(imports).static_order())
