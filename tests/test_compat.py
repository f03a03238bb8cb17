# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs: all in mhc_inductor/compat, in the module of the layer that uses them, with a line for each.

A line of a module's docstring is ``NAME: use``, or ``NAME (from 2.12): use`` and ``NAME (until 2.11): use`` where not
every supported torch has it.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPAT = ROOT / "mhc_inductor" / "compat"
MODULES = {file.stem: file for file in COMPAT.glob("*.py") if file.stem != "__init__"}
FILES = [f for folder in ("mhc_inductor", "lowerings", "kernels") for f in sorted((ROOT / folder).rglob("*.py"))]
LAYERS = {
    "lowerings": "lowerings",
    "backend.py": "backend",
    "explanation.py": "routing",
    "passes.py": "backend",
    "replay": "backend",
    "report": "routing",
    "warming": "processes",
} | {layer: layer for layer in ("exported", "kernels", "ops", "routing")}
"""The module of compat that each folder or file may use, besides what is shared."""
_PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!check|assert)[A-Za-z]")
_ATEN = re.compile(r"torch\.ops\.(aten|prims)\.")
_LINE = re.compile(r"^- (torch\.[\w.]+)(?: \((from|until) 2\.(\d+)\))?: \w", re.MULTILINE)


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields the full names of what a module imports, and uses of it."""
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            full.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    yield from full.values()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            first, dot, rest = ast.unparse(node).partition("(")[0].partition(".")
            yield full.get(first, first) + dot + rest


def _private(file: pathlib.Path) -> set[str]:
    return {n for n in _names(ast.parse(file.read_text())) if _PRIVATE.match(n) and not _ATEN.match(n)}


def _exists(name: str) -> bool:
    """Returns whether a full name exists in this torch; an attribute of instances, whether its class names it."""
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        try:
            found = pkgutil.resolve_name(owner)
        except AttributeError:
            return False
        return inspect.isclass(found) and re.search(rf"\b{attribute}\b", inspect.getsource(found)) is not None
    return True


def test_private_apis_of_torch_are_used_in_compat_only() -> None:
    used = {f.relative_to(ROOT).as_posix(): names for f in FILES if COMPAT not in f.parents and (names := _private(f))}
    assert not used, f"move it to mhc_inductor/compat, with a line in the docstring: {used}"


def test_a_layer_uses_its_own_module_and_what_is_shared() -> None:
    for file in FILES:
        names = set(_names(ast.parse(file.read_text())))
        modules = {m for m in MODULES for n in names if f"{n}.".startswith(f"mhc_inductor.compat.{m}.")}
        place = file.relative_to(ROOT).as_posix().removeprefix("mhc_inductor/").split("/")
        own = "shared" if place[0] == "compat" else LAYERS.get(place[0])
        assert place == ["compat", "__init__.py"] or modules <= {own}, f"{file}: {modules}"


@pytest.mark.parametrize("module", MODULES)
def test_each_private_api_has_a_line_that_is_true(module: str) -> None:
    text = MODULES[module].read_text()
    minor = int(torch.__version__.split(".")[1])
    lines = {name: (bound, int(version or 0)) for name, bound, version in _LINE.findall(text)}
    for name, (bound, version) in lines.items():
        there = not bound or (minor >= version if bound == "from" else minor <= version)
        assert _exists(name) == there, f"torch {torch.__version__}: {name}"
        assert len(re.findall(rf"\b{name.rpartition('.')[2]}\b", text)) > 1, f"{name} is not used"
    ends = [f"{name}." for name in lines]
    missing = {
        n for n in _private(MODULES[module]) if not any(f"{n}.".startswith(e) or e.startswith(f"{n}.") for e in ends)
    }
    assert not missing, f"add a line with the use, and the versions if not every one has it: {missing}"
