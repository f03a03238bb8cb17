"""Proves that a mask for packed sequences keeps nothing apart where the positions are 0, 1, 2 and so on.

transformers numbers the sequences by ``cumsum(diff(positions, prepend=first - 1) != 1)``, also where the model made
the positions itself. All of them are then in one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mhc_inductor.routing.graph.expressions import Ref, _broadcast, aten, joined
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import Linear, atom, number, to_index
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.selection.elements import SHOWN, SUB, constant_of
from mhc_inductor.routing.operators.selection.integers import Wholes
from mhc_inductor.routing.operators.selection.keys import FALSE, TRUE, AnyOf
from mhc_inductor.routing.operators.selection.masks import Masks

_PICKED = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.gather.default, aten.index_select.default)
_DEEP = 24


class _Positions(Wholes):
    """Evaluates whole numbers, also those read at positions: ``x[batch, query]``."""

    def _arithmetic(self, ref: Ref) -> Linear:
        if ref.value.func in (aten.index.Tensor, aten._unsafe_index.Tensor):
            base, picks = ref.value.args[:2]
            if all(isinstance(p, Value) and p.dtype is torch.int64 for p in picks) and len(picks) == len(base.shape):
                places = tuple(self._place(p, ref, size) for p, size in zip(picks, base.shape, strict=True))
                return self.of(Ref(base, places))
        return super()._arithmetic(ref)

    def _place(self, pick: Value, ref: Ref, size: Size) -> Index:
        """Returns the element of an index as a position below ``size``. Raises Unsupported if it is not one."""
        found = to_index(self.of(_broadcast(pick, ref)))
        if found is None:
            raise Unsupported
        known, terms = found.constant, [*found.terms.items()]
        if known is not None and (0 <= known < size.factor if not size.symbols else known == 0):
            return found
        if len(terms) != 1 or not isinstance(terms[0][0], Var) or terms[0][1] != ONE or terms[0][0].size != size:
            raise Unsupported
        return found


class Proved(Masks):
    """Evaluates elements of masks, and knows numbers of sequences that are all the same."""

    def __init__(self, fixed: Mapping[str, int], hints: Mapping[str, int]) -> None:
        super().__init__(fixed, hints)
        self.wholes = _Positions(self)
        self.whole = self.wholes.of

    def _find(self, ref: Ref, want: bool) -> AnyOf:
        func, args = ref.value.func, ref.value.args
        if func in (aten.eq.Tensor, aten.ne.Tensor):
            sides = [self._only(a, _DEEP) for a in args[:2]]
            if None not in sides:
                return TRUE if ((sides[0] == sides[1]) == (func is aten.eq.Tensor)) == want else FALSE
        return super()._find(ref, want)

    def _only(self, a: object, deep: int) -> float | None:
        """Returns the number that every element of ``a`` is known to be, else None."""
        known = constant_of(a)
        if known is not None or not isinstance(a, Value) or a.func is None or not deep:
            return known
        func, args = a.func, a.args
        if func in SHOWN or func in _PICKED:
            return self._only(args[0], deep - 1)
        if func is aten.cumsum.default:
            return 0.0 if self._only(args[0], deep - 1) == 0.0 else None
        if func in (aten.ne.Scalar, aten.ne.Tensor):
            sides = [self._only(x, deep - 1) for x in args[:2]]
            return None if None in sides else float(sides[0] != sides[1])
        return 1.0 if func in SUB and self._steps(a) else None

    def _steps(self, difference: Value) -> bool:
        """Checks whether a difference is that of neighbours in a row of positions, the first less 1 in front."""
        late, early = (x if isinstance(x, Value) else None for x in difference.args[:2])
        if len(difference.args) > 2 or difference.kwargs or late is None or early is None or late.shape != early.shape:
            return False
        whole = late.args[0] if late.func is aten.slice.Tensor else None
        if not isinstance(whole, Value) or early.func is not aten.slice.Tensor or early.args[0] is not whole:
            return False
        if whole.func is not aten.cat.default or _start(late, whole) != 1 or _start(early, whole) != 0:
            return False
        d, pieces = joined(whole)
        if d != len(whole.shape) - 1 or len(pieces) != 2 or pieces[0].shape[d] != ONE:
            return False
        return self._in_order(*pieces)

    def _in_order(self, front: Value, row: Value) -> bool:
        """Checks whether each element of ``row`` is the one before plus 1, the first ``front`` plus 1."""
        lead = [Var(size) for size in row.shape[:-1]]
        i = Var(row.shape[-1])
        try:
            at = self.whole(Ref(row, (*map(var, lead), var(i))))
            before = self.whole(Ref(front, (*map(var, lead), const(0))))
        except Unsupported:
            return False
        if i.size == ONE:
            return at == before.plus(number(1))
        first: Linear = at.without(i)
        return at.minus(first) == atom(i) and i not in first.variables() and before.plus(number(1)) == first


def _start(part: Value, whole: Value) -> int | None:
    """Returns the start of a slice of the last dim, one element shorter than ``whole``, with a step of 1."""
    rest = part.args[1:]
    dim = rest[0] if rest else 0
    start = rest[1] if len(rest) > 1 and rest[1] is not None else 0
    step = rest[3] if len(rest) > 3 else 1
    last = len(whole.shape) - 1
    if not isinstance(dim, int) or dim % len(whole.shape) != last or step != 1 or not isinstance(start, int):
        return None
    return start
