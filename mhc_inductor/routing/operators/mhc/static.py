# SPDX-License-Identifier: Apache-2.0
"""Finds streams that are read and written by weights which are no projection: they are named, not routed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

from mhc_inductor.ops.checks import MIN_WIDTH
from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import Ref, addends, aten, peel, reduction, whole
from mhc_inductor.routing.graph.gates import bound_below
from mhc_inductor.routing.graph.index import Index, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.values import Value, behind, values_in
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.mixing import factors, terms_of
from mhc_inductor.routing.operators.mhc.norm import made_of

WRITTEN_APART = (
    "each stream is a tensor of its own, and written as such; expected one tensor [..., n, D] of new streams"
)
STATIC = (
    "the weights of the streams are no projection of them, as in hyper-connections with static weights; "
    "expected h_post = post_mult * sigmoid(alpha * z + bias)"
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


def lists(values: Iterable[Value], routed: Collection[Value]) -> Iterator[Mismatch]:
    """Yields a mismatch for each list of streams that are written as tensors of their own, none of them after another.

    Their sums have one tensor times several elements of a tensor of weights: f_out times those of h_post, or a stream
    times those of a column of the matrix. Tensors that are ``routed`` are left out.
    """
    shared: dict[tuple[Value, Ref], dict[Index, list[Value]]] = {}
    for value, index in _alike(values):
        for weights, wide, at in _products(value, index):
            if wide.value not in routed:
                shared.setdefault((weights, wide), {}).setdefault(at, []).append(value)
    known = set[Value]()
    for each in sorted(shared.values(), key=len, reverse=True):
        sums = [one for written in each.values() for one in written]
        apart = len(each) > 1 and not made_of(node_of(sums[-1]), {node_of(sums[0])})
        if apart and known.isdisjoint(sums):
            known.update(sums)
            yield Mismatch(WRITTEN_APART, sums[-1])


def _alike(values: Iterable[Value]) -> Iterator[tuple[Value, tuple[Index, ...]]]:
    """Yields values that may be streams [..., D], each with the index that all values of its shape share."""
    shared: dict[tuple[Size, ...], tuple[Index, ...]] = {}
    for value in values:
        wide = len(value.shape) > 1 and (value.shape[-1].symbols or value.shape[-1].factor >= MIN_WIDTH)
        if wide and value.func is aten.add.Tensor and value.dtype.is_floating_point:
            yield value, shared.setdefault(value.shape, tuple(var(Var(s)) for s in value.shape))


def _products(value: Value, index: tuple[Index, ...]) -> list[tuple[Value, Ref, Index]]:
    """Returns (tensor, element of a tensor [..., D], index in the first) of the products in a sum; none in other sums."""
    low, found = index[-1].variables(), list[tuple[Value, Ref, Index]]()
    with contextlib.suppress(Unsupported):
        for sign, ref in terms_of(Ref(value, index), ()):
            pair = factors(ref)
            if sign != 1.0 or (pair is not None and pair.bound is not None):
                return []
            if pair is not None:
                weight, wide = sorted((peel(pair.a), peel(pair.b)), key=lambda one: low <= one.flat.variables())
                if low & weight.flat.variables() or not low <= wide.flat.variables():
                    return []
                found.append((weight.value, wide, weight.flat))
        return found
    return []
