# SPDX-License-Identifier: Apache-2.0
"""The terms of a step of E79: elements of matrices and vectors, products of factors, matrix-vector products."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

import torch

from mhc_inductor.routing.graph.bounds import DEPTH, Steps
from mhc_inductor.routing.graph.expressions import (
    Ref,
    Share,
    aten,
    chain,
    contraction,
    is_cast,
    number,
    operands,
    peel,
    power,
    reduction,
    shares,
    shown,
    summed,
    whole,
    written,
)
from mhc_inductor.routing.graph.index import ONE, Size, Var, const, var
from mhc_inductor.routing.graph.linear import placed, variables_of
from mhc_inductor.routing.graph.values import Value

FULL = (aten.full.default, aten.full_like.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
# Operations to look through for a fill: torch.zeros is recorded as a detached tensor.
_SAME = (aten.detach.default, aten.expand.default, aten.clone.default, aten.view.default, aten.alias.default)


class Frame:
    """The index variables of a step: sequences (any leading dims), rows i, columns j, and ``at`` for vectors."""

    def __init__(self, lead: tuple[Size, ...], n: int) -> None:
        self.lead = tuple(Var(s) for s in lead)
        self.n = n
        self.i, self.j, self.at = (Var(Size(n)) for _ in range(3))

    def matrix(self, value: Value) -> Ref:
        """Returns element [..., i, j] of a matrix."""
        return Ref(value, (*map(var, self.lead), var(self.i), var(self.j)))

    def along(self, ref: Ref, v: Var) -> Ref:
        """Returns ``ref`` with ``at`` for ``v``: vectors over rows, columns and summed indices become comparable."""
        return placed(ref, v, var(self.at))


Dtypes = tuple[torch.dtype, ...]


@dataclasses.dataclass
class Product:
    """``coef * product(factor ** exponent)``; a sum over more than one element stays one factor."""

    coef: float = 1.0
    factors: list[tuple[Ref, float]] = dataclasses.field(default_factory=list)
    roundings: dict[Ref, set[Dtypes]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    """The dtypes that the model rounded each factor to, one tuple for each of its occurrences."""


def product(ref: Ref, stop: Collection[Value] = ()) -> Product:
    """Returns ``ref`` as a product; values of ``stop`` are factors.

    Outer products are taken apart, matrix products that sum over more than one element are not.
    """
    result = Product()

    def share(of: Ref | float, weight: float = 1.0) -> Share:
        if isinstance(of, float):
            return Share(of, weight)
        *refs, inner = chain(of, stop)
        result.roundings[inner].add(tuple(r.value.dtype for r in refs if written(r.value)))
        return Share(inner, weight)

    def parts(ref: Ref) -> list[Share] | None:
        found = _parts(ref, stop)
        return None if found is None else [share(of, weight) for of, weight in found]

    for a, e in shares([share(ref)], parts, Steps("factors", ref.value)):
        if isinstance(a, float):
            result.coef *= power(a, e)
        else:
            result.factors.append((a, e))
    return result


def _parts(ref: Ref, stop: Collection[Value]) -> list[tuple[Ref | float, float]] | None:
    """Returns the factors of ``ref`` with their exponents, or None where it is a single factor."""
    value, func = ref.value, ref.value.func
    if func is None or value in stop:
        return None
    scalar = number(value) if func not in FULL or not any(s != ONE for s in value.shape) else None
    if scalar is not None:
        return [(scalar, 1.0)] if scalar else None
    if func in (aten.mul.Tensor, aten.mul.Scalar):
        return [(a, 1.0) for a in operands(ref)]
    if func in (aten.div.Tensor, aten.div.Scalar) and not value.kwargs:
        return list(zip(operands(ref), (1.0, -1.0), strict=True))
    if func is aten.neg.default:
        return [(-1.0, 1.0), (Ref(value.args[0], ref.index), 1.0)]
    if func is aten.reciprocal.default:
        return [(Ref(value.args[0], ref.index), -1.0)]
    if func is aten.pow.Tensor_Scalar and (exponent := number(value.args[1])) in (-1.0, 2.0):
        return [(Ref(value.args[0], ref.index), exponent or 1.0)]
    if (pair := contraction(ref)) is not None and pair[2].size == ONE:
        return [(pair[0], 1.0), (pair[1], 1.0)]
    if (reduced := reduction(ref)) is not None and all(v.size == ONE for v in reduced[1]):
        return [(reduced[0], 1.0)]
    return None


@dataclasses.dataclass
class Applied:
    """``coef * sum over bound of matrix[..] * vector[..]``, times the factors ``others``."""

    coef: float
    matrix: Ref
    vector: Ref
    others: list[tuple[Ref, float]]
    bound: Var


def applied(ref: Ref, matrices: Collection[Value]) -> Applied | None:
    """Returns ``ref`` as a product of one of ``matrices`` with a vector, or None."""
    every = product(ref)
    for at, (factor, e) in enumerate(every.factors):
        if e != 1.0:
            continue
        scale = 1.0
        if (pair := contraction(factor)) is not None:
            left, right, bound = pair
        elif (reduced := reduction(factor)) is not None and len(real := [v for v in reduced[1] if v.size != ONE]) == 1:
            inner = peel(reduced[0])
            bound, scale = real[0], reduced[2]
            if inner.value.func is not aten.mul.Tensor:
                continue
            left, right = operands(inner)  # type: ignore[assignment]
            if not isinstance(left, Ref) or not isinstance(right, Ref):
                continue
        else:
            continue
        others = [f for k, f in enumerate(every.factors) if k != at]
        for a, b in ((left, right), (right, left)):
            matrix = peel(a, matrices)
            row = {v for i in matrix.index[-2:] for v in i.variables()} - {bound}
            if matrix.value in matrices and not any(row & variables_of(f) for f, _ in others):
                return Applied(every.coef * scale, matrix, b, others, bound)
    return None


Piece = tuple[float, Ref, Applied | None]


def pieces(ref: Ref, matrices: Collection[Value]) -> tuple[float, list[Piece]]:
    """Returns ``ref`` as a constant and signed addends; sums without a matrix product stay whole. Raises TooLarge."""
    known: dict[Ref, tuple[float, list[Piece]]] = {}
    steps = Steps("addends", ref.value, DEPTH)

    def find(outer: Ref) -> tuple[float, list[Piece]]:
        # A value that the model rounded differs from the unrounded one: the two do not cancel.
        key = shown(outer, matrices)[-1]
        if key not in known:
            steps.take()
            known[key] = search(outer, peel(key, matrices))
        return known[key]

    def search(outer: Ref, ref: Ref) -> tuple[float, list[Piece]]:
        sides = summed(ref)
        if sides is None:
            return 0.0, [(1.0, outer, applied(ref, matrices))]
        constant, total = 0.0, dict[Ref, Piece]()
        for sign, side in sides:
            more, each = (side, []) if isinstance(side, float) else find(side)
            constant += sign * more
            for s, r, a in each:
                before = total.get(key := shown(r, matrices)[-1], (0.0, r, a))
                total[key] = (before[0] + sign * s, *before[1:])
        if any(a is not None for _, _, a in total.values()):
            return constant, [*total.values()]
        return 0.0, [(1.0, outer, None)]

    return find(ref)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An input vector of a step: the element at ``Frame.at`` of a value that the model computed."""

    ref: Ref

    @property
    def key(self) -> Ref:
        """The element behind views and casts, up to a rounding of the model's: equal for the same vector."""
        return shown(self.ref)[-1]


def zero(value: Value) -> bool:
    """Checks whether every element of ``value`` is 0, as in ``torch.zeros``."""
    while (func := value.func) in _SAME or is_cast(value):
        value = value.args[0]
    if func in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return number(value.args[2 if func is aten.new_full.default else 1]) == 0.0
    return func in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def shows(value: object, wanted: Value) -> bool:
    """Checks whether ``value`` is a tensor that shows the elements of ``wanted`` in their order."""
    if not isinstance(value, Value):
        return False
    at = whole(value)
    inner = peel(at, {wanted})
    return inner.value is wanted and inner.flat == at.flat


def vector(value: Value, frame: Frame) -> Ref | None:
    """Returns element [..., i] of a value that has the shape of the vectors, or None."""
    index, wanted = [], [*frame.lead, frame.i]
    for size in value.shape:
        while wanted and wanted[0].size == ONE:
            wanted.pop(0)
        if size == ONE:
            index.append(const(0))
        elif wanted and wanted[0].size == size:
            index.append(var(wanted.pop(0)))
        else:
            return None
    return Ref(value, tuple(index)) if not wanted else None


def reads(value: object, frame: Frame, matrices: Collection[Value]) -> bool:
    """Checks whether ``value`` is one of ``matrices`` times a vector."""
    ref = vector(value, frame) if isinstance(value, Value) else None
    return ref is not None and applied(ref, matrices) is not None
