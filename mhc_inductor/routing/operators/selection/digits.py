# SPDX-License-Identifier: Apache-2.0
"""Splits the dims of an attention's result into digits, index variables that views split and join, and assigns their roles.

The role of a digit is batch, group, head, query or feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mhc_inductor.routing.graph.index import ONE, Index, Part, Size, Unsupported, Var, linear, product_of, var
from mhc_inductor.routing.graph.linear import of_index, variables_of
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.keys import eliminated, settled
from mhc_inductor.routing.masks.operands import sources
from mhc_inductor.routing.operators.selection.intervals import Interval, Judge, entries
from mhc_inductor.routing.operators.selection.matches import Found, NotOurs
from mhc_inductor.routing.operators.selection.scores import OTHER_LOGITS


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


# --- roles ---


def assign_roles(found: Found, sizes: Mapping[str, int]) -> None:
    """Sets the roles of the digits and the intervals of keys, by present ``sizes``. Raises NotOurs, Mismatch and Unsupported."""
    found.keys = [e for conj in found.keys if (e := eliminated(conj)) is not None]
    by_key = found.masks.by_key
    if by_key:
        inside = found.masks.wholes.positions.inside
        found.keys = [e for conj in found.keys if (e := settled(inside(conj))) is not None]
    elif not any(x.data() for conj in found.keys for x in conj.comparisons()):
        raise NotOurs
    *sides, in_v = map(variables_of, found.deepest())
    asked, in_k = (set[Var]().union(*each) for each in (sides[::2], sides[1::2]))
    held = in_k | in_v
    ours = [v for digits in found.dims for v in digits if v.size != ONE]
    shared = [v for v in ours if v in held and v in asked]
    found.feature = _features([v for v in ours if v not in shared], in_k, in_v, asked)
    found.batch, found.groups = (shared[:1], shared[1:]) if len(shared) > 1 else ([], shared)
    _queries(found, {v for v in asked if v not in held}, set(shared))
    judge = Judge(found.masks, found.t)
    found.intervals = judge.intervals(found.keys)
    _check_sink(found)
    if not by_key:
        position, queries = of_index(joined(found.query)), product_of(v.size for v in found.query)
        judge.check(found.intervals, position, queries, found.t.size)
    if by_key or all(_single(each) for each in found.intervals if each.selects):
        found.entries = entries(found.intervals, found.t, sizes)
    if by_key and found.entries is None:
        raise Unsupported


def _single(each: Interval) -> bool:
    """Checks whether an interval that is read from tensors has one key for each value of its bound variables."""
    return any(high.minus(low).value == 1 for low, high in each.pairs())


def _check_sink(found: Found) -> None:
    """Raises Mismatch unless the sink, if there is one, is a number for each head."""
    if found.sink is None:
        return
    *_, source = sources(found.sink)
    if not variables_of(source.ref) <= {*found.groups, *found.heads}:
        raise Mismatch(OTHER_LOGITS, found.sink.value)


def _features(rest: list[Var], in_k: set[Var], in_v: set[Var], asked: set[Var]) -> list[Var]:
    """Returns the digit that only V depends on, in a list. Raises NotOurs for any other combination."""
    features = [v for v in rest if v not in asked]
    if len(features) > 1 or any(v in in_k or v not in in_v for v in features):
        raise NotOurs
    return features


def _queries(found: Found, asked: set[Var], shared: set[Var]) -> None:
    """Splits the digits that only q has into queries, which see different keys, and heads, which share them.

    Raises Mismatch if the mask differs between the heads of a group.
    """
    masked = found.masked
    rows: list[list[Var]] = []
    for digits in found.dims:
        own = [v for v in digits if v in asked]
        # Sequences that are flattened with their queries give a row too: heads of a group have its list.
        if any(v in shared for v in digits) and not (found.gathered and masked & {*own}):
            found.heads += own
        elif own:
            rows.append(own)
    depends = [row for row in rows if any(v in masked for v in row)]
    if any(v in masked for v in found.heads) or len(depends) > 1:
        raise Mismatch("the mask differs between the heads of a group", found.dense[-1])
    one_query = any(len(digits) == 1 and digits[0].size == ONE for digits in found.dims[:-1])
    if not depends and rows and not one_query:
        depends = [max(rows, key=_large)]
    found.query = depends[0] if depends else []
    found.heads += [v for row in rows if row not in depends for v in row]


def _large(digits: list[Var]) -> tuple[bool, int]:
    size = product_of(v.size for v in digits)
    return bool(size.symbols), size.factor
