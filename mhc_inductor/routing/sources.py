# SPDX-License-Identifier: Apache-2.0
"""Where a node comes from: the user's line and the modules around it, as a report names them."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import fx

from mhc_inductor.report.findings import Modules

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)(?:\n(?! *File ") *(.+))?', re.M)
"""A frame of a stack trace: file, line, function and code."""


def source_of(node: fx.Node | None) -> str:
    """Returns "file.py:line, in function: code" of the user's line that made ``node``, or "unknown"."""
    trace = node.meta.get("stack_trace") if node is not None else None
    frames: list[tuple[str, ...]] = _FRAME.findall(trace or "")
    own = [frame for frame in frames if _TORCH not in frame[0]] or frames
    if not own:
        return "unknown"
    file, line, function, code = own[-1]
    return f"{file}:{line}, in {function}" + (f": {code}" if code else "")


_OWN = re.compile(r"^[LG]\['(?:target|self|args|fn)'\]|__closure__\[\d+\]\.cell_contents|\b_(?:orig_mod|modules)\b")


def modules_of(node: fx.Node | None) -> Modules:
    """Returns the modules in whose ``forward`` the user's line of ``node`` runs."""
    stack = (node.meta.get("nn_module_stack") or {}) if node is not None else {}
    return tuple((_path(path), _class(kind)) for path, kind in stack.values())


def _path(path: str) -> str:
    parts = re.split(r"[.\[\]'\"]+", _OWN.sub("", path))
    return ".".join(part for part in parts if part not in ("", "L", "G"))


def _class(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
