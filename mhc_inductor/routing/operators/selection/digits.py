# SPDX-License-Identifier: Apache-2.0
"""Splits the dims of a result into digits: index variables that views split and join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mhc_inductor.routing.graph.index import ONE, Index, Part, Size, Unsupported, Var, linear, product_of, var


class Cut(Exception):
    """Raised where digits must be split further.

    ``places``: pairs of (digits, size of the lower part).
    """

    def __init__(self, places: list[tuple[list[Var], Size]]) -> None:
        super().__init__("split")
        self.places = places


def joined(digits: Sequence[Var]) -> Index:
    """Returns the index whose digits these are, the most significant first."""
    return linear([var(v) for v in digits], [v.size for v in digits])


def digits_of(size: Size, cuts: list[Size]) -> list[Var]:
    """Returns the variables of a dim that is split at ``cuts``, the most significant first.

    Each cut is the product of the sizes of the digits below it. Raises Unsupported if a cut does not divide the next
    one.
    """
    digits, below = [], ONE
    for cut in [*cuts, size]:
        each = cut.over(below)
        if each is None:
            raise Unsupported
        if each != ONE or not cuts:
            digits.append(Var(each))
        below = cut
    return digits[::-1]


def cut_at(cuts: list[list[Size]], dims: list[list[Var]], places: list[tuple[list[Var], Size]]) -> bool:
    """Adds ``places`` to the cuts of the dims that have these digits. Returns whether any cut is new."""
    changed = False
    for digits, by in places:
        for d, own in enumerate(dims):
            if digits[-1] not in own:
                continue
            below = product_of(v.size for v in own[own.index(digits[-1]) + 1 :])
            cut = below.times(by)
            if cut not in cuts[d]:
                cuts[d].append(cut)
                cuts[d].sort(key=lambda s: (len(s.symbols), s.factor))
                changed = True
    return changed


def splits(part: Any) -> list[tuple[Var, Size]]:
    """Returns, for each split on the way to a part of a variable, (variable, size of the lower part)."""
    path = []
    while isinstance(part, Part):
        path.append(part)
        part = part.of
    found, low = [], ONE
    for p in reversed(path):
        found.append((part, low.times(p.by)))
        if not p.mod:
            low = low.times(p.by)
    return found
