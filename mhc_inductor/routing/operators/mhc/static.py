# SPDX-License-Identifier: Apache-2.0
"""Finds streams that are read and written by weights which are no projection: they are named, not routed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from mhc_inductor.ops.checks import MIN_WIDTH
from mhc_inductor.routing.graph.expressions import Ref, addends, aten, peel, reduction, whole
from mhc_inductor.routing.graph.gates import bound_below
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.values import Value, behind, values_in
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.mixing import factors, terms_of

WRITTEN_APART = (
    "each stream is a tensor of its own, and written as such; expected one tensor [..., n, D] of new streams"
)
STATIC = (
    "the streams are collapsed with weights that are no projection of them, as in hyper-connections with static weights; "
    "expected h_pre = sigmoid(alpha * z + bias)"
)


PARTS = {
    aten.tanh.default: "tanh", aten.relu.default: "relu", aten.silu.default: "silu", aten.gelu.default: "gelu",
    aten.softplus.default: "softplus", aten.hardsigmoid.default: "hardsigmoid", aten._softmax.default: "softmax",
    aten.clamp.default: "clamp", aten.clamp_min.default: "clamp", aten.native_layer_norm.default: "a LayerNorm",
    aten.div.Tensor: "a division by their sum",
}  # fmt: skip
"""Operations that weights of streams have in other families, in the words of near misses."""


def family(value: Value, x: Value) -> str | None:
    """Returns which of PARTS is the last on the way from x to weights of its streams, in a sentence, or None."""
    for one in behind(value, lambda a: a is not x):
        if one.func in PARTS and (one.func is not aten.div.Tensor or _is_sum(whole([*values_in(one.args)][-1]))):
            return (
                f"{PARTS[one.func]} is part of the weights of the streams; expected h_pre = sigmoid(alpha * z + bias)"
            )
    return None


def _is_sum(ref: Ref) -> bool:
    """Checks whether an element is a sum, plus a number or bounded by one."""
    low = bound_below(peel(ref))
    terms = addends(ref if low is None else low[0])[1]
    return len(terms) == 1 and reduction(terms[0][1]) is not None


class _Sum(NamedTuple):
    """A sum of tensors: those that are added as they are, and for each tensor of weights those that it multiplies."""

    value: Value
    plain: frozenset[Ref]
    weighted: dict[Value, dict[Ref, Index]]


def lists(values: Iterable[Value], routed: Collection[Value]) -> Iterator[Mismatch]:
    """Yields a mismatch for each list of tensors that is mixed by a matrix, or collapsed and then written to.

    Streams that are parts of one of the tensors ``routed`` are no such list.
    """
    sums = [one for value in _alike(values) if (one := _sum(*value)) is not None]
    mixes: dict[tuple[Value, frozenset[Ref]], list[_Sum]] = {}
    for one in sums:
        for weights, each in one.weighted.items():
            if len(each) > 1:
                mixes.setdefault((weights, frozenset(each)), []).append(one)
    known = set[Ref]()
    for (weights, streams), mixed in sorted(mixes.items(), key=lambda item: -len(item[0][1])):
        rows = {tuple(one.weighted[weights].values()) for one in mixed}
        written = {ref for one in sums if one.weighted and len(one.plain) == 1 for ref in one.plain}
        apart = any(ref.value not in routed for ref in streams) and known.isdisjoint(streams)
        if apart and (len(rows) > 1 or streams <= written):
            known |= streams
            yield Mismatch(WRITTEN_APART, mixed[-1].value)


def _alike(values: Iterable[Value]) -> Iterator[tuple[Value, tuple[Index, ...]]]:
    """Yields values that may be streams [..., D], each with the index that all values of its shape share."""
    shared: dict[tuple[Size, ...], tuple[Index, ...]] = {}
    for value in values:
        wide = len(value.shape) > 1 and (value.shape[-1].symbols or value.shape[-1].factor >= MIN_WIDTH)
        if wide and value.func is aten.add.Tensor and value.dtype.is_floating_point:
            yield value, shared.setdefault(value.shape, tuple(var(Var(s)) for s in value.shape))


def _sum(value: Value, index: tuple[Index, ...]) -> _Sum | None:
    """Returns a sum whose products are of a tensor [..., D] and a number of a tensor of weights; None for other sums."""
    low, found = index[-1].variables(), _Sum(value, frozenset(), {})
    with contextlib.suppress(Unsupported):
        for sign, ref in terms_of(Ref(value, index), ()):
            pair = factors(ref)
            if pair is None and sign == 1.0:
                found = found._replace(plain=found.plain | {peel(ref)})
                continue
            if pair is None or pair.bound is not None or sign != 1.0:
                return None
            a, b = peel(pair.a), peel(pair.b)
            a, b = (b, a) if low <= a.flat.variables() else (a, b)
            if low & a.flat.variables() or not low <= b.flat.variables():
                return None
            found.weighted.setdefault(a.value, {})[b] = a.flat
        return found
    return None
