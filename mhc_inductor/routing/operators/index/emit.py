# SPDX-License-Identifier: Apache-2.0
"""Emits the op in place of an indexer that was found, and what stands in for keys that it does not choose."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.index import ONE, Var
from mhc_inductor.routing.graph.linear import of_size, variables_of
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.masks.layouts import Layouts
from mhc_inductor.routing.masks.numbers import Numbers
from mhc_inductor.routing.masks.operands import Source
from mhc_inductor.routing.operators.index.matches import Found
from mhc_inductor.routing.operators.index.visible import Mask


def emit_choice(edit: Edit, one: Found) -> list[tuple[Value, fx.Node]]:
    """Emits ``index_topk`` for one choice, or ``index_scores`` and ``topk``; for scores, ``index_scores``.

    Returns its outputs with the new nodes. Raises Mismatch and Unsupported.
    """
    return _Emission(edit, one).pairs()


class _Emission:
    """Emits one op."""

    def __init__(self, edit: Edit, one: Found) -> None:
        self.edit, self.emit, self.one = edit, edit.emit, one
        self.layouts = Layouts(edit, one.refs)
        self.device = example(node_of(one.outs[0])).device
        self.rows = [v for v in (*one.batch, *one.query) if v.size != ONE]

    def pairs(self) -> list[tuple[Value, fx.Node]]:
        """Emits the op and returns each output with its node."""
        one = self.one
        q, k, w, scale = self._operands()
        if not one.chooses:
            scores = self.emit(torch.ops.mhc_inductor.index_scores.default, q, k, w, scale, None, None, None, None)
            new = self.layouts.back(scores, [one.batch, one.query, [one.formula.t]], [[v] for v in one.dims])
            return [(one.scores, self.edit.as_like(new, one.scores, q))]
        limit, mask = self._limit(), self._mask()
        if mask is not None and limit is None:
            limit = self._last(mask)
        count = self._count()
        given = q, k, w, scale, limit, mask
        made = {1: self._by_score(*given, count)} if one.ranked else self._by_position(*given, count)
        *lead, last = ([v] if v.size != ONE else [] for v in one.dims)
        back = {out: self.layouts.back(n, [one.batch, one.query, last], [*lead, last]) for out, n in made.items()}
        return [(value, self.edit.as_like(back[value.out], value, q)) for value in one.outs]

    def _by_score(self, *given: Any) -> fx.Node:
        """Returns the best keys first. Where fewer are visible, ``topk`` takes hidden ones, as the model's does."""
        *scored, count = given
        scores = self.emit(torch.ops.mhc_inductor.index_scores.default, *scored, None, None)
        return self.emit(operator.getitem, self.emit(torch.topk, scores, count, -1), 1)

    def _by_position(
        self, q: fx.Node, k: fx.Node, w: fx.Node, scale: float, limit: Any, mask: Any, count: Any
    ) -> dict[int, fx.Node]:
        """Returns the chosen keys as result 1 of ``topk``, and as result 0 their scores if these are used."""
        emit, one, ops = self.emit, self.one, torch.ops.mhc_inductor
        op = (ops.index_topk_scores if one.marked else ops.index_topk).default
        chosen = emit(op, q, k, w, count, scale, limit, mask, None, None)
        made: dict[int, fx.Node] = {}
        if one.marked:
            chosen, scores = (emit(operator.getitem, chosen, at) for at in range(2))
            if one.visible.fill != -math.inf:
                scores = emit(torch.where, emit(operator.lt, chosen, 0), one.visible.fill, scores)
            made[0] = scores
        if mask is not None:
            chosen = self._filled(chosen, mask, limit, count)
        elif limit is not None:
            places = emit(torch.arange, count, dtype=torch.int32, device=self.device)
            chosen = emit(torch.where, emit(operator.lt, chosen, 0), places, chosen)
        return made | {1: chosen}

    def _count(self) -> Any:
        """Returns k of ``topk`` as a number, or as a node that holds it. Raises Mismatch if only the scores tell it."""
        size = self.one.outs[0].shape[-1]
        if not size.symbols:
            return size.factor
        given = self.one.count
        if not isinstance(given, fx.Node):
            return self.layouts.size(size)
        return self._copied(given, {v.node for v in self.one.formula.met})

    def _copied(self, node: fx.Node, scores: set[fx.Node | None]) -> fx.Node:
        """Returns a copy of the calls that compute a size: the originals go with the formula that they belong to."""
        if node in scores:
            raise Mismatch("the number of chosen keys is computed from the scores", self.one.outs[0])
        if not isinstance(example(node), torch.SymInt) or not node.op.startswith("call_"):
            return self.edit.current(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: self._copied(a, scores))
        return self.edit.create(node.op, node.target, args, kwargs)

    # --- q, k and w ---

    def _operands(self) -> tuple[fx.Node, fx.Node, fx.Node, float]:
        """Returns q [B, S, H, D], k [B, T, D], w [B, S, H] and the scale inside the relu."""
        one, formula = self.one, self.one.formula
        heads = [v for v in formula.heads if v.size != ONE]
        lead = [one.batch, one.query]
        dtype = torch.promote_types(one.q.dtype, one.k.dtype)
        q = self._placed(one.q, [*lead, heads, formula.feature], dtype)
        k = self._placed(one.k, [one.batch, [formula.t], formula.feature], dtype)
        if formula.scale < 0.0:
            q = self.emit(operator.neg, q)
        scale = abs(formula.scale * formula.factor)
        w = self._weights([*lead, heads], -1.0 if formula.factor < 0.0 else 1.0, dtype)
        return q, k, w, scale

    def _placed(self, source: Source, groups: list[list[Var]], dtype: torch.dtype) -> fx.Node:
        node = self._cut(self.layouts.placed(source.ref, groups))
        return self.edit.to(self.edit.to(node, source.dtype), dtype)

    def _cut(self, node: fx.Node) -> fx.Node:
        """Returns ``node``, without gradients if they end in a choice, which has none."""
        if not self.one.chooses:
            return node
        place = self.edit.place
        needs = place is not None and place.modes.grad and self.edit.needs_grad(node)
        return self.emit("detach", node) if needs else node

    def _weights(self, groups: list[list[Var]], sign: float, dtype: torch.dtype) -> fx.Node:
        """Returns w: the product of its factors, in fp32 where there are several."""
        wide = torch.promote_types(dtype, torch.float32)
        nodes = [self._placed(s, groups, s.dtype) for s in self.one.weights]
        if not nodes:
            sizes = [self._size(group) for group in groups]
            return self.emit(torch.full, sizes, sign, dtype=wide, device=self.device)
        if len(nodes) > 1:
            nodes = [
                functools.reduce(lambda a, b: self.emit(operator.mul, a, b), [self.edit.to(n, wide) for n in nodes])
            ]
        return nodes[0] if sign > 0.0 else self.emit(operator.neg, nodes[0])

    def _size(self, group: list[Var]) -> Any:
        sizes = [self.layouts.size(v.size) for v in group if v.size != ONE]
        return functools.reduce(self._times, sizes, 1)

    def _times(self, a: Any, b: Any) -> Any:
        return a * b if isinstance(a, int) and isinstance(b, int) else self.emit(operator.mul, a, b)

    # --- visible keys ---

    def _limit(self) -> fx.Node | None:
        """Returns how many of the first keys each query sees, [B, S]; None without such a limit."""
        seen = self.one.visible
        if not seen.limits and not seen.conditions:
            return None
        numbers = Numbers(self.layouts, self.rows, self.device)
        limit = numbers.extreme(seen.limits or [of_size(self.one.formula.t.size)], torch.minimum)
        for condition in seen.conditions:
            limit = self.emit(torch.where, numbers.holds(condition), limit, 0)
        return self._spread(limit)

    def _spread(self, node: fx.Node) -> fx.Node:
        """Returns a tensor with a dim for each digit of the rows, some of size 1, as [B, S]."""
        if self.rows:
            node = self.emit("expand", node, *[self.layouts.size(v.size) for v in self.rows])
        return self.layouts.joined(node, [self.one.batch, self.one.query])

    def _mask(self) -> fx.Node | None:
        """Returns which keys are visible as a bool tensor that broadcasts to [B, S, T]; None without masks."""
        masks = [self._read(mask) for mask in self.one.visible.masks]
        return functools.reduce(lambda a, b: self.emit(torch.logical_and, a, b), masks) if masks else None

    def _read(self, mask: Mask) -> fx.Node:
        same = variables_of(mask.ref).isdisjoint
        rows = [[] if same(digits) else digits for digits in (self.one.batch, self.one.query)]
        node = self.layouts.placed(mask.ref, [*rows, [self.one.formula.t]])
        if mask.added:
            return self.emit(operator.eq, node, 0)
        return node if mask.want else self.emit(torch.logical_not, node)

    def _last(self, mask: fx.Node) -> fx.Node:
        """Returns 1 + the last visible key of each query, [B, S]: what comes after it need not be read."""
        keys = self.layouts.size(self.one.formula.t.size)
        places = self.emit(torch.arange, 1, self.emit(operator.add, keys, 1) if isinstance(keys, fx.Node) else keys + 1,
                           dtype=torch.int32, device=self.device)  # fmt: skip
        last = self.emit("amax", self.emit(torch.where, mask, places, 0), -1)
        sizes = [self._size(group) for group in (self.one.batch, self.one.query)]
        return self.emit("expand", last, *sizes)

    def _filled(self, chosen: fx.Node, mask: fx.Node, limit: fx.Node | None, count: Any) -> fx.Node:
        """Returns the choice with hidden keys in the place of -1, as ``topk`` takes some where too few are visible.

        Of the first k keys, at least as many are hidden as are missing. The r-th of them goes to the r-th free place.
        """
        emit = self.emit
        first = emit("narrow", mask, -1, 0, count)
        places = emit(torch.arange, count, device=self.device)
        hidden = emit(torch.logical_not, first)
        if self.one.visible.limits or self.one.visible.conditions:
            beyond = emit(operator.ge, places, emit("unsqueeze", limit, -1))
            hidden = emit(torch.logical_or, hidden, beyond)
        taken = emit("sum", emit(operator.ge, chosen, 0), -1, True)
        at = emit(operator.add, emit("cumsum", hidden, -1), emit(operator.sub, taken, 1))
        # What has no place goes to one more, which is cut off.
        at = emit(torch.where, emit(torch.logical_and, hidden, emit(operator.lt, at, count)), at, count)
        padded = emit(torch.nn.functional.pad, emit("to", chosen, torch.int64), (0, 1))
        source = emit("expand_as", places, at)
        filled = emit("scatter", padded, -1, at, source)
        return emit("narrow", filled, -1, 0, count)
