# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn and Knopp's iterations in scaling form: one factor for the rows of ``K = exp(logits)``, one for the columns.

From ones, ``u = 1 / sum(K * v)`` and ``v = 1 / sum(K * u)`` are computed in turn. ``u * K * v`` is the matrix that
remains after dividing K by its row and column sums in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses

from mhc_inductor.routing.graph.expressions import Ref, Term, product, whole
from mhc_inductor.routing.graph.index import Index, Unsupported, Var, var
from mhc_inductor.routing.graph.linear import placed
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import constant_of
from mhc_inductor.routing.operators.mhc.formula import COLUMNS, ROWS, square_matrices


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A ``matrix`` times one of its scaling factors or, with ``axes``, after the normalisations over these dims."""

    matrix: Value
    axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Total:
    """``scale * sum(matrix * others)`` over the rows or columns of a square matrix."""

    matrix: Ref
    dim: int
    bound: Var
    scale: float
    others: list[tuple[Ref, float]]

    def of(self, index: tuple[Index, ...]) -> bool:
        """Checks whether the matrix is at ``index``, except in the summed dim."""
        at = len(index) + self.dim
        mine = self.matrix.index
        return (*mine[:at], *mine[at + 1 :]) == (*index[:at], *index[at + 1 :])


class Scalings:
    """Recognises products of matrices with scaling factors. Each sum is analysed once."""

    def __init__(self) -> None:
        self._sums: dict[Value, Scaled | None] = {}

    def of(self, ref: Ref) -> Scaled | None:
        """Returns the scaled matrix of which ``ref``, a product, is an element, or None. Raises Unsupported."""
        term = product(ref)
        scale, own = _factors(term)
        for factor in own if scale == 1.0 and not term.bound else ():
            last, exponent = factor
            known = self._sum(last.value) if exponent == -1.0 else None
            total = _total(last) if known is not None else None
            if known is None or total is None or not total.of(ref.index):
                continue
            rest = [f for f in own if f is not factor]
            matrix = Ref(known.matrix, ref.index), 1.0
            if matrix not in rest:
                continue
            rest.remove(matrix)
            at = ref.index[total.dim]
            if total.scale == 1.0 and rest == [(placed(r, total.bound, at), e) for r, e in total.others]:
                return known
            if not rest:
                return Scaled(known.matrix)
        return None

    def _sum(self, value: Value) -> Scaled | None:
        """Returns the matrix and the normalisations behind ``sum(K / sum(K / ...))``, or None.

        Constant factors of the sums before the last one cancel.
        """
        if value not in self._sums:
            self._sums[value] = None
            with contextlib.suppress(Unsupported):
                self._sums[value] = self._find(value)
        return self._sums[value]

    def _find(self, value: Value) -> Scaled | None:
        total = _total(whole(value))
        if total is None or total.scale <= 0.0 or len(total.others) > 1:
            return None
        matrix = total.matrix.value
        if not total.others:
            return Scaled(matrix, (total.dim,))
        other, exponent = total.others[0]
        before, inner = self._sum(other.value), _total(other)
        if exponent != -1.0 or before is None or inner is None or before.axes[-1] == total.dim:
            return None
        same = before.matrix is matrix and inner.matrix.value is matrix and inner.of(total.matrix.index)
        return Scaled(matrix, (*before.axes, total.dim)) if same else None


def _total(ref: Ref) -> _Total | None:
    term = product(ref)
    scale, own = _factors(term)
    for factor in own if len(term.bound) == 1 else ():
        matrix, (k,) = factor[0], term.bound
        if factor[1] == 1.0 and square_matrices(matrix.value):
            dim = next((d for d in (ROWS, COLUMNS) if matrix.index[d] == var(k)), None)
            if dim is not None:
                return _Total(matrix, dim, k, scale, [f for f in own if f is not factor])
    return None


def _factors(term: Term) -> tuple[float, list[tuple[Ref, float]]]:
    """Returns (number, factors), with constant tensors, such as the ones that iterations start from, in the number.

    Raises Unsupported where a constant is not positive.
    """
    scale, factors = term.coef, []
    for ref, exponent in term.factors:
        known = constant_of(ref.value)
        if known is None:
            factors.append((ref, exponent))
        elif known > 0.0:
            scale *= known**exponent
        else:
            raise Unsupported
    return scale, factors
