# SPDX-License-Identifier: Apache-2.0
"""The terms of a step of E79: elements of matrices and vectors, states of zeros, and what reads a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mhc_inductor.routing.graph.expressions import Ref, aten, is_cast, number, peel, product, shown, whole
from mhc_inductor.routing.graph.index import ONE, Size, Var, const, var
from mhc_inductor.routing.graph.linear import placed
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
    return ref is not None and any(f.value in matrices for f, _ in product(ref, matrices).factors)
