# SPDX-License-Identifier: Apache-2.0
"""The gated update that both states of E79 have: ``row[i] * S[i, j] * col[j] + write[i] * unit[j]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mhc_inductor.routing.graph.expressions import (
    Ref,
    addends,
    close,
)
from mhc_inductor.routing.graph.gates import argument_of, sigmoid_argument
from mhc_inductor.routing.graph.linear import variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.e79.terms import (
    Frame,
    Product,
    pieces,
    product,
)


@dataclasses.dataclass
class Update:
    """``sigmoid(row[i]) * sigmoid(col[j]) * state[i, j] + sign * write[i] * unit[j]``.

    ``row`` and ``col`` are the arguments of the two gates, ``write`` and ``unit`` the factors of the outer product.
    """

    state: Value
    row: Ref
    col: Ref
    write: Ref
    unit: Product
    sign: float


class NoUpdate(Exception):
    """Raised where a value is neither the formula nor close to it."""


class Weak(Mismatch):
    """A mismatch of a value that hardly resembles the formula."""


class Ungated(Weak):
    """The mismatch of two coupled matrices that no gate scales."""


def update(value: Value, frame: Frame, stop: Collection[Value], known: Collection[Value]) -> Update:
    """Returns ``value`` as a gated update of a matrix. Raises NoUpdate, or Mismatch where it almost is one."""
    constant, terms = addends(frame.matrix(value), stop)
    if len(terms) != 2 or constant != 0.0:
        raise NoUpdate
    both = {frame.i, frame.j}
    here = frame.matrix(value).index
    pairs = [(sign, product(ref, stop), ref.value) for sign, ref in terms]
    kept = [p for p in pairs if any(f.index == here and e == 1.0 for f, e in p[1].factors)]
    outer = [p for p in pairs if not any(both <= variables_of(f) for f, _ in p[1].factors)]
    if len(kept) != 1 or len(outer) != 1:
        raise NoUpdate
    sign, keep, where = kept[0]
    state = next(f for f, _ in keep.factors if f.index == here).value
    gates = [(f, e) for f, e in keep.factors if f.index != here]
    read = [z for f, e in gates if (z := sigmoid_argument(f, e) or argument_of(f)) is not None]
    if not any(matrices_in(z, known) for z in read):
        # Gates of other recurrences do not read a state either, but only E79 computes its write from two states.
        writes = [matrices_in(f, known) for f, _ in outer[0][1].factors if variables_of(f) & both == {frame.i}]
        if any(state in m and len(m) > 1 for m in writes):
            raise Ungated("a matrix is written as M is, by delta - M m^, but no gate that reads S' keeps it", where)
        raise NoUpdate
    row, col = _gates(gates, frame, where)
    if not close(keep.coef * sign, 1.0):
        raise Mismatch(f"the gated state is scaled by {keep.coef * sign:g}", where)
    sign, made, where = outer[0]
    write = [(f, e) for f, e in made.factors if frame.i in variables_of(f)]
    unit = [(f, e) for f, e in made.factors if frame.i not in variables_of(f)]
    if len(write) != 1 or write[0][1] != 1.0:
        raise Mismatch(f"the outer product has {len(write)} factors over rows; expected delta (x) k^", where)
    if abs(made.coef) != 1.0:
        raise Mismatch(f"the outer product is scaled by {made.coef * sign:g}", where)
    return Update(state, row, col, write[0][0], Product(1.0, unit, made.roundings), made.coef * sign)


def _gates(gates: list[tuple[Ref, float]], frame: Frame, where: Value) -> tuple[Ref, Ref]:
    """Returns the arguments of the row gate and of the column gate. Raises Mismatch."""
    both = {frame.i, frame.j}
    rows, cols = ([g for g in gates if variables_of(g[0]) & both == {v}] for v in (frame.i, frame.j))
    if len(rows) != 1 or len(cols) != 1 or len(gates) != 2:
        expected = "expected r[:, None] * S * c[None, :]"
        raise Mismatch(f"{len(rows)} row gates and {len(cols)} column gates; {expected}", where)
    found = []
    for gate, exponent in gates:
        argument = sigmoid_argument(gate, exponent)
        if argument is None:
            raise Mismatch(f"a gate is {word_of(gate.value)}; expected sigmoid", gate.value)
        found.append(argument)
    return (found[0], found[1]) if gates[0] is rows[0] else (found[1], found[0])


def matrices_in(ref: Ref, known: Collection[Value]) -> set[Value]:
    """Returns the matrices whose products with vectors are addends of ``ref``."""
    return {a.matrix.value for _, _, a in pieces(ref, known)[1] if a is not None}


def word_of(value: Value) -> str:
    """Returns the name of the operation that made ``value``, for messages."""
    return str(value.func).removeprefix("aten.").partition(".")[0] if value.func is not None else "no known operation"
