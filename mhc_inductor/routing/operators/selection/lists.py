# SPDX-License-Identifier: Apache-2.0
"""Emits the keys that every query sees, as ranges [B, S, G, r, 2], as lists [B, S, G, k] of single keys or as a mask."""

from __future__ import annotations

import functools
import math
import operator

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref
from mhc_inductor.routing.graph.index import ONE, Index, Size, Unsupported, Var, var
from mhc_inductor.routing.graph.linear import Datum, Linear, of_size, placed, size_of_sum, variables_of
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.masks.keys import Compare, Literal
from mhc_inductor.routing.masks.layouts import Layouts, layout
from mhc_inductor.routing.masks.numbers import Numbers
from mhc_inductor.routing.operators.selection.data_masks import Layer
from mhc_inductor.routing.operators.selection.intervals import Entries, Interval
from mhc_inductor.routing.operators.selection.matches import Found


def ranges(layouts: Layouts, one: Found, device: torch.device) -> fx.Node:
    """Returns the node of the ranges of all intervals of an attention."""
    return layouts.cat([_ranges_of(layouts, one, each, device) for each in one.intervals], -2)


def _ranges_of(layouts: Layouts, one: Found, each: Interval, device: torch.device) -> fx.Node:
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
    starts = [x for x in each.lowers if x.value is None or x.value > 0]
    low = numbers.extreme(starts or [Linear()], torch.maximum)
    ends = [x for x in each.uppers if x != of_size(one.t.size)]
    high = numbers.extreme(ends or [of_size(one.t.size)], torch.minimum)
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


def lists(layouts: Layouts, one: Found, device: torch.device, wide: torch.dtype) -> tuple[fx.Node, fx.Node | None]:
    """Returns the entries of all intervals of an attention, -1 for one that is not visible, and the bias of each entry.

    The bias is None where no mask has to be read at the entries; else it is ``wide``.
    """
    assert one.entries is not None
    parts = [_entries_of(layouts, one, each, device, wide) for each in one.entries]
    if not parts:
        raise Unsupported
    keys, biases = zip(*parts, strict=True)
    return layouts.cat(keys, -1), None if biases[0] is None else layouts.cat(biases, -1)


def _entries_of(
    layouts: Layouts, one: Found, each: Entries, device: torch.device, wide: torch.dtype
) -> tuple[fx.Node, fx.Node | None]:
    """Emits the entries of one interval: its candidates, with -1 in place of those that are not visible, and a bias."""
    emit = layouts.edit.emit
    step = Var(_width(layouts, each, device))
    lead = [one.batch, one.query, one.groups, [*each.interval.bound, step]]
    order = [v for digits in lead for v in digits if v.size != ONE]
    numbers = Numbers(layouts, order, device)
    key = numbers.of(each.low)
    if step.size != ONE:
        key = emit(operator.add, key, numbers.of(Linear(frozenset({(step, 1)}))))
    numbers.at[one.t] = key
    node = emit("to", key, torch.int32)
    holds = _conditions(numbers, one, each, key)
    if holds:
        visible = functools.reduce(lambda a, b: emit(operator.and_, a, b), holds)
        node = emit(torch.where, visible, node, -1)
    sizes = [layouts.size(v.size) for v in order]
    keys = layouts.joined(emit("expand", node, *sizes), lead)
    bias = _bias(numbers, one, step, wide)
    return keys, None if bias is None else layouts.joined(emit("expand", bias, *sizes), lead)


def _bias(numbers: Numbers, one: Found, step: Var, wide: torch.dtype) -> fx.Node | None:
    """Returns the sum of the masks that are read as data at the entries, None without such a mask.

    ``step`` is the place in an interval, and so in a gathered block.
    """
    emit, masks = numbers.emit, [x for x in one.layers if not x.exact]
    if not masks and not one.gathered:
        return None
    total = emit(torch.zeros, [1] * len(numbers.order), dtype=wide, device=numbers.device)
    for mask in masks:
        part = _inside(numbers, mask, mask.ref if one.inner is None else placed(mask.ref, one.inner, var(step)))
        if mask.shows is not None:
            part = emit(torch.where, emit(operator.eq, part, mask.shows), 0.0, -math.inf)
        part = emit("to", part, wide)
        total = emit(operator.add, total, part if mask.factor == 1.0 else emit(operator.mul, part, mask.factor))
    return total


def _inside(numbers: Numbers, mask: Layer, ref: Ref) -> fx.Node:
    """Returns a mask's element ``ref``; at keys of other segments what hides nothing there."""
    part = numbers.element(ref)
    if not mask.span:
        return part
    own = functools.reduce(lambda a, b: numbers.emit(operator.and_, a, b), map(numbers.holds, mask.span))
    return numbers.emit(torch.where, own, part, 0.0 if mask.shows is None else mask.shows)


def _width(layouts: Layouts, each: Entries, device: torch.device) -> Size:
    """Returns the number of candidates as a size. A sum of sizes is computed where the keys are."""
    made = size_of_sum(each.width)
    if len(each.width.constant) > 1:
        layouts.give(made, Numbers(layouts, [], device).size_of(each.width))
    return made


def _conditions(numbers: Numbers, one: Found, each: Entries, key: fx.Node) -> list[fx.Node]:
    """Returns the nodes of all that must hold for a candidate, apart from what its construction implies.

    The op ignores entries below 0 or past the last key.
    """
    emit, interval = numbers.emit, each.interval
    lows = [x for x in dict.fromkeys(interval.lowers) if x not in (each.low, Linear())]
    highs = [x for x in dict.fromkeys(interval.uppers) if x not in (each.high, of_size(one.t.size))]
    return [
        *(emit(operator.ge, key, numbers.of(x)) for x in lows),
        *(emit(operator.lt, key, numbers.of(x)) for x in highs),
        *(numbers.holds(x) for x in (*interval.conditions, *interval.keyed)),
    ]


def mask(layouts: Layouts, one: Found, device: torch.device, wide: torch.dtype) -> fx.Node:
    """Returns the masks on the scores as one [B or 1, S, G or 1, T]: bool if all hide keys; else a sum, ``wide`` if of several."""
    emit = layouts.edit.emit
    laid = [(_laid(layouts, one, x, device), x.shows) for x in one.layers]
    seen = [node if want else emit(torch.logical_not, node) for node, want in laid if want is not None]
    visible = functools.reduce(lambda a, b: emit(operator.and_, a, b), seen) if seen else None
    added = [node for node, want in laid if want is None]
    if not added:
        assert visible is not None
        return visible
    if len(added) > 1 or not example(added[0]).dtype.is_floating_point:
        added = [layouts.edit.to(node, wide) for node in added]
    total = functools.reduce(lambda a, b: emit(operator.add, a, b), added)
    return total if visible is None else emit(torch.where, visible, total, -math.inf)


def _laid(layouts: Layouts, one: Found, mask: Layer, device: torch.device) -> fx.Node:
    """Returns a mask [B, S, G, T], of size 1 where it does not depend on the batch or the group."""
    same = variables_of(mask.ref).isdisjoint
    groups: list[list[Var]] = [one.batch, one.query, one.groups, [one.t]]
    groups[::2] = ([] if same(digits) else digits for digits in groups[::2])
    order = [v for digits in groups for v in digits if v.size != ONE]
    node = _inside(Numbers(layouts, order, device), mask, mask.ref)
    return layouts.joined(layouts.edit.emit("expand", node, *(layouts.size(v.size) for v in order)), groups)
