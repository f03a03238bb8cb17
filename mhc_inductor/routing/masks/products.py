# SPDX-License-Identifier: Apache-2.0
"""Products of tensors that are no parameters."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import SHOWN

_LONGEST = 64  # views between a factor and a parameter


_LOOK = 256  # values that a search visits


_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.matmul.default)


def has_product(value: Value) -> bool:
    """Checks whether a product of tensors that are no parameters is among what computes ``value``."""
    return nearest(value, lambda v: v.func in _PRODUCTS and not any(map(projects, v.args[:2]))) is not None


def nearest(value: Value, wanted: Callable[[Value], bool]) -> Value | None:
    """Returns the nearest value that computes ``value``, itself included, and is ``wanted``; None without one.

    Looks at floating-point values, and behind no product except ``value`` itself.
    """
    todo, seen = collections.deque([value]), {value}
    while todo and len(seen) < _LOOK:
        at = todo.popleft()
        if wanted(at):
            return at
        if at.func in _PRODUCTS and at is not value:
            continue
        for a in at.args:
            for one in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(one, Value) and one not in seen and one.dtype.is_floating_point:
                    seen.add(one)
                    todo.append(one)
    return None


def projects(a: Any) -> bool:
    """Checks whether a factor of a product is a parameter, or a view of one."""
    for _ in range(_LONGEST):
        if not isinstance(a, Value) or a.func is None or not a.args:
            break
        if a.func not in SHOWN:
            return False
        a = a.args[0]
    return isinstance(a, Value) and is_parameter(a)


def is_parameter(value: Value) -> bool:
    """Checks whether a value is a parameter of the model."""
    return value.node is not None and isinstance(value.node.meta.get("example_value"), torch.nn.Parameter)
