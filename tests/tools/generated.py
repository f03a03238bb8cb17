# SPDX-License-Identifier: Apache-2.0
"""Reads the code that Inductor generates around kernels: what it launches, calls and allocates, and its names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_LAUNCH = re.compile(r"^\s+((\w+?)(?:_Kernels*)?(?:_\d+)?)\.run\((.*)\)", re.MULTILINE)


class Launch(NamedTuple):
    """One launch: the kernel's function, the variable that holds the kernel, and the arguments' text."""

    kernel: str
    variable: str
    arguments: str


def runs(code: str, kernel: str = "") -> list[Launch]:
    """Returns the launches in order, of all kernels or of those whose function's name starts with ``kernel``."""
    found = (Launch(name, variable, arguments) for variable, name, arguments in _LAUNCH.findall(code))
    return [launch for launch in found if launch.kernel.startswith(kernel)]


def launches(code: str, kernel: str = "") -> list[str]:
    """Returns the functions of the kernels launched in order, of all or of those whose name starts with ``kernel``."""
    return [launch.kernel for launch in runs(code, kernel)]


def called(code: str) -> set[str]:
    """Returns the names of the package's ops that the code calls."""
    return set(re.findall(r"torch\.ops\.mhc_inductor\.(\w+)\.default\(", code))


def allocated(code: str) -> list[tuple[tuple[str, ...], str]]:
    """Returns the sizes and the dtype of each tensor that the code allocates on the GPU."""
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    made = [c.args for c in calls if isinstance(c.func, ast.Name) and c.func.id == "empty_strided_cuda"]
    return [(tuple(map(ast.unparse, sizes.elts)), ast.unparse(dtype)) for sizes, _, dtype in made]


def clashes(code: str) -> list[str]:
    """Returns the names that stand for two things: in the module, in a function, or in the module and in a function.

    Assigning the same expression again, or an expression of the name itself (a copy that is aligned), changes no
    meaning.
    """
    module = ast.parse(code)
    outer = _meanings(module)
    found = {name for name, values in outer.items() if len(values) > 1}
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        inner = _meanings(function)
        read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        found |= {name for name, values in inner.items() if len(values) > 1 or (name in outer and name in read)}
    return sorted(found)


def _meanings(scope: ast.Module | ast.FunctionDef) -> dict[str, set[str]]:
    """Returns the different values, as text, that each name of a scope is given."""
    values: dict[str, set[str]] = defaultdict(set)
    if isinstance(scope, ast.FunctionDef):
        for argument in scope.args.args:
            values[argument.arg].add("an argument")
    for node in _statements(scope):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            values[node.name].add(ast.unparse(node))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                values[(alias.asname or alias.name).partition(".")[0]].add(alias.name.rpartition(".")[2])
        elif isinstance(node, ast.Assign):
            own = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            for target in (n for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                if isinstance(target.ctx, ast.Store) and not (target.id in own and target.id in values):
                    values[target.id].add(ast.unparse(node.value))
    return values


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a scope, without those of functions, of classes, and of ``if __name__ == "__main__"``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not (
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        ):
            yield from _statements(node)
