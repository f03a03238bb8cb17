# SPDX-License-Identifier: Apache-2.0
"""Additive masks: when an element is 0, which shows the key, and when it is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import Unsupported
from mhc_inductor.routing.masks.elements import ADD, MULTIPLY, SUB, constant_of, keyed, operand, uncast
from mhc_inductor.routing.masks.keys import FALSE, TRUE, AnyOf, KeyData, both, either

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks


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
