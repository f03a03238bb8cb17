# SPDX-License-Identifier: Apache-2.0
"""One step of Sinkhorn iterations, however it is written: a matrix and the sums of its own rows or columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from mhc_inductor.routing.graph.expressions import (
    Ref,
    addends,
    aten,
    contraction,
    number,
    operands,
    peel,
    product,
    reduction,
    step,
    summed,
    whole,
)
from mhc_inductor.routing.graph.gates import bound_below
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.elements import constant_of
from mhc_inductor.routing.operators.mhc.formula import COLUMNS, ROWS

DIM_NAMES = {ROWS: "-1", COLUMNS: "-2"}


def iterated(matrices: Iterable[Value]) -> list[list[Value]]:
    """Returns each matrix with the results of repeated divisions by its own sums, whatever numbers are added to them.

    ``matrices`` are in graph order. A softmax over rows or columns counts as such a division.
    """
    runs: dict[Value, list[Value]] = {}
    ended: dict[Value, list[Value]] = {}
    for value in matrices:
        with contextlib.suppress(Unsupported):
            ref = bare(whole(value))
            before = _before(ref) if ref.value not in runs else None
            if before is not None:
                ended.pop(before, None)
                runs[ref.value] = ended[ref.value] = [*runs.get(before, [before]), value]
    return [*ended.values()]


def _before(ref: Ref) -> Value | None:
    """Returns the matrix whose division by its own row or column sums gives ``ref``, or None."""
    value, pairs = ref.value, list[tuple[Ref | float, Ref | float]]()
    if value.func in (aten._softmax.default, aten.softmax.int):
        return bare(whole(value.args[0])).value if axis_of(value, value.args[1]) is not None else None
    if value.func is aten.div.Tensor:
        left, right = operands(ref)
        pairs = [(left, right)]
    elif value.func is aten.mul.Tensor:
        left, right = operands(ref)
        pairs = [(a, inverse) for a, b in ((left, right), (right, left)) if (inverse := inverse_of(b)) is not None]
    for a, b in pairs:
        total = divisor_of(b)[0] if isinstance(a, Ref) and isinstance(b, Ref) else None
        found = sum_of(total) if total is not None else None
        if found is not None and isinstance(a, Ref) and bare(found[0]).value is bare(a).value:
            return bare(a).value
    return None


def bare(ref: Ref) -> Ref:
    """Returns ``ref`` without views, casts, added numbers and lower bounds."""
    while True:
        ref = peel(ref)
        low = bound_below(ref)
        terms = [(1.0, low[0])] if low is not None else _added(ref)
        if len(terms) != 1 or terms[0][0] != 1.0:
            return ref
        ref = terms[0][1]


def _added(ref: Ref) -> list[tuple[float, Ref]]:
    """Returns the operands of a sum or a difference that are no numbers, with their coefficients."""
    sides = [(weight, peel(a) if isinstance(a, Ref) else a) for weight, a in summed(ref) or ()]
    return [(weight, a) for weight, a in sides if isinstance(a, Ref) and number(a.value) is None]


def inverse_of(ref: Ref | float) -> Ref | None:
    """Returns u of ``1 / u``, or None."""
    term = product(ref) if isinstance(ref, Ref) else None
    if term is None or term.coef != 1.0 or len(term.factors) != 1 or term.factors[0][1] != -1.0:
        return None
    return term.factors[0][0]


def logsumexp_of(total: Ref, like: Ref) -> tuple[int | None, Ref | None]:
    """Returns (dim, summand) of a logsumexp over rows or columns, None for what does not fit.

    The summand is the operand's element at the indices of ``like``.
    """
    operand, dims = total.value.args[:2]
    dims = [dims] if isinstance(dims, int) else list(dims)
    rank = len(operand.shape)
    if len(dims) != 1 or rank != len(like.index):
        return None, None
    at = dims[0] % rank
    index = list(total.index)
    if len(index) == rank:
        del index[at]
    if index != [i for d, i in enumerate(like.index) if d != at]:
        return None, None
    return axis_of(operand, dims[0]), Ref(operand, like.index)


def constant_along(ref: Ref, like: Ref, dim: int) -> bool:
    """Checks whether ``ref`` is the same for all elements of ``like`` along ``dim``."""
    varying = like.index[dim].variables()
    return not any(varying & i.variables() for i in peel(ref).index)


def axis_of(value: Value, dim: int) -> int | None:
    """Returns ``dim`` of ``value`` as ROWS or COLUMNS, None for any other dim."""
    at = dim % len(value.shape) - len(value.shape)
    return at if at in (ROWS, COLUMNS) else None


def named_value(value: Value) -> Value:
    """Returns ``value`` or, where no graph node produced it, the value behind its casts that one did."""
    ref = whole(value)
    while ref.value.node is None:
        inner = step(ref)
        if inner is None or inner.index != ref.index:
            break
        ref = inner
    return ref.value


def maximum_of(top: Ref, logits: Ref) -> int | None:
    """Returns the dim over which ``top`` is the maximum of ``logits``, or None.

    The maximum may be detached or not, since its gradient cancels.
    """
    top = peel(top)
    while top.value.func is aten.detach.default:
        top = peel(Ref(top.value.args[0], top.index))
    if top.value.func is not aten.amax.default and (top.value.func is not aten.max.dim or top.value.out != 0):
        return None
    operand = whole(top.value.args[0])
    while operand.value.func is aten.detach.default:
        operand = Ref(operand.value.args[0], operand.index)
    given = top.value.args[1] if len(top.value.args) > 1 else ()
    dims: list[int] = [given] if isinstance(given, int) else list(given)
    same = Ref(logits.value, operand.index) if len(operand.index) == len(logits.index) else None
    if same is None or len(dims) != 1 or peel(operand) != peel(same):
        return None
    return axis_of(operand.value, dims[0])


def sum_of(ref: Ref) -> tuple[Ref, list[Var], float] | None:
    """Returns (summand, bound variables, factor) of a sum, a mean or a product with a matrix of ones, or None."""
    contracted = contraction(ref)
    if contracted is None:
        return reduction(ref)
    left, right, k = contracted
    for ones, summand in ((left, right), (right, left)):
        if constant_of(peel(ones).value) == 1.0:
            return summand, [k], 1.0
    return None


def divisor_of(ref: Ref) -> tuple[Ref | None, str, float]:
    """Returns (sum, kind, eps): "add" for ``sum + eps``, "max" for ``max(sum, eps)``, "" for a bare sum.

    The sum is None for anything else.
    """
    ref = peel(ref)
    low = bound_below(ref)
    if low is not None:
        return (low[0], "max", low[1]) if sum_of(low[0]) is not None else (None, "", 0.0)
    eps, terms = addends(ref)
    if len(terms) != 1 or terms[0][0] != 1.0 or eps < 0.0 or sum_of(terms[0][1]) is None:
        return None, "", 0.0
    return terms[0][1], "add" if eps else "", eps


def dim_summed(numerator: Ref, summand: Ref, bound: Var) -> int | None:
    """Returns the dim of ``numerator`` (ROWS or COLUMNS) that ``summand`` sums over with ``bound``, or None."""
    if summand.value is not numerator.value:
        numerator = peel(numerator)
        summand = peel(summand)
        if summand.value is not numerator.value:
            return None
    expected: Index = var(bound)
    differing = [d for d, (a, b) in enumerate(zip(numerator.index, summand.index, strict=True)) if a != b]
    if len(differing) != 1 or summand.index[differing[0]] != expected:
        return None
    at = differing[0] - len(numerator.index)
    return at if at in (ROWS, COLUMNS) and bound.size != Size(1) else None
