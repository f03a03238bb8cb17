# SPDX-License-Identifier: Apache-2.0
"""Evaluates elements of integer tensors as whole numbers.

A whole number is a sum of positions, of elements of tensors, and of quotients of such sums. Tensors of positions that masks
look up are concatenated, indexed, and numbered by segment: models number the sequences packed into one row by
``cumsum(diff(position_ids) != 1)``. Inside such a segment the positions grow by one from token to token, so
``position_ids[k] - position_ids[q]`` is ``k - q`` where the segments of both are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mhc_inductor.routing.graph.bounds import remembered
from mhc_inductor.routing.graph.expressions import Ref, _dim, aten, joined, step
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, const, span, var
from mhc_inductor.routing.graph.linear import (
    Datum,
    Linear,
    atom,
    floor,
    number,
    of_index,
    of_scalar,
    substituted,
    to_index,
)
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import (
    ARANGE,
    CASTS,
    MULTIPLY,
    WHOLE,
    argument,
    constant_of,
    inner,
    keyed,
    operand,
    signed,
)
from mhc_inductor.routing.masks.keys import FALSE, All, Compare, KeyData, Literal
from mhc_inductor.routing.masks.scatters import GATHERS, looked_up

if TYPE_CHECKING:
    from mhc_inductor.routing.masks.masks import Masks

_SHIFTS = (aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
_INTEGER = {*_REMAINDERS, *MULTIPLY, *_SHIFTS, *_DIVISIONS, aten.floor_divide.default}


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
        if (sides := signed(value)) is not None:
            return self._sum(ref, sides)
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

    def _sum(self, ref: Ref, sides: list[tuple[Any, Any]]) -> Linear:
        """Returns a sum of operands, each times its factor."""
        total = number(0)
        for factor, a in sides:
            if not isinstance(factor, int):
                raise Unsupported
            total = total.plus(self.side(a, ref), factor)
        return total

    def _combined(self, value: Value, a: Linear, b: Linear) -> Linear | None:
        """Returns a product, quotient or remainder; None for a product of two variable numbers."""
        func = value.func
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
    mode = argument(value, "rounding_mode")
    return mode == "floor" or (mode == "trunc" and of.never_negative)


class Positions:
    """Evaluates elements of integer tensors that are concatenated, looked up at positions, or count segments."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def of(self, ref: Ref) -> Linear | None:
        """Returns an element as a whole number, None for other ops. Raises Unsupported."""
        func = ref.value.func
        if func in GATHERS:
            below = looked_up(ref, self._place)
            return None if below is None else self.masks.whole(below)
        if func is aten.cat.default:
            return self._joined(ref)
        if func is aten.cumsum.default and self._never(ref):
            return number(0)
        return None

    def _place(self, ref: Ref, x: Value, d: int, wraps: bool) -> Index | None:
        """Returns an element of an index tensor as an index, None if it depends on data or may count from the end."""
        at = self.masks.whole(ref)
        return None if at.data() or (wraps and not at.never_negative) else to_index(at)

    def _joined(self, ref: Ref) -> Linear | None:
        """Returns an element of a concatenation if one formula gives it in every piece that the index reaches."""
        d, pieces = joined(ref.value)
        at = ref.index[d]
        first, last = span(at)
        found: Linear | None = None
        start, single = 0, []
        for piece in pieces:
            size = piece.shape[d]
            if size.symbols and piece is not pieces[-1]:
                return None
            end = None if size.symbols else start + size.factor
            if (end is None or first < end) and (last is None or last >= start):
                if size == ONE:
                    single.append((start, piece))
                elif found is not None:
                    return None
                else:
                    index = at.plus(const(-start)) if start else at
                    found = self.masks.whole(Ref(piece, (*ref.index[:d], index, *ref.index[d + 1 :])))
            start = start if end is None else end
        moving = [v for v in at.terms if v is not None]
        if found is None or not single:
            return found
        if len(moving) != 1 or not isinstance(moving[0], Var) or at.terms[moving[0]] != ONE:
            return None
        for place, piece in single:
            here = self.masks.whole(Ref(piece, (*ref.index[:d], const(0), *ref.index[d + 1 :])))
            if substituted(found, moving[0], number(place - first)) != here:
                return None
        return found

    def _never(self, ref: Ref) -> bool:
        """Checks whether a cumulative sum is over a condition that never holds."""
        x, dim = ref.value.args[:2]
        d = _dim(x, dim)
        everywhere = Ref(x, (*ref.index[:d], var(Var(x.shape[d])), *ref.index[d + 1 :]))
        return bool(self.masks.truth(everywhere) == FALSE)

    # --- packed sequences ---

    def inside(self, conj: All, note: bool = True) -> All:
        """Returns ``conj`` with differences of position ids replaced by those of the tokens, within equal segments.

        ``note``: whether the numbers of the segments and the position ids are entered in ``masks.packed``.
        """
        literals = set(conj.literals)
        for same in [x for x in literals if isinstance(x, Compare) and x.kind == "eq"]:
            pair = _pair(same.value)
            counted = None if pair is None else self._counted(pair[0].ref)
            if pair is None or counted is None:
                continue
            d = _dim(pair[0].ref.value, counted[1])
            places = zip(pair[0].ref.index, pair[1].ref.index, strict=True)
            if any(a != b for k, (a, b) in enumerate(places) if k != d):
                continue  # segments of different rows
            one, two = (self.masks.whole(Ref(counted[0], p.ref.index)) for p in pair)
            apart = of_index(pair[0].ref.index[d]).minus(of_index(pair[1].ref.index[d]))
            literals = {_closer(x, one, two, apart) if x is not same else x for x in literals}
            if note:
                self.masks.packed[pair[0].ref.value] = (d, True)
                self.masks.packed.update({x.ref.value: (_dim(x.ref.value, counted[1]), False) for x in one.data()})
        return All(frozenset(literals), conj.bound)

    def _counted(self, ref: Ref) -> tuple[Value, int] | None:
        """Returns the positions whose segments ``ref`` counts, as ``cumsum(diff(x) != 1, dim)``, and the dim."""
        if ref.value.func is not aten.cumsum.default:
            return None
        breaks, dim = ref.value.args[:2]
        d = _dim(breaks, dim)
        if breaks.func not in (aten.ne.Scalar, aten.ne.Tensor) or constant_of(breaks.args[1]) != 1.0:
            return None
        steps = breaks.args[0]
        if steps.func is not aten.sub.Tensor or len(steps.args) != 2 or steps.kwargs:
            return None
        v = Var(steps.shape[d])
        index = tuple(var(v) if k == d else const(0) for k in range(len(steps.shape)))
        after, before = (_joined_below(Ref(a, index)) if isinstance(a, Value) else None for a in steps.args)
        if after is None or before is None or after.value is not before.value:
            return None
        along, pieces = joined(after.value)
        apart = of_index(after.index[along]).minus(of_index(before.index[along])).value
        if along != d or apart != 1 or len(pieces) != 2 or before.index[along] != var(v) or pieces[0].shape[d] != ONE:
            return None
        return (pieces[1], d) if pieces[1].shape == ref.value.shape else None


def _joined_below(ref: Ref) -> Ref | None:
    """Returns the element of a concatenation that a view shows, None if it shows something else."""
    below: Ref | None = ref
    while below is not None and below.value.func is not aten.cat.default:
        below = step(below)
    return below


def _pair(value: Linear) -> tuple[Datum, Datum] | None:
    """Returns the two elements of one tensor of which ``value`` is the difference, None for anything else."""
    terms = dict(value.terms)
    if value.constant or sorted(terms.values()) != [-1, 1] or not all(isinstance(a, Datum) for a in terms):
        return None
    one, two = sorted(terms, key=lambda a: -terms[a])
    assert isinstance(one, Datum) and isinstance(two, Datum)
    return (one, two) if one.ref.value is two.ref.value and one.wrap is None and two.wrap is None else None


def _closer(literal: Literal, one: Linear, two: Linear, apart: Linear) -> Literal:
    """Returns a comparison with the difference of ``one`` and ``two``, if it has that, replaced by ``apart``."""
    if not isinstance(literal, Compare):
        return literal
    for a, _ in one.terms:
        c = literal.value.coefficient(a)
        if c and len(one.terms) == 1 and not one.constant and one == atom(a):
            rest = literal.value.plus(one, -c).plus(two, c)
            if len(rest.terms) < len(literal.value.terms):
                return Compare(literal.kind, rest.plus(apart, c))
    return literal
