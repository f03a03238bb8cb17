# SPDX-License-Identifier: Apache-2.0
"""Proves that every query sees a key, so that what a row without keys gives does not matter."""

from __future__ import annotations

import contextlib

from mhc_inductor.routing.graph.expressions import Ref, aten
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, var
from mhc_inductor.routing.graph.linear import Key, at_least_zero, atom, number, of_size
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.elements import ADD, constant_of, filling, operand
from mhc_inductor.routing.masks.index_checks import PICKS
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.operators.selection.fills import LOWEST
from mhc_inductor.routing.operators.selection.intervals import Judge


def seen_by_all(keys: AnyOf, t: Key, masks: Masks) -> bool:
    """Checks whether, at all values of the other variables, ``keys`` holds for some key ``t``.

    Such a key is the query's own position, a first block, or the best one by a score.
    """
    return any(_not_empty(conj, t, masks) or _top(conj, t, masks) for conj in keys)


def _not_empty(conj: All, t: Key, masks: Masks) -> bool:
    """Checks whether ``conj`` says only ``low <= t < high``, with low < high at all positions."""
    with contextlib.suppress(Unsupported):
        one, *others = Judge(masks, t).interval(conj)
        lows, highs = [number(0), *one.lowers], [of_size(t.size), *one.uppers]
        if not (others or one.conditions or one.keyed or any(x.data() for x in (*lows, *highs))):
            return all(at_least_zero(high.minus(low).shifted(-1)) for low in lows for high in highs)
    return False


def _top(conj: All, t: Key, masks: Masks) -> bool:
    """Checks whether ``t`` is a ``topk`` pick by scores that are lowest at the keys that ``conj`` excludes."""
    picks = [x for x in conj.literals if isinstance(x, Compare) and x.value.data()]
    if len(picks) != 1 or len(conj.bound) != 1 or picks[0].kind != "eq":
        return False
    (data,) = picks[0].value.data()
    value = data.ref.value
    same = picks[0].value in (atom(t).minus(atom(data)), atom(data).minus(atom(t)))
    wanted = conj.literals - {picks[0]}
    if same and not wanted and value.func in PICKS and value.out == 1:
        return True  # every pick is visible, and there is one
    if not same or value.func is not aten.topk.default:
        return False
    scores, k, *rest = value.args
    largest = rest[1] if len(rest) > 1 else value.kwargs.get("largest", True)
    last = not rest or rest[0] in (-1, len(value.shape) - 1)
    if value.out != 1 or not largest or not last or not isinstance(k, int) or k < 1:
        return False
    if conj.bound[0] not in data.ref.index[-1].variables():
        return False
    ref = Ref(scores, (*data.ref.index[:-1], var(t)))
    return any(wanted <= c.literals and _not_empty(c, t, masks) for c in _unmasked_scores(ref, masks))


def _unmasked_scores(ref: Ref, masks: Masks) -> AnyOf:
    """Returns the keys whose scores are not lowered by the last mask on them.

    Returns an empty list unless that mask is added or filled in, with values of at most :data:`LOWEST`.
    """
    value, args = ref.value, ref.value.args
    with contextlib.suppress(Unsupported, DynamicWidth, Mismatch):
        if value.func in ADD and len(args) == 2 and not value.kwargs:
            for a in args:
                with contextlib.suppress(Unsupported):
                    if constant_of(a) is None and max((v for v in masks.possible(a) if v), default=0.0) <= LOWEST:
                        return masks.additive(operand(a, ref))
        if (filled := filling(value)) is not None:
            mask, want, _, given = filled
            fill = constant_of(given)
            if fill is not None and fill <= LOWEST:
                return masks.truth(operand(mask, ref), want)
    return []
