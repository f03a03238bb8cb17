# SPDX-License-Identifier: Apache-2.0
"""Emits the keys that every query sees, as ranges [B, S, G, r, 2]."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import Datum, Linear, of_size
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.masks.keys import Compare, Literal
from mhc_inductor.routing.masks.layouts import Layouts, layout
from mhc_inductor.routing.masks.numbers import Numbers
from mhc_inductor.routing.operators.selection.intervals import Interval
from mhc_inductor.routing.operators.selection.matches import Found


def ranges(layouts: Layouts, one: Found, device: torch.device) -> fx.Node:
    """Returns the node of the ranges of all intervals of an attention."""
    return layouts.cat([_part(layouts, one, each, device) for each in one.intervals], -2)


def _part(layouts: Layouts, one: Found, each: Interval, device: torch.device) -> fx.Node:
    """Emits the ranges of one interval."""
    emit = layouts.edit.emit
    lead = [one.batch, one.query, one.groups, list(each.bound)]
    order = [v for digits in lead for v in digits if v.size != ONE]
    whole = _as_they_are(one, each)
    if whole is not None:
        pair = Var(Size(2))
        ref = Ref(whole.value, (*whole.index[:-1], Index({pair: ONE})))
        if layout(ref, {*order, pair}, layouts.equal) is not None:
            return _ranged(layouts, layouts.spread(ref, [*order, pair]), order, lead)
    numbers = Numbers(layouts, order, device)
    low = numbers.extreme([x for x in each.lowers if x.value is None or x.value > 0], torch.maximum)
    ends = [x for x in each.uppers if x != of_size(one.t.size)]
    high = numbers.extreme(ends or [of_size(one.t.size)], torch.minimum)
    low = numbers.of(Linear()) if low is None else low
    assert high is not None
    for condition in each.conditions:
        if not _implied(condition, each):
            high = emit(torch.where, numbers.holds(condition), high, 0)
    if len(example(low).shape) != len(example(high).shape):
        raise Unsupported
    pairs = emit(torch.broadcast_tensors, low, high)
    node = emit(torch.stack, [emit(operator.getitem, pairs, 0), emit(operator.getitem, pairs, 1)], -1)
    return _ranged(layouts, node, order, lead)


def _ranged(layouts: Layouts, node: fx.Node, order: list[Var], lead: list[list[Var]]) -> fx.Node:
    """Returns starts and ends, which have a dim for each digit, as ranges with one dim for each part of ``lead``."""
    sizes = example(node).shape
    if any(not isinstance(s, torch.SymInt) and s == 1 for s in sizes[: len(order)]):
        node = layouts.edit.emit("expand", node, *[layouts.size(v.size) for v in order], 2)
    return layouts.joined(node, lead, 1)


def _as_they_are(one: Found, each: Interval) -> Ref | None:
    """Returns the model's tensor of starts and ends if nothing else determines the keys, None otherwise."""
    ends = [x for x in each.uppers if x != of_size(one.t.size)]
    if len(each.lowers) != 1 or len(ends) != 1 or each.conditions:
        return None
    data = []
    for x in (each.lowers[0], ends[0]):
        if x.constant or len(x.terms) != 1:
            return None
        ((a, c),) = x.terms
        if c != 1 or not isinstance(a, Datum) or a.wrap is not None:
            return None
        data.append(a.ref)
    start, end = data
    if start.value is not end.value or start.value.shape[-1:] != (Size(2),):
        return None
    same = start.index[:-1] == end.index[:-1]
    return start if same and (start.index[-1].constant, end.index[-1].constant) == (0, 1) else None


def _implied(condition: Literal, each: Interval) -> bool:
    """Checks whether ``condition`` says no more than that a block's id is not negative.

    It need not be emitted: the keys of a negative block would lie before the first key.
    """
    if not isinstance(condition, Compare) or len(condition.value.terms) != 1:
        return False
    ((a, c),) = condition.value.terms
    constant = condition.value.minus(Linear(condition.value.terms)).value
    if (condition.kind, c, constant) not in (("le", -1, 0), ("ne", 1, 1), ("ne", -1, -1)):
        return False
    return any(high.terms == frozenset({(a, w)}) and high.offset <= w for high in each.uppers for _, w in high.terms)
