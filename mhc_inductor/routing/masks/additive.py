# SPDX-License-Identifier: Apache-2.0
"""Additive masks: the numbers that their elements can be, and when one is 0, which shows the key."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.graph.values import Value, is_given
from mhc_inductor.routing.masks.elements import (
    ADD,
    CASTS,
    FILLS,
    MULTIPLY,
    SHOWN,
    SUB,
    constant_of,
    inner,
    kept,
    keyed,
    operand,
    rounded,
    uncast,
)
from mhc_inductor.routing.masks.indicator_sums import positive
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
        if isinstance(a, Value) and a.dtype is torch.bool:
            return frozenset({0.0, 1.0})
        if not isinstance(a, Value) or a.func is None:
            raise Unsupported
        found: frozenset[float] = remembered(self._known, a, lambda: self._rounded(a), a)
        return found

    def _rounded(self, a: Value) -> frozenset[float]:
        found = frozenset(rounded(x, a.dtype) + 0.0 for x in self._made(a))
        if len(found) > TOO_MANY or any(x != x for x in found):
            raise Unsupported
        return found

    def _made(self, a: Value) -> Iterable[float]:
        func, args = a.func, a.args
        if func in SHOWN or func in _CHANGED:
            return map(_CHANGED.get(func, float), self(args[0]))
        if func in SOURCES:
            return [x for source in SOURCES[func](a) for x in self(source)]
        if func in _COMBINED and len(args) == 2 and not a.kwargs:
            return itertools.starmap(_COMBINED[func], itertools.product(*map(self, args)))
        raise Unsupported


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf if x == 0.0 else math.nan


_CHANGED: dict[Any, Callable[[float], float]] = {aten.neg.default: operator.neg, aten.log.default: _log}
_COMBINED: dict[Any, Callable[[float, float], float]] = {
    **dict.fromkeys(ADD, operator.add),
    **dict.fromkeys(SUB, operator.sub),
    **dict.fromkeys(MULTIPLY, operator.mul),
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
    """Finds when elements of additive masks, and of what they are computed from, are certain numbers."""

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
        if len({math.copysign(1.0, x) for x in self.masks.possible(ref.value) if x}) > 1:
            raise Unsupported
        return self.passing(ref, lambda x: (x == 0.0) == want)

    def passing(self, ref: Ref, test: Callable[[float], bool]) -> AnyOf:
        """Returns when the number that an element is passes ``test``. Raises Unsupported."""
        return self._among(ref, frozenset(filter(test, self.masks.possible(ref.value))))

    def _among(self, ref: Ref, wanted: frozenset[float]) -> AnyOf:
        """Returns when an element is one of ``wanted``."""
        values = self.masks.possible(ref.value)
        if wanted.isdisjoint(values) or wanted >= values:
            return TRUE if wanted >= values else FALSE
        find = functools.partial(self._find, ref, wanted)
        found: AnyOf = remembered(self.masks.known, (ref, wanted), find, ref.value)
        return found

    def _find(self, ref: Ref, wanted: frozenset[float]) -> AnyOf:
        value, func = ref.value, ref.value.func
        below = inner(ref)
        if value.dtype is torch.bool:
            return self.masks.truth(ref, 1.0 in wanted)
        if below is not None or func in CASTS or func in _CHANGED:
            change, below = _CHANGED.get(func, float), below or Ref(value.args[0], ref.index)
            shown = self.passing(below, lambda x: rounded(change(x), value.dtype) in wanted)
            return self.masks.read(ref, self._nonzero(value, wanted), shown) if is_given(value) else shown
        if func in _COMBINED and len(value.args) == 2 and not value.kwargs:
            return self._combined(ref, wanted)
        found = self.masks.placed.structured(ref, wanted, self._among)
        if found is None:
            found = positive(self.masks.counts.of(ref), self._nonzero(value, wanted))
        self.masks.note(ref, found)
        return found

    def _combined(self, ref: Ref, wanted: frozenset[float]) -> AnyOf:
        """Returns when a number that is computed from two others is one of ``wanted``."""
        combine, dtype = _COMBINED[ref.value.func], ref.value.dtype
        left, right = map(self.masks.possible, ref.value.args)
        fits = {x: frozenset(y for y in right if rounded(combine(x, y), dtype) in wanted) for x in sorted(left)}
        found = []
        for ys in filter(None, dict.fromkeys(fits.values())):
            xs = frozenset(x for x in fits if fits[x] >= ys)  # what fits more than ``ys`` fits these, too
            sides = zip(ref.value.args, (xs, ys), strict=True)
            found.append(both(*(self._among(operand(a, ref), n) if isinstance(a, Value) else TRUE for a, n in sides)))
        return either(*found)

    def _nonzero(self, value: Value, wanted: frozenset[float]) -> bool:
        """Returns whether ``wanted`` are all numbers of ``value`` but 0, or 0 alone. Raises Unsupported for others."""
        if wanted not in ({0.0}, self.masks.possible(value) - {0.0}):
            raise Unsupported
        return 0.0 not in wanted
