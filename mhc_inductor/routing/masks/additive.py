# SPDX-License-Identifier: Apache-2.0
"""Additive masks: the numbers that their elements can be, and when one is 0, which shows the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import (
    ADD,
    FILLS,
    MULTIPLY,
    SHOWN,
    SUB,
    constant_of,
    kept,
    keyed,
    operand,
    rounded,
    uncast,
)
from mhc_inductor.routing.masks.keys import FALSE, TRUE, AnyOf, KeyData, both, either
from mhc_inductor.routing.masks.scatters import GATHERS, PUTS, SCATTERS, TRIANGLES

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks

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


class Additive:
    """Finds when elements of additive masks are 0."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def of(self, ref: Ref, want: bool = True) -> AnyOf:
        """Returns when an element of an additive mask is 0 (``want``) or is not 0.

        Raises KeyData if the mask is a tensor of unknown contents that is indexed by the key, and Unsupported if its
        values have both signs or its formula is not recognised.
        """
        below = uncast(ref)
        if below.value.func is None and keyed(below):
            raise KeyData(below)
        _one_sign(self.masks.possible(ref.value))
        found = self._zero(ref, want)
        self.masks.note(ref, found)
        return found

    def _zero(self, ref: Ref, want: bool) -> AnyOf:
        given, ref = self.masks.input(ref), uncast(ref)
        found: AnyOf = remembered(self.masks.known, (ref, want, "zero"), lambda: self._find_zero(ref, want), ref.value)
        return found if given is None else self.masks.read(given, not want, found)

    def _find_zero(self, ref: Ref, want: bool) -> AnyOf:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return TRUE if (known == 0.0) == want else FALSE
        if not value.dtype.is_floating_point:
            raise Unsupported
        if func in ADD or func is aten.minimum.default:
            low, high = (_one_sign(self.masks.possible(a)) for a in args[:2])
            if low * high < 0.0 or (func not in ADD and max(low, high) > 0.0):
                raise Unsupported  # a sum may cancel to 0; a minimum with a positive part may be 0
            parts = [self._zero(operand(a, ref), want) for a in args[:2] if constant_of(a) != 0.0]
            return both(*parts) if want and len(parts) > 1 else either(*parts)
        if func is aten.log.default:
            if not self.masks.possible(args[0]) <= {0.0, 1.0}:
                raise Unsupported
            return self._flag(Ref(args[0], ref.index), want)
        if func in MULTIPLY:
            for a, b in (args, args[::-1]):
                known = constant_of(b)
                if known is not None and known != 0.0 and not math.isinf(known):
                    return self._scaled(operand(a, ref), want)
        found = self.masks.placed.structured(ref, want, self._zero)
        if found is None:
            raise Unsupported
        self.masks.note(ref, found)
        return found

    def _scaled(self, ref: Ref, want: bool) -> AnyOf:
        """Returns when ``ref``, the other factor of a product with a nonzero constant, is 0 (``want``) or is not 0.

        Recognises ``~mask``, ``1 - mask`` and ``mask - 1``.
        """
        below = uncast(ref)
        if below.value.dtype is torch.bool:
            return self.masks.truth(below, not want)
        func, args = below.value.func, below.value.args
        one = None
        if (func in SUB or func in ADD or func is aten.rsub.Scalar) and len(args) == 2 and not below.value.kwargs:
            constants = [constant_of(a) for a in args]
            if func in SUB and 1.0 in constants:
                one = args[1 - constants.index(1.0)]
            elif (func in ADD and constants[1] == -1.0) or (func is aten.rsub.Scalar and constants[1] == 1.0):
                one = args[0]
        if one is None:
            return self._zero(ref, want)
        return self._flag(operand(one, below), want)

    def _flag(self, ref: Ref, want: bool) -> AnyOf:
        """Returns when a number is 1 (``want``) or 0. Raises Unsupported unless it is one indicator."""
        ref = uncast(ref)
        if ref.value.dtype is not torch.bool:
            counted = self.masks.counts.of(ref)
            if not counted.unit or len(counted.terms) != 1 or counted.terms[0][1].bound:
                raise Unsupported
        return self.masks.truth(ref, want)


def _one_sign(values: frozenset[float]) -> float:
    """Returns the sign of the nonzero values, 0.0 if all are 0. Raises Unsupported if both signs occur."""
    signs = {math.copysign(1.0, v) for v in values if v}
    if len(signs) > 1:
        raise Unsupported
    return signs.pop() if signs else 0.0
