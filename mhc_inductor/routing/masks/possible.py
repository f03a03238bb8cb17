# SPDX-License-Identifier: Apache-2.0
"""The numbers that elements of masks can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import aten
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import ADD, FILLS, MULTIPLY, SHOWN, SUB, constant_of, kept, rounded
from mhc_inductor.routing.masks.scatters import GATHERS, PUTS, SCATTERS, TRIANGLES

TOO_MANY = 16  # limit on the distinct values of a mask, and on the fills of an attention


def spacing(value: float, dtype: torch.dtype) -> float:
    """Returns the distance between adjacent numbers of ``dtype`` at ``value``."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)


class PossibleValues:
    """Finds the numbers that elements of masks can be, once for each tensor."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, a: Any) -> frozenset[float]:
        """Returns every number that an element of a mask can be, as the model rounds it.

        The set may contain numbers that no element is, for example those of a piece that a slice leaves out. Raises
        Unsupported if the numbers are not known or too many.
        """
        known = constant_of(a)
        if known is not None:
            return frozenset({known})
        if not isinstance(a, Value) or a.func is None:
            raise Unsupported
        if a.dtype is torch.bool:
            return frozenset({0.0, 1.0})
        found: frozenset[float] = remembered(self._known, a, lambda: self._rounded(a), a)
        return found

    def _rounded(self, a: Value) -> frozenset[float]:
        found = frozenset(rounded(x, a.dtype) + 0.0 for x in self._made(a))
        if len(found) > TOO_MANY or any(x != x for x in found):
            raise Unsupported
        return found

    def _made(self, a: Value) -> Iterable[float]:
        func, args = a.func, a.args
        if func in SHOWN:
            return self(args[0])
        if func in SOURCES:
            return [x for source in SOURCES[func](a) for x in self(source)]
        if func in _COMBINED and len(args) == 2 and not a.kwargs:
            combine = _COMBINED[func]
            return [combine(x, y) for x in self(args[0]) for y in self(args[1])]
        if func is aten.neg.default:
            return [-x for x in self(args[0])]
        if func is aten.log.default:
            return [-math.inf if x == 0.0 else math.log(x) for x in self(args[0]) if x >= 0.0]
        raise Unsupported


_COMBINED: dict[Any, Callable[[float, float], float]] = {
    **dict.fromkeys(ADD, lambda x, y: x + y),
    **dict.fromkeys(SUB, lambda x, y: x - y),
    **dict.fromkeys(MULTIPLY, lambda x, y: x * y),
    aten.minimum.default: min,
    aten.maximum.default: max,
    aten.rsub.Scalar: lambda x, y: y - x,
}


SOURCES: dict[Any, Callable[[Value], Iterable[Any]]] = {
    aten.where.self: lambda a: a.args[1:],
    **dict.fromkeys(FILLS, lambda a: (kept(a), a.args[2])),
    **dict.fromkeys(TRIANGLES, lambda a: (a.args[0], 0.0)),
    **dict.fromkeys(SCATTERS, lambda a: (a.args[0], a.args[3])),
    **dict.fromkeys(PUTS, lambda a: (a.args[0], a.args[2])),
    aten.constant_pad_nd.default: lambda a: (a.args[0], *(a.args[2:3] or (0.0,))),
    **dict.fromkeys((aten.cat.default, aten.stack.default), lambda a: a.args[0]),
    **dict.fromkeys((aten.amax.default, aten.amin.default, *GATHERS), lambda a: a.args[:1]),
}
"""For each op, the arguments and constants from which it takes the elements of its result."""
