# SPDX-License-Identifier: Apache-2.0
"""Intervals of keys as lists of single keys, for the op that reads lists.

An interval whose length has a bound gives that many candidates from its start on. Whether a candidate is visible is
decided by the interval's other bounds and conditions, evaluated at the candidate: these may read tensors at the key.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from mhc_inductor.routing.graph.index import Size, present_size, product_of
from mhc_inductor.routing.graph.linear import Key, Linear, number, of_size
from mhc_inductor.routing.operators.selection.intervals import Interval

MOST = 4096
"""The longest list that the op takes."""


@dataclasses.dataclass(frozen=True)
class Entries:
    """Candidates ``low + 0``, ..., ``low + width - 1`` for every value of the interval's bound variables.

    ``width`` is a number, or a sum of sizes.
    """

    interval: Interval
    low: Linear
    high: Linear
    width: Linear

    def count(self, hints: Mapping[str, int]) -> int:
        """Returns the present number of candidates a query."""
        return present(self.width, hints) * present_size(product_of(v.size for v in self.interval.bound), hints)


def entries(intervals: Sequence[Interval], t: Key, hints: Mapping[str, int]) -> list[Entries] | None:
    """Returns the candidates of all intervals, None if the length of one has no bound."""
    found = []
    for each in intervals:
        one = _shortest(each, t, hints)
        if one is None:
            return None
        if present(one.width, hints) > 0:
            found.append(one)
    return found


def _shortest(each: Interval, t: Key, hints: Mapping[str, int]) -> Entries | None:
    """Returns the candidates between the start and the end of an interval that are least far apart."""
    pairs = itertools.product([*each.lowers, number(0)], [*each.uppers, of_size(t.size)])
    spans = [Entries(each, low, high, high.minus(low)) for low, high in pairs]
    known = [one for one in spans if not one.width.terms]
    return min(known, key=lambda one: present(one.width, hints), default=None)


def present(width: Linear, hints: Mapping[str, int]) -> int:
    """Returns the present value of a sum of sizes."""
    return sum(present_size(Size(c, symbols), hints) for symbols, c in width.constant)
