# SPDX-License-Identifier: Apache-2.0
"""Finds collapses of streams with weights that were computed from other streams, as in a single pass."""

from __future__ import annotations

from collections.abc import Collection

from mhc_inductor.ops.checks import MIN_WIDTH
from mhc_inductor.routing.graph.expressions import Ref, chain
from mhc_inductor.routing.graph.index import ONE, Index, Size, Var, linear, product_of, var
from mhc_inductor.routing.graph.values import Value
from mhc_inductor.routing.operators.mhc.external_post import Factors, factors, streams_of, terms_of
from mhc_inductor.routing.operators.mhc.matches import CollapseUse
from mhc_inductor.routing.operators.mhc.mixing import read


def given_collapse(
    value: Value, n: int, weights: Collection[Value] | None = None, streams: Value | None = None
) -> CollapseUse | None:
    """Returns ``value[d] = sum_i weight[i] * x[i, d]`` as a collapse of n streams, or None.

    ``weights`` are the values with n elements a token that may collapse them, None for any; ``streams`` is x, None for
    any. Raises Unsupported.
    """
    *lead, last = value.shape
    if last.symbols or last.factor < MIN_WIDTH:
        return None
    low, d = var(Var(last)), last.factor
    index = [var(Var(s)) for s in lead]
    tokens = linear(index, lead)
    found = []
    for sign, ref in terms_of(Ref(value, (*index, low)), ()):
        f = factors(ref) if sign == 1.0 else None
        seen = _weighted(f, tokens, low, n, d, value, weights) if f is not None else None
        if seen is None:
            return None
        found.append(seen)
    places = sorted(at for at, *_ in found)
    if places not in ([-1], [*range(n)]) or any(one[1:] != found[0][1:] for one in found):
        return None
    _, weight, x, stream = found[0]
    return CollapseUse(n, d, weight, x, stream, value) if streams is None or x is streams else None


def _weighted(
    f: Factors, tokens: Index, low: Index, n: int, d: int, value: Value, weights: Collection[Value] | None
) -> tuple[int, Value, Value, int] | None:
    """Returns (stream or -1 for all, weight, x, x's stream dim) of ``weight[i] * x[i]``, or None."""
    elements = product_of(value.shape).times(Size(n))
    for at, i, a, b in f.of_streams(n):
        place = tokens.times(Size(n)).plus(i)
        if weights is None:
            weight = read(a, (place, elements.over(Size(d)) or ONE), (i, Size(n)))
        else:
            weight = next((r.value for r in chain(a) if r.value in weights and r.flat == place), None)
        x = streams_of(b, place.times(Size(d)).plus(low), elements, n, d) if weight is not None else None
        if weight is not None and x is not None:
            return at, weight, *x
    return None
