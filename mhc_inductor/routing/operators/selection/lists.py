# SPDX-License-Identifier: Apache-2.0
"""Emits the keys that every query sees, as lists [B, S, G, k] of single keys."""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from mhc_inductor.routing.graph.index import ONE, Size, Unsupported, Var
from mhc_inductor.routing.graph.linear import Linear, of_size
from mhc_inductor.routing.operators.selection.entries import Entries
from mhc_inductor.routing.operators.selection.layouts import Layouts
from mhc_inductor.routing.operators.selection.matches import Found
from mhc_inductor.routing.operators.selection.ranges import Numbers


def lists(layouts: Layouts, one: Found, device: torch.device) -> fx.Node:
    """Returns the node of the entries of all intervals of an attention, -1 for an entry that is not visible."""
    assert one.entries is not None
    parts = [_part(layouts, one, each, device) for each in one.entries]
    if not parts:
        raise Unsupported
    return parts[0] if len(parts) == 1 else layouts.edit.emit(torch.cat, parts, -1)


def _part(layouts: Layouts, one: Found, each: Entries, device: torch.device) -> fx.Node:
    """Emits the entries of one interval: its candidates, with -1 in place of those that are not visible."""
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
    node = emit("expand", node, *[layouts.size(v.size) for v in order])
    return layouts.joined(node, lead)


def _width(layouts: Layouts, each: Entries, device: torch.device) -> Size:
    """Returns the number of candidates as a size. A sum of sizes gets a symbol of its own."""
    width = each.width
    if not width.constant:
        return ONE
    if len(width.constant) == 1:
        ((symbols, c),) = width.constant
        return Size(c, symbols)
    made = Size(1, (f"width of {width.constant}",))
    layouts.give(made, Numbers(layouts, [], device).size_of(width))
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
