# SPDX-License-Identifier: Apache-2.0
"""Keys and values in segments: concatenations that the model does not make, of tensors that it multiplies one by one.

``cat([q @ k1.T, q @ k2.T])`` is ``q @ cat([k1, k2]).T``, and ``w[:n] @ v1 + w[n:] @ v2`` is ``w @ cat([v1, v2])``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Part, Size, Unsupported, Var, const, var
from mhc_inductor.routing.graph.linear import Key, Linear, number, of_index, of_size, placed, size_of_sum, variables_of
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.masks.layouts import layout
from mhc_inductor.routing.masks.operands import Joined, Pair, Source, held, sources
from mhc_inductor.routing.masks.scatters import moved
from mhc_inductor.routing.operators.selection.matches import NotOurs
from mhc_inductor.routing.operators.selection.weights import Traced

_APART = (
    "the scores are those of several segments of keys, which {}; expected one q and one scale, and keys and values that "
    "can be concatenated in the segments' order"
)


def join(refs: Sequence[Ref], sizes: Sequence[Size], t: Var) -> Ref:
    """Returns the element at key ``t`` of the concatenation of tensors, each read behind the keys of those before it.

    It is the one of the farthest tensors that have the same layout, and as many keys as ``sizes`` say. Raises NotOurs if
    there are none.
    """
    chains = [[s for s in sources(ref) if held(s.ref.value)][::-1] for ref in refs]
    for first in next((c for c in chains if any(t in variables_of(s.ref) for s in c)), []):
        at = [d for d, i in enumerate(first.ref.index) if t in i.variables()]
        found = _alike(chains, sizes, first, at[0], t) if len(at) == 1 else None
        # Parts of digits are split later.
        if found is not None and (layout(found, variables_of(found), frozenset()) is not None or _has_parts(found)):
            return found
    raise NotOurs(_APART.format("are not read as their concatenation would be"), refs[0].value)


def _has_parts(ref: Ref) -> bool:
    return any(isinstance(a, Part) for i in ref.index for a in i.atoms())


def _alike(chains: Sequence[Sequence[Source]], sizes: Sequence[Size], like: Source, d: int, t: Var) -> Ref | None:
    """Returns the concatenation along ``d`` of one tensor of each chain, at the indices of ``like``; None without one."""

    def rest(s: Source) -> object:
        return s.dtype, *((*x[:d], *x[d + 1 :]) for x in (s.ref.index, s.ref.value.shape))

    pieces, start = list[Value](), number(0)
    for chain, size in zip(chains, sizes, strict=True):
        place = const(0) if size == ONE else moved(var(t), start)
        alike = (s.ref for s in chain if rest(s) == rest(like))
        ref = next((ref for ref in alike if ref.value.shape[d] == size and ref.index[d] == place), None)
        if ref is None:
            return None
        pieces.append(ref.value)
        start = start.plus(of_size(size))
    index, shape = ((*x[:d], own, *x[d + 1 :]) for x, own in ((like.ref.index, var(t)), (like.ref.value.shape, t.size)))
    return Ref(Joined(pieces, d, shape, like.dtype), index)


def pairs_of(segments: Sequence[tuple[list[Pair], float]], sizes: Sequence[Size], t: Var) -> tuple[list[Pair], float]:
    """Returns q and the concatenated keys of each product, from the products of each segment. Raises NotOurs."""
    (first, factor), *_ = segments
    where = first[0].k.value
    if not all(math.isclose(other, factor, rel_tol=1e-12) for _, other in segments):
        raise NotOurs(_APART.format("have different scales"), where)
    if any(len(pairs) != len(first) for pairs, _ in segments):
        raise NotOurs(_APART.format("are sums of different products"), where)
    made = []
    for each in zip(*(pairs for pairs, _ in segments), strict=True):
        q, d = each[0].q, each[0].d
        if not all(asks(pair.q, pair.d, each[0]) for pair in each):
            raise NotOurs(_APART.format("meet different queries"), where)
        made.append(Pair(q, join([placed(pair.k, pair.d, var(d)) for pair in each], sizes, t), d))
    return made, factor


def asks(ref: Ref, d: Var, of: Pair) -> bool:
    """Checks whether an element at the feature ``d`` is the query of a product."""
    ends = [[*sources(x)][-1].ref for x in (placed(ref, d, var(of.d)), of.q)]
    return d.size == of.d.size and ends[0] == ends[1]


def products_of(parts: Sequence[tuple[Traced, Ref, Var]], dim: int) -> tuple[Traced, Ref, Var]:
    """Returns the weights, the concatenated values and the key of products of slices of the weights that are added.

    Each part is the weights' element, V's, and the key. Raises NotOurs unless the slices lie one after another.
    """
    if len(parts) == 1:
        return parts[0]
    left, first, total, values, sizes = [*parts], parts[0][0], number(0), list[Ref](), list[Size]()
    begin = number(0 if any(_start(p[0], p[2], dim) == Size(0) for p in parts) else 1)  # 1: behind a sink
    t = Key(size_of_sum(functools.reduce(Linear.plus, (of_size(v.size) for *_, v in parts))))
    while left:
        start = size_of_sum(begin.plus(total))
        one = next((p for p in left if _start(p[0], p[2], dim) == start), None)
        if one is None or _but(one[0], dim) != _but(first, dim):
            raise NotOurs(_APART.format("are not all the weights, each once and one after another"), parts[0][1].value)
        try:
            values.append(placed(one[1], one[2], moved(var(t), total)))
        except Unsupported:
            raise NotOurs(_APART.format("begin behind several of open sizes"), one[1].value) from None
        sizes.append(one[2].size)
        total = total.plus(of_size(one[2].size))
        left = [p for p in left if p is not one]
    over = moved(var(t), number(0).minus(begin))
    index = (*first.ref.index[:dim], over, *first.ref.index[dim + 1 :])
    return Traced(Ref(first.ref.value, index), [], first.no_nan), join(values, sizes, t), t


def _start(traced: Traced, t: Var, dim: int) -> Size:
    """Returns the first key of a slice of the weights."""
    return size_of_sum(of_index(traced.ref.index[dim]).without(t))


def _but(traced: Traced, dim: int) -> tuple[object, ...]:
    """Returns all of the weights' element but its key. Weights that are masked again differ from all others."""
    index = traced.ref.index
    return (*index[:dim], *index[dim + 1 :], traced.no_nan, *((object(),) if traced.guards else ()))
