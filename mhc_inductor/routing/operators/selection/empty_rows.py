# SPDX-License-Identifier: Apache-2.0
"""Emits what the formula gives in rows without a visible key, where that is not the op's 0, and how NaN spreads.

A softmax written out multiplies every key by its weight, hidden keys by 0. A query that is NaN therefore gives NaN
gradients to all keys and values; the op gives them to the selected ones only. Where rows without keys are corrected
anyway, this spread is added too, from the means of K and V, in passes that Inductor fuses.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.selection.fills import Rows

_ROW = (slice(None), None, slice(None), None)
"""Index that turns [B, G, D] into [B, 1, G, 1, D]."""
_MIXED = (
    "a query may see no key, and which keys then get gradients of NaN depends on its mask; expected scores filled with "
    '-inf, where it is added, or the option "mhc_inductor.empty_rows": "zero"'
)
_BY_KERNEL = "a query may see none of its list, and what keys then get gradients depends on PyTorch's kernel"


class EmptyRows:
    """Corrects rows without a visible key in the op's result o [B, S, G, h, Dv], by its lse [B, S, G, h].

    ``given``: the nodes of q, k and v. ``needed``: whether gradients to them are needed.
    """

    def __init__(
        self, edit: Edit, lse: fx.Node, given: Sequence[fx.Node], scale: float, needed: Sequence[bool]
    ) -> None:
        self.edit = edit
        self.emit = edit.emit
        self.lse = lse
        self.q, self.k, self.v = given
        self.scale = scale
        grad = edit.place is not None and edit.place.modes.grad
        self.grads = [grad and x for x in needed]

    def put(self, o: fx.Node, rows: Rows) -> fx.Node:
        """Returns ``o`` with what the formula gives in the rows whose lse is -inf. Raises Mismatch if that is unknown."""
        zero = rows in (Rows.ZERO_SCORES, Rows.ZERO_MIXED)
        if rows in (Rows.SEEN, Rows.ZERO) or (zero and not any(self.grads[:2])):
            return o
        if rows is Rows.ZERO_MIXED:
            raise Mismatch(_MIXED)
        empty = self.emit("unsqueeze", self.emit(operator.eq, self.lse, -math.inf), -1)
        if zero:
            return self._zero(o, empty)
        if any(self.grads):
            o = self._spread(o, self.emit("unsqueeze", self.emit(torch.isnan, self.lse), -1))
        if rows in (Rows.NAN, Rows.NAN_SCORES):
            return self._nan(o, empty, rows is Rows.NAN_SCORES)
        mean, over = self._mean(self.v), "sum" if rows is Rows.MEAN_SUMMED else "mean"
        if rows is Rows.MEAN_SUMMED and self.grads[2]:
            mean = self._with_gradient(self.emit("detach", mean), self._mean(self.v, over))
        if rows is not Rows.MEAN:
            if any(self.grads[:2]):
                mean = self._with_gradient(mean, self._change(over))
            nothing = self._nothing(self.emit("sum", self.emit("detach", self.q), -1, True))
            mean = self.emit(operator.mul, mean, self.emit(operator.add, nothing, 1.0))
        return self.emit(torch.where, empty, mean, o)

    def _mean(self, x: fx.Node, over: str = "mean") -> fx.Node:
        """Returns the mean, or the sum, of k or v over the keys, broadcastable to [B, S, G, h, D]."""
        return self.emit(operator.getitem, self.emit(over, x, -2), _ROW)

    def _spread(self, o: fx.Node, nan: fx.Node) -> fx.Node:
        """Returns ``o`` with the gradients that 0 times NaN gives in rows whose weights are NaN.

        All of V gets NaN, and q and K get each other's NaN.
        """
        weight = self.edit.to(self.emit(torch.where, nan, math.nan, 0.0), example(o).dtype)
        reached = self.emit(operator.mul, self._mean(self.v), weight)
        if any(self.grads[:2]):
            scores = self.emit("sum", self.emit(operator.mul, self.q, self._mean(self.k)), -1, True)
            reached = self.emit(operator.add, reached, self._nothing(scores))
        return self.emit(operator.add, o, self.emit(torch.where, nan, reached, 0.0))

    def _nan(self, o: fx.Node, empty: fx.Node, scores: bool) -> fx.Node:
        """Returns ``o`` with NaN in the rows ``empty``, and a gradient of NaN to all of V.

        ``scores``: the scores themselves are NaN there, so q and K get a gradient of NaN too.
        """
        if not any(self.grads):
            return self.emit("masked_fill", o, empty, math.nan)
        reached = [self._mean(self.v), *(self._scores() if scores else ())]
        factor = self.edit.to(self.emit(torch.where, empty, math.nan, 1.0), example(o).dtype)
        return self.emit(operator.mul, self.emit(torch.where, empty, self._sum(reached), o), factor)

    def _zero(self, o: fx.Node, empty: fx.Node) -> fx.Node:
        """Returns ``o`` with a gradient of NaN to q and K from the rows ``empty``, as that of a softmax made 0 later."""
        factor = self.edit.to(self.emit(torch.where, empty, math.nan, 0.0), example(o).dtype)
        reached = self.emit(operator.mul, self._sum(self._scores()), factor)
        return self.emit(operator.add, o, self.emit("nan_to_num", reached, 0.0))

    def _scores(self) -> list[fx.Node]:
        """Returns numbers whose gradients reach a row of q and all of K, if these need any."""
        terms = []
        if self.grads[0]:
            terms.append(self.emit("sum", self.q, -1, True))
        if self.grads[1]:
            terms.append(self.emit(operator.getitem, self.emit("sum", self.k, (-2, -1)), (*_ROW, None)))
        return [self._nothing(x) for x in terms]

    def _sum(self, terms: Sequence[fx.Node]) -> fx.Node:
        return functools.reduce(lambda a, b: self.emit(operator.add, a, b), terms)

    def _nothing(self, x: fx.Node) -> fx.Node:
        """Returns ``x`` times 0, which is NaN where ``x`` is not finite."""
        return self.emit(operator.mul, x, 0.0)

    def _with_gradient(self, x: fx.Node, of: fx.Node) -> fx.Node:
        """Returns ``x`` with the gradient of ``of`` too."""
        return self.emit(operator.add, x, self.emit(operator.sub, of, self.emit("detach", of)))

    def _change(self, over: str) -> fx.Node:
        """Returns numbers with the gradients of a softmax of equal scores: ds[t] = (do . (v[t] - mean)) / T.

        ``over`` "sum" in place of "mean" leaves the division by T out.
        """
        v = self.emit("detach", self.v)
        centred = self.emit(operator.sub, v, self.emit("mean", v, -2, True))
        # Written as products and sums, which Inductor fuses: the gradient stores no tensor but K.T V.
        pairs = self.emit(operator.mul, self.emit("unsqueeze", self.k, -1), self.emit("unsqueeze", centred, -2))
        moments = self.emit(operator.getitem, self.emit(over, pairs, -3), _ROW)
        rows = self.emit(operator.mul, self.emit("unsqueeze", self.q, -1), moments)
        return self.emit(operator.mul, self.emit("sum", rows, -2), self.scale)


def of_places(edit: Edit, q: fx.Node, bias: fx.Node, rows: Rows) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Returns q [B, S, G, h, D] and the biases [B, S, G, n] of gathered keys, in rows without a key as the formula has them.

    Also returns which rows these are [B, S, G, 1], None if nothing is changed in them. Weights there, and so its gradients, then reach the keys of the row's list alone. NaN in ``bias`` gives no gradient to q and
    K, as scores that are filled. Added numbers need nothing but for -inf: the op adds them too. Raises Mismatch if the gradients
    depend on a kernel.
    """
    if rows is Rows.MEAN_SUMMED:
        raise Mismatch(_BY_KERNEL)
    if rows not in (Rows.NAN, Rows.NAN_SCORES, Rows.MEAN):
        return q, bias, None
    emit = edit.emit
    empty = emit("all", emit(operator.eq, bias, -math.inf), -1, True)
    bias = emit(torch.where, empty, math.nan if rows is Rows.NAN else 0.0, bias)
    row = emit("unsqueeze", empty, -1)
    if rows is Rows.MEAN:
        q = emit(torch.where, row, 0.0, q)
    elif rows is Rows.NAN_SCORES:
        q = emit(operator.mul, q, edit.to(emit(torch.where, row, math.nan, 1.0), example(q).dtype))
    return q, bias, empty
