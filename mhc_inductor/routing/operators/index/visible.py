# SPDX-License-Identifier: Apache-2.0
"""Which keys the masks of index scores leave visible: prefixes ``t < limit``, and boolean masks for everything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from mhc_inductor.routing.graph.expressions import Ref, _broadcast
from mhc_inductor.routing.graph.index import DynamicWidth, Unsupported, Var
from mhc_inductor.routing.graph.linear import Key, Linear, floor, number, of_size
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.additive import PossibleValues, spacing
from mhc_inductor.routing.masks.elements import NOT, constant_of, inner
from mhc_inductor.routing.masks.keys import All, AnyOf, Compare, Given, Literal, elements_of, eliminated, free
from mhc_inductor.routing.masks.layouts import layout
from mhc_inductor.routing.masks.masks import Masks
from mhc_inductor.routing.operators.index.formula import NEAR, Hidden

LOWEST = torch.finfo(torch.bfloat16).min
"""No score reaches this number: masks of bf16 models are added to scores in fp32."""

_LOST = 1e6  # an added fill must swallow, by rounding, all scores of up to this size


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that says which keys are visible: where a bool is ``want``, where a float (``added``) is 0.

    ``values``: all that a float mask holds.
    """

    ref: Ref
    want: bool
    added: bool
    values: frozenset[float] = frozenset()


@dataclasses.dataclass
class Visible:
    """The keys that are visible: ``t`` below every one of ``limits`` where all ``conditions`` and ``masks`` hold.

    ``fill``: the score of all others, None if it is rounded from a sum.
    """

    limits: list[Linear] = dataclasses.field(default_factory=list)
    conditions: list[Literal] = dataclasses.field(default_factory=list)
    masks: list[Mask] = dataclasses.field(default_factory=list)
    fill: float | None = -math.inf

    def data(self) -> list[Ref]:
        """Returns the elements of tensors that the limits are computed from."""
        return elements_of(*self.limits, *self.conditions)

    def words(self) -> str:
        """Returns a description for the report."""
        kinds = ["the first keys of each query"] if self.limits else []
        kinds += ["a mask"] if self.masks else []
        return " under ".join(kinds) if kinds else "all keys"


def visible(
    hidden: list[Hidden], t: Key, order: set[Var], fixed: Mapping[str, int], hints: Mapping[str, int]
) -> Visible:
    """Returns what the masks leave visible.

    Args:
        hidden: the steps that hide keys.
        t: the key.
        order: the variables of the batch and the queries.
        fixed: symbols that are taken as numbers.
        hints: present values of symbols.

    Raises:
        Mismatch: if a hidden key may be chosen before a visible one, or hidden keys differ among themselves.
    """
    values = [_values(one) for one in hidden]
    total = Visible(fill=_level(hidden, values))
    for one, numbers in zip(hidden, values, strict=True):
        if not _prefix(one, t, order, fixed, hints, total):
            total.masks.append(_read(one, numbers, {*order, t}))
    total.limits = [x for x in dict.fromkeys(total.limits) if x != of_size(t.size)]
    return total


def _values(one: Hidden) -> frozenset[float]:
    """Returns the numbers that an added mask may hold, the fill of another mask. Raises Mismatch for other numbers."""
    if not one.added:
        return frozenset({one.fill}) if one.fill is not None else frozenset()
    try:
        return PossibleValues()(one.mask.value)
    except Unsupported:
        raise Mismatch(NEAR["mask"].format("lowered by numbers that routing cannot see"), one.mask.value) from None


def _level(hidden: list[Hidden], values: list[frozenset[float]]) -> float | None:
    """Returns the score of all hidden keys, None if it is rounded from a sum. Raises Mismatch unless they have one that no visible key falls below."""
    fills: set[float] = set()
    for one, numbers in zip(hidden, values, strict=True):
        for fill in numbers - {0.0} if one.added else numbers:
            lowest = max(torch.finfo(one.dtype).min, LOWEST)
            differ = one.added and math.isfinite(fill) and spacing(fill, one.dtype) / 2 < _LOST
            if not fill <= lowest or differ:
                raise Mismatch(
                    NEAR["mask"].format(f"lowered by {-fill:g}" if one.added else f"set to {fill:g}"), one.at
                )
            fills.add(fill)
    finite = {f for f in fills if not math.isinf(f)}
    if finite and (len(fills) > 1 or (len(hidden) > 1 and any(one.added for one in hidden))):
        said = " and ".join(f"{f:g}" for f in sorted(fills))
        raise Mismatch(NEAR["mask"].format(f"on several levels, {said}"), hidden[0].at)
    return None if finite and hidden[0].added else next(iter(fills), -math.inf)


def _prefix(
    one: Hidden, t: Key, order: set[Var], fixed: Mapping[str, int], hints: Mapping[str, int], total: Visible
) -> bool:
    """Adds the limits of a mask that shows the first keys of each query to ``total``; returns whether it does."""
    masks = Masks(fixed, hints, by_key=True)
    try:
        keys = masks.additive(one.mask) if one.added else masks.truth(one.mask, one.want)
        found = _limits(keys, t, order)
    except (Unsupported, DynamicWidth, Mismatch):
        return False
    if found is None or masks.equal or masks.indices.values():
        return False
    total.limits += found[0]
    total.conditions += found[1]
    return True


def _limits(keys: AnyOf, t: Key, order: set[Var]) -> tuple[list[Linear], list[Literal]] | None:
    """Returns the limits and conditions of a mask in normal form, or None if it shows no prefix of the keys."""
    conj = eliminated(keys[0]) if len(keys) == 1 else None
    if conj is None or conj.bound:
        return None
    limits: list[Linear] = []
    conditions: list[Literal] = []
    for literal in conj.literals:
        wraps = isinstance(literal, Compare) and any(d.wrap is not None for d in literal.value.data())
        if wraps or any(ref.value.node is None for ref in elements_of(literal)):
            return None
        limit = _limit(literal, t)
        if free(All(frozenset({literal}))) <= order:
            conditions.append(literal)
        elif limit is not None and limit.variables() <= order:
            limits.append(limit)
        else:
            return None
    return limits, conditions


def _limit(literal: Literal, t: Key) -> Linear | None:
    """Returns the number of keys below which ``c * t + rest <= 0`` holds, None if it is another condition."""
    if isinstance(literal, Given) or literal.kind != "le":
        return None
    c, rest = literal.value.coefficient(t), literal.value.without(t)
    if c <= 0:
        return None
    return floor(rest.times(-1), c).plus(number(1))


# --- masks that the op reads ---------------------------------------------------------------------------------


def _read(one: Hidden, values: frozenset[float], order: set[Var]) -> Mask:
    """Returns the tensor from which the op reads a mask: the farthest one that is a plain array of its indices.

    Raises Mismatch if there is none.
    """
    at: Mask | None = Mask(one.mask, one.want, one.added, values)
    found: Mask | None = None
    while at is not None:
        if at.ref.value.node is not None and layout(at.ref, order, set()) is not None:
            found = at
        at = _below(at)
    if found is None:
        raise Mismatch("the mask of the scores cannot be followed through its views", one.mask.value)
    return found


def _below(mask: Mask) -> Mask | None:
    """Returns the mask that a view, a cast, a negation, or ``where(mask, 0, fill)`` shows; None for anything else."""
    ref, value = mask.ref, mask.ref.value
    try:
        below = inner(ref)
    except DynamicWidth:
        return None
    if below is not None:
        return dataclasses.replace(mask, ref=below)
    if not mask.added:
        negates = value.func in NOT and value.args[0].dtype is torch.bool
        return Mask(Ref(value.args[0], ref.index), not mask.want, False) if negates else None
    if value.func is torch.ops.aten.where.self:
        cond, *sides = value.args
        shown = [constant_of(x) == 0.0 for x in sides]
        if sum(shown) == 1 and all(constant_of(x) is not None for x in sides) and cond.dtype is torch.bool:
            return Mask(_broadcast(cond, ref), shown[0], False)
    return None
