# SPDX-License-Identifier: Apache-2.0
"""Hashes that tie results to the code they are of: ``python -m benchmarks.source_hash`` prints them.

Only parsed code counts: docstrings, comments and formatting may change. Every supported Python gives the same hash.
"""

from __future__ import annotations

import ast
import hashlib
import pathlib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "lowerings", "mhc_inductor/ops")
"""What the times of an op depend on."""
ROUTING = ("mhc_inductor/routing",)
"""What decides which formulas are routed."""
TESTED = ("kernels", "lowerings", "mhc_inductor", "tests", "examples", "benchmarks")
"""What the tests run, and the tests."""


def source_hash(root: pathlib.Path = ROOT, folders: Iterable[str] = FOLDERS) -> str:
    """Returns the SHA-256, in hex, of the paths and the parsed code of the Python files under ``folders``."""
    digest = hashlib.sha256()
    files = {f.relative_to(root).as_posix(): f for folder in folders for f in (root / folder).rglob("*.py")}
    for name in sorted(files):
        content = code_of(files[name].read_text())
        # The length keeps a byte from moving between one file's end and the next one's name unnoticed.
        digest.update(f"{name}\0{len(content)}\0{content}".encode())
    return digest.hexdigest()


def code_of(source: str) -> str:
    """Returns the syntax tree of a module as text, without docstrings and other strings that stand alone."""
    return _text(ast.parse(source))


def _text(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_text(n) for n in node if not _is_prose(n)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # A field without content is left out: newer versions of Python have more of them.
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"


def _is_prose(node: object) -> bool:
    alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return alone and isinstance(node.value.value, str)


if __name__ == "__main__":
    print("kernels", source_hash())
    print("routing", source_hash(folders=ROUTING))
    print("tested", source_hash(folders=TESTED))
