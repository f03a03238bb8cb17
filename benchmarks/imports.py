# SPDX-License-Identifier: Apache-2.0
"""The layers of the package, its imports that go against them, and their diagram in Mermaid's language."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

FOLDERS = ("mhc_inductor", "lowerings", "kernels")

LAYERS: tuple[tuple[str, ...], ...] = (
    ("fingerprint", "log", "options", "scope"),
    ("compat",),
    ("peaks", "progress", "tuning.table", "versions"),
    ("reference",),
    ("kernels", "report"),
    ("ops",),
    ("api", "lowerings"),
    ("distributed", "nn", "passes", "routing"),
    ("integrations", "profiling", "replay"),
    ("backend",),
    ("exported", "warming"),
    ("explanation",),
    ("mhc_inductor",),
    ("integrations.hub", "tuning"),
    ("doctor", "try_model"),
    ("__main__",),
)
"""The packages and modules of ``mhc_inductor``, from bottom to top: each imports only from layers below its own."""

EVERYWHERE = frozenset({*LAYERS[0], *LAYERS[1]})
"""What nearly all others import: the diagram leaves it out."""

_LEVEL = {place: level for level, layer in enumerate(LAYERS) for place in layer}


class Import(NamedTuple):
    """An import of one module by another, at a line of its file."""

    module: str
    line: int
    imported: str

    def __str__(self) -> str:
        return (
            f"{self.module}, line {self.line}, imports {self.imported}: {place(self.module)} -> {place(self.imported)}"
        )


def diagram(root: pathlib.Path) -> str:
    """Returns a flowchart: the layers from top to bottom, an arrow for each import between two places."""
    pairs = {(place(i.module), place(i.imported)) for i in imports(root)}
    arrows = sorted((a, b) for a, b in pairs if a != b and not EVERYWHERE & {a, b})
    lines = ["flowchart TD"]
    for level, layer in reversed([*enumerate(LAYERS)][2:]):
        lines += [f'    subgraph layer{level}[" "]', *(f'        {_id(p)}["{p}"]' for p in layer), "    end"]
    return "\n".join(lines + [f"    {_id(a)} --> {_id(b)}" for a, b in arrows])


def _id(name: str) -> str:
    return name.replace(".", "_")


def upward(root: pathlib.Path) -> list[Import]:
    """Returns the imports between two places of which the imported one is not in a lower layer."""
    return [
        i
        for i in imports(root)
        if place(i.module) != place(i.imported) and _LEVEL[place(i.module)] <= _LEVEL[place(i.imported)]
    ]


def imports(root: pathlib.Path) -> Iterator[Import]:
    """Yields every import of a module of the checkout by another, those inside functions too."""
    files = {module_name(f.relative_to(root)): f for folder in FOLDERS for f in (root / folder).rglob("*.py")}
    # kernels/ and lowerings/ are parts of the package; the checkout may hold links to them in it.
    files = {name: f for name, f in files.items() if name.split(".")[1:2] not in (["kernels"], ["lowerings"])}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _names(node, package):
                if name.startswith(("mhc_inductor.kernels", "mhc_inductor.lowerings")):
                    name = name.removeprefix("mhc_inductor.")
                imported = name if name in files else name.rpartition(".")[0]
                if imported in files and imported != module:
                    yield Import(module, node.lineno, imported)  # type: ignore[attr-defined]


def module_name(path: pathlib.Path) -> str:
    """Returns the name of the module in a file, whose path is relative to the folder that Python imports from."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yields what a module imports, inside functions too: modules, and names of modules."""
    for node in ast.walk(tree):
        yield from _names(node, "")


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """Yields what a statement imports, or a call of ``import_module`` with a literal; relative to ``package`` if given."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (package or not node.level):
        parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parts, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def place(module: str) -> str:
    """Returns the place of a module among :data:`LAYERS`: its own, or the nearest package's around it.

    Raises:
        KeyError: The module is in no layer.
    """
    name = "mhc_inductor" if module == "mhc_inductor" else module.removeprefix("mhc_inductor.")
    while name not in _LEVEL:
        if "." not in name:
            raise KeyError(f"{module} is in no layer: add it to LAYERS of benchmarks/imports.py")
        name = name.rpartition(".")[0]
    return name
