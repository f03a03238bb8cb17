# SPDX-License-Identifier: Apache-2.0
"""Evaluates elements of integer tensors as whole numbers.

A whole number is a sum of positions, of elements of tensors, and of quotients of such sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import Size, Unsupported
from mhc_inductor.routing.graph.linear import Datum, Linear, atom, floor, number, of_index, of_scalar
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import (
    ADD,
    ARANGE,
    CASTS,
    MULTIPLY,
    SUB,
    WHOLE,
    constant_of,
    inner,
    keyed,
    operand,
)
from mhc_inductor.routing.masks.keys import KeyData
from mhc_inductor.routing.masks.positions import Positions

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks

_SHIFTS = (aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
_REVERSED = (aten.rsub.Scalar, aten.rsub.Tensor)
_INTEGER = {*_REMAINDERS, *ADD, *SUB, *MULTIPLY, *_SHIFTS, *_REVERSED, *_DIVISIONS, aten.floor_divide.default}


class Wholes:
    """Evaluates elements of integer tensors."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.positions = Positions(masks)

    def side(self, a: Any, ref: Ref) -> Linear:
        """Returns an operand of ``ref``, a tensor or a number, as a whole number. Raises Unsupported."""
        return self.of(operand(a, ref)) if isinstance(a, Value) else of_scalar(a, self.masks.fixed)

    def of(self, ref: Ref, wrap: Size | None = None) -> Linear:
        """Returns an element of an integer tensor as a whole number.

        ``wrap``: the size that negative indices count from. Raises Unsupported, also for sums of indicators, which
        :mod:`.indicator_sums` evaluates.
        """
        found: Linear = remembered(self.masks.known, (ref, "whole", wrap), lambda: self._whole(ref, wrap), ref.value)
        return found

    def _whole(self, ref: Ref, wrap: Size | None) -> Linear:
        outer, given = ref, self.masks.input(ref)
        while (below := inner(ref)) is not None or (
            ref.value.func in CASTS and ref.value.dtype in WHOLE and ref.value.args[0].dtype in WHOLE
        ):
            ref = below if below is not None else Ref(ref.value.args[0], ref.index)
        if ref.value.dtype is torch.bool or ref.value.dtype.is_floating_point or ref.value.dtype.is_complex:
            if outer.value.dtype.is_floating_point or outer.value.dtype is torch.bool:
                known = constant_of(ref.value)
                if known is None or not known.is_integer():
                    raise Unsupported
                return number(int(known))
            return self._datum(outer, wrap)
        if ref.value.dtype not in WHOLE:  # sums of narrow integers may overflow
            return self._datum(ref, wrap)
        try:
            found = remembered(self.masks.known, (ref, "sum"), lambda: self._arithmetic(ref), ref.value)
        except KeyData:
            raise
        except Unsupported:
            return self._datum(ref, wrap)
        if given is not None and any(d.ref.value.node is None for d in found.data()):
            return self._datum(given, wrap)
        # An index that wraps must be an element itself, or never negative.
        if wrap is None or (not found.data() and found.never_negative):
            return found
        return self._datum(ref, wrap)

    def _datum(self, ref: Ref, wrap: Size | None) -> Linear:
        """Returns the element itself as a number. Raises KeyData if it depends on the key and that is not allowed."""
        if keyed(ref) and not self.masks.by_key:
            raise KeyData(ref)
        return atom(Datum(ref, wrap))

    def _arithmetic(self, ref: Ref) -> Linear:
        value, func, args = ref.value, ref.value.func, ref.value.args
        known = constant_of(value)
        if known is not None:
            return number(int(known))
        if func in ARANGE:
            return self._position(ref)
        found = self.positions.of(ref) if self.masks.by_key else None
        if found is not None:
            return found
        if func is aten.neg.default:
            return self.of(Ref(args[0], ref.index)).times(-1)
        found = self._combined(value, *(self.side(a, ref) for a in args[:2])) if func in _INTEGER else None
        if found is not None:
            return found
        if not keyed(ref):
            return atom(Datum(ref))
        raise Unsupported

    def _position(self, ref: Ref) -> Linear:
        """Returns an element of an arange."""
        args = ref.value.args
        start, _, step = (None if k is None or k >= len(args) else args[k] for k in ARANGE[ref.value.func])
        stride = of_scalar(1 if step is None else step, self.masks.fixed).value
        if stride is None:
            raise Unsupported
        first = of_scalar(0 if start is None else start, self.masks.fixed)
        return first.plus(of_index(ref.index[0]) if ref.index else number(0), stride)

    def _combined(self, value: Value, a: Linear, b: Linear) -> Linear | None:
        """Returns a sum, product, quotient or remainder; None for a product of two variable numbers."""
        func = value.func
        if func in ADD or func in SUB:
            alpha = value.kwargs.get("alpha", value.args[2] if len(value.args) > 2 else 1)
            if not isinstance(alpha, int):
                raise Unsupported
            return a.plus(b, alpha if func in ADD else -alpha)
        if func in _REVERSED:
            if len(value.args) > 2 or value.kwargs:
                raise Unsupported
            return b.minus(a)
        if func in MULTIPLY:
            return b.times(a.known) if not a.terms else a.times(b.known) if not b.terms else None
        by = b.known
        if func in _REMAINDERS:
            return a.plus(floor(a, by), -by)
        if func in _SHIFTS:
            if not 0 <= by < 32:
                raise Unsupported
            return floor(a, 2**by)
        if func in _DIVISIONS and not _rounds_down(value, a):
            raise Unsupported
        return floor(a, by)


def _rounds_down(value: Value, of: Linear) -> bool:
    """Checks whether a division is a floor: by its rounding mode, or since it truncates nonnegative numbers."""
    mode = value.kwargs.get("rounding_mode", value.args[2] if len(value.args) > 2 else None)
    return mode == "floor" or (mode == "trunc" and of.never_negative)
