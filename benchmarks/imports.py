# SPDX-License-Identifier: Apache-2.0
"""The diagram of the package's imports, in Mermaid's language."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

FOLDERS = ("mhc_inductor", "lowerings", "kernels")
EVERYWHERE = {"compat", "log", "options", "scope", "fingerprint"}
"""Modules that nearly all others import, and that import none of them."""
SPLIT = ("mhc_inductor.routing",)
"""Packages whose parts have a place of their own."""


def diagram(root: pathlib.Path) -> str:
    """Returns a flowchart: a place for each package of the checkout, an arrow for each import between two of them."""
    arrows = sorted({(a, b) for a, b in _imports(root) if a != b})
    places = sorted({p for arrow in arrows for p in arrow})
    lines = ["flowchart TD", *(f'    {_id(p)}["{p.removeprefix("mhc_inductor.")}"]' for p in places)]
    return "\n".join(lines + [f"    {_id(a)} --> {_id(b)}" for a, b in arrows])


def _id(place: str) -> str:
    return place.replace(".", "_")


def _imports(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    files = {module_name(f.relative_to(root)): f for folder in FOLDERS for f in (root / folder).rglob("*.py")}
    for module, file in files.items():
        for imported in imported_names(ast.parse(file.read_text())):
            name = (
                imported.removeprefix("mhc_inductor.")
                if imported.split(".")[1:2] in (["kernels"], ["lowerings"])
                else imported
            )
            places = _place(module), _place(name if name in files else name.rpartition(".")[0])
            if name.startswith(FOLDERS) and None not in places:
                yield places  # type: ignore[misc]


def module_name(path: pathlib.Path) -> str:
    """Returns the name of the module in a file, whose path is relative to the folder that Python imports from."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yields what a module imports, inside functions too: modules, and names of modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _place(module: str) -> str | None:
    """The part of the diagram that a module belongs to; None for what is left out."""
    parts = module.split(".")
    if parts[0] != "mhc_inductor":
        return parts[0]
    if len(parts) < 2 or parts[1] in EVERYWHERE:
        return None
    if ".".join(parts[:2]) in SPLIT:
        return ".".join(parts[:3]) if parts[2:3] in (["graph"], ["operators"]) else ".".join(parts[:2])
    return ".".join(parts[:2])
