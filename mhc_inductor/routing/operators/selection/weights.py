# SPDX-License-Identifier: Apache-2.0
"""Follows the weights of a softmax to their product with V."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import fx

from mhc_inductor.routing.graph.expressions import Ref, _broadcast, aten, peel, step, whole
from mhc_inductor.routing.graph.index import ONE, Index, Var
from mhc_inductor.routing.graph.linear import placed
from mhc_inductor.routing.graph.values import Value, behind, inner, name_of
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.masks.elements import ALL, ANY, CASTS, MULTIPLY, NOT, behind_ops, constant_of, filling, uncast
from mhc_inductor.routing.masks.operands import DIVIDE, dot, keeps_16_bits

_CHANGED = "the attention weights are changed before their product with V; expected softmax(scores) @ V"
REACH = 16
"""Limit on the nodes examined around a softmax."""


@dataclasses.dataclass(frozen=True)
class Guarded:
    """``of``, with 0 where ``mask`` is not ``want``.

    ``no_nan``: the result has no NaN where ``mask`` hides ``of``, or nowhere if there is no mask.
    """

    of: Value
    mask: Value | None = None
    want: bool = True
    no_nan: bool = False


def guarded(value: Value, known: Container[Value]) -> Guarded | None:
    """Returns which of the values ``known`` equals ``value`` except where masked or NaN, or None."""
    func, args = value.func, value.args
    if func is aten.nan_to_num.default and args[0] in known and (len(args) < 2 or args[1] in (None, 0, 0.0)):
        return Guarded(args[0], no_nan=True)
    if (filled := filling(value)) is not None:
        mask, want, of, fill = filled
        if of in known and constant_of(fill) == 0.0:
            rows = not want and _hidden_rows(mask, of)
            return Guarded(of, no_nan=True) if rows else Guarded(of, mask, want, no_nan=True)
    masks = (Guarded(a, b) for a, b in multiplied(value) if a in known and uncast(whole(b)).value.dtype is torch.bool)
    return next(masks, None)


def multiplied(value: Value) -> list[tuple[Value, Value]]:
    """Returns the two tensors that are multiplied, in both orders; none where one is a number, which has no hash."""
    a, b = value.args[:2] if value.func in MULTIPLY else (None, None)
    return [(a, b), (b, a)] if isinstance(a, Value) and isinstance(b, Value) else []


def _hidden_rows(mask: Any, softmax: Value) -> bool:
    """Checks whether a mask is true in the rows whose scores are all -inf: a decomposed safe softmax gives 0 there."""
    inner = mask.args[0] if isinstance(mask, Value) and mask.func in NOT else mask
    reduced = ANY if inner is not mask else ALL
    if not isinstance(inner, Value) or inner.func not in reduced or softmax.func is not aten._softmax.default:
        return False
    at, same = inner.args[0], over(inner, inner.args[0], *reduced) == softmax.args[1] % len(softmax.shape)
    if inner is not mask:
        at = at.args[0] if isinstance(at, Value) and at.func in NOT else None
    same = same and isinstance(at, Value) and at.func is aten.eq.Scalar and constant_of(at.args[1]) == -math.inf
    return same and behind_ops(at.args[0], CASTS) is behind_ops(softmax.args[0], CASTS)


def over(value: Any, of: Value, *funcs: Any, through: Any = ()) -> int | None:
    """Returns the dim of ``of`` that ``value``, broadcast to it, is reduced over; None if it is something else.

    ``through``: calls that may stand in between. A softmax does not depend on the maximum, so only that may be detached.
    """
    value = behind_ops(value, through)
    if not isinstance(value, Value) or len(value.shape) != len(of.shape):
        return None
    gone = [d for d, (a, b) in enumerate(zip(value.shape, of.shape, strict=True)) if a != b]
    if len(gone) != 1 or value.shape[gone[0]] != ONE:
        return None
    if value.func is aten.unsqueeze.default and value.args[1] % len(of.shape) == gone[0]:
        value = value.args[0]
    if not isinstance(value, Value) or value.func not in funcs or value.out or value.kwargs or len(value.args) < 2:
        return None
    dims = [value.args[1]] if isinstance(value.args[1], int) else [*value.args[1]]
    return gone[0] if behind_ops(value.args[0], through) is of and [d % len(of.shape) for d in dims] == gone else None


def shows(value: Value, known: Container[Value]) -> bool:
    """Checks whether ``value`` is a view or cast of one of the values ``known``."""
    return step(whole(value)) is not None and value.args[0] in known


class Call(NamedTuple):
    """A call of scaled_dot_product_attention: its result, what PyTorch runs for it, its mask, and its dropout if any."""

    out: Value
    kernel: Value
    mask: Value | None
    dropped: Value | None


class Written(NamedTuple):
    """The weights of a softmax, their node, and the softmax: these or, with a sink, of which they are a part.

    ``after``: their product with V before and after it is divided by their sum. ``bare``: the softmax is written out, with
    a sink that the maximum does not count, so that rows of -inf are NaN all the same. ``call``: the call that it is inside of.
    """

    weights: Value
    node: fx.Node
    softmax: Value
    after: tuple[Value, Value] | None = None
    bare: bool = False
    call: Call | None = None


class Weights:
    """The values that a softmax becomes.

    ``same``: the values that equal the softmax except in rows without keys. ``known``: how each of them is guarded.
    ``outs``: their products with V; of ``after``, the second in place of the first, which the graph divides by their sum.
    ``dropped``: the value after a dropout, None without one. ``bare``, ``call``: as in :class:`Written`. ``renormalised``: the weights
    divided by their own sum or norm, None if they are not.
    """

    def __init__(self, view: View, written: Written) -> None:
        self.view = view
        self.softmax, self.bare, self.call = written.softmax, written.bare, written.call
        self.known: dict[Value, Guarded] = {}
        self.same: dict[Value, None] = dict.fromkeys((written.softmax, written.weights))
        self.outs: list[Value] = []
        self.dropped: Value | None = None
        self.renormalised: Value | None = None
        self._scaled: dict[Value, Value] = {}
        """Weights multiplied by a tensor, and that: a sum of products with V, or weights masked by numbers."""
        self._after = written.after
        if self.call is None:
            view.descendants([written.node], self._passes, REACH)
        else:
            self.outs, self.dropped = [self.call.out], self.call.dropped
        self._sums = set[Value]()
        self.added: dict[Value, None] = {}
        """Products with V that the graph adds up: their sum stands for them in :attr:`outs`."""
        while len(self.outs) > 1 and (total := next(filter(None, map(self._sum, self.outs)), None)) is not None:
            self.added.update(dict.fromkeys(total.args))
            self._sums.add(total)
            self.outs = [total, *(out for out in self.outs if out not in total.args)]

    def logs(self, scores: Value) -> list[Value]:
        """Returns the logarithms that the graph takes of the sum over the keys of exponentials of ``scores``."""
        users = () if scores.node is None else scores.node.users
        found = [v for user in users if user in self.view.live and (v := self.view.value(user)) is not None]
        dim, rank = self.softmax.args[1], len(scores.shape)
        return [v for v in found if v.func is aten.logsumexp.default and [d % rank for d in v.args[1]] == [dim % rank]]

    def _sum(self, out: Value) -> Value | None:
        """Returns the sum of a product with V and another one, None if there is none."""
        users = () if out.node is None else map(self.view.value, out.node.users)
        sums = (v for v in users if v is not None and v.func is aten.add.Tensor and not v.kwargs and len(v.args) == 2)
        return next((v for v in sums if v.args[0] is not v.args[1] and all(a in self.outs for a in v.args)), None)

    def parts(self, out: Ref) -> list[Ref]:
        """Returns the elements of the products with V that an element of their sum is the sum of."""
        if out.value not in self._sums:
            return [out]
        return [part for a in out.value.args for part in self.parts(_broadcast(a, out))]

    @property
    def guards(self) -> list[Value]:
        """Returns the tensors that weights are masked with or multiplied by."""
        masks = [known.mask for known in self.known.values() if known.mask is not None]
        return [*masks, *(by for of, by in self._scaled.items() if by.shape[-1:] == of.shape[-1:])]

    @property
    def why(self) -> tuple[str, Value | None]:
        """Returns what is not as expected of the way to V, and the value where that is."""
        if len(self.outs) == 1:
            return _CHANGED, None
        count = f"{len(self.outs)} products with V" if self.outs else "no products with V that routing can follow"
        return f"the attention weights go into {count}; expected one", self.softmax

    @property
    def over_keys(self) -> bool:
        """Checks that no product with V sums over another dim than the softmax."""
        for out in (part for total in self.outs for part in self.parts(whole(total))):
            *sides, bound = dot(peel(out))  # type: ignore[misc]
            traced = next((t for t in map(self.traced, sides) if t is not None), None)
            dim = self.softmax.args[1]
            keys = {v for v in bound if v.size != ONE}
            if traced is not None and keys and not traced.ref.index[dim].variables() & keys:
                return False
        return True

    def _passes(self, user: fx.Node) -> bool:
        """Records what ``user`` makes of the weights. Returns whether its users are to be followed."""
        reached = self.view.value(user)
        if reached is None:
            return isinstance(self.view.values.of(user), tuple)  # a split, whose parts are its users
        guard = guarded(reached, self.same)
        if guard is None and name_of(user).startswith("dropout"):
            source = self._dropout(reached, user)
            if source is not None and source in self.same:
                guard, self.dropped = Guarded(source), reached
        if guard is not None:
            self.known[reached] = guard
        if guard is not None or shows(reached, self.same):
            self.same[reached] = None
            return True
        if dot(peel(whole(reached))) is not None:
            before, divided = self._after or (None, None)
            self.outs.append(divided if reached is before and divided is not None else reached)
            return False
        factor = next((b for a, b in multiplied(reached) if a in self.same), None)
        if factor is None and shows(reached, self._scaled):
            factor = self._scaled[reached.args[0]]
        if factor is not None:
            self._scaled[reached] = factor
            return True
        if any(map(self._is_divided, inner(reached))):
            self.renormalised = reached
        return False

    def _is_divided(self, value: Value) -> bool:
        """Checks whether weights are divided by something that is computed from weights."""
        if value.func not in DIVIDE:
            return False
        known, (of, by) = {*self.same, *self._scaled}, value.args[:2]
        return of in known and isinstance(by, Value) and not known.isdisjoint(behind(by))

    def _dropout(self, value: Value, node: fx.Node) -> Value | None:
        """Returns the first argument of a dropout, None for one that changes nothing."""
        given = node.args[0] if node.args else None
        return self.view.value(given) if isinstance(given, fx.Node) and step(whole(value)) is None else None

    def traced(self, ref: Ref) -> Traced | None:
        """Returns the element of the softmax that ``ref`` is, with the masks on the way; None if it is not one."""
        guards: list[tuple[Ref, bool]] = []
        no_nan = False
        while ref.value is not self.softmax:
            guard = self.known.get(ref.value)
            if guard is not None:
                if guard.mask is not None:
                    guards.append((_broadcast(guard.mask, ref), guard.want))
                no_nan = no_nan or guard.no_nan
                ref = _broadcast(guard.of, ref)
            elif (below := step(ref)) is not None and keeps_16_bits(ref, below):
                ref = below
            else:
                return None
        return Traced(ref, guards, no_nan)


@dataclasses.dataclass
class Traced:
    """An element of a softmax, the masks put on it later, and whether NaN became 0."""

    ref: Ref
    guards: list[tuple[Ref, bool]]
    no_nan: bool

    def at(self, old: Var, new: Index) -> Traced:
        """Returns the element with another index in place of ``old``."""
        guards = [(placed(ref, old, new), want) for ref, want in self.guards]
        return Traced(placed(self.ref, old, new), guards, self.no_nan)
