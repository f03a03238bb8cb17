# SPDX-License-Identifier: Apache-2.0
"""The logits h_res of a pre, and the Sinkhorn iterations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import VIEWS, aten, is_cast, whole
from mhc_inductor.routing.graph.index import Size, Unsupported
from mhc_inductor.routing.graph.values import Value, reached
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc import formula as mhc
from mhc_inductor.routing.operators.mhc.formula import Affine, square_matrices
from mhc_inductor.routing.operators.mhc.matches import Pre
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain, last_of

if TYPE_CHECKING:
    from mhc_inductor.routing.operators.mhc.groups import Group

LIGHT = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.sqrt.default,
    aten.reciprocal.default,
    aten.add.Tensor,
    aten.add.Scalar,
}
"""Elementwise operations that the search passes in tensors as large as the streams."""


class Residual:
    """Chooses the logits h_res of a pre and the Sinkhorn iterations on them."""

    def __init__(self, group: Group, pre: Pre) -> None:
        self.group = group
        self.view = group.view
        self.pre = pre
        self.chains: list[tuple[Value, Chain]] = []
        self._asked: dict[Value, Affine | None] = {}

    def choose(self, nodes: Iterable[fx.Node]) -> None:
        """Fills in the logits and the Sinkhorn iterations of the pre. Raises Mismatch."""
        pre, almost = self.pre, self._collect(nodes)
        logits = {value: affine for value, affine in self._asked.items() if affine is not None}
        if not logits:
            if almost is not None:
                raise almost
            return
        rows = [v for v in logits if len(v.shape) >= 2 and v.shape[-1] == Size(pre.n)]
        start = next(iter([chain.logits for _, chain in self.chains] or rows or logits))
        pre.res, pre.h_res = logits[start], start
        pre.steps += [v for v, _ in self.chains]
        try:
            last = last_of(self.chains)
        except Mismatch as mismatch:
            pre.foreign = pre.foreign or mismatch
        if pre.foreign is None and last:
            pre.mixed, pre.chain = last[0]
            pre.fold = not pre.chain.transposed and self._only_through(start, pre.mixed)

    def _collect(self, nodes: Iterable[fx.Node]) -> Mismatch | None:
        """Finds logits and iterations. Returns the mismatch of the last value that almost is the logits, or None."""
        # Every value on the way to the logits almost matches, so only the last mismatch is worth reporting.
        almost: Mismatch | None = None
        for node in nodes:
            value = self.view.value(node)
            if value is None or self.group.per_token(node) != self.pre.n**2 or self._in_iterations(value):
                continue
            if value.func in LIGHT or value.func in VIEWS or is_cast(value):
                try:
                    self._logits(value)
                except Mismatch as mismatch:
                    almost = mismatch if square_matrices(value) else almost
        return almost

    def _in_iterations(self, value: Value) -> bool:
        """Checks whether ``value`` is a matrix of Sinkhorn iterations; keeps it if these are on the logits."""
        pre, group = self.pre, self.group.search.chains.group(value)
        if group is None or value not in group.after or value.shape[-1].factor != pre.n:
            return False
        chain = group.chains.get(value)
        if group.miss is not None:
            pre.foreign = pre.foreign or group.miss
            pre.steps.append(value)
        elif chain is not None:
            with contextlib.suppress(Mismatch):  # iterations of something else, such as logits minus their maximum
                self.chains += [(value, chain)] if self._logits(chain.logits) is not None else []
        return True

    def _logits(self, value: Value) -> Affine | None:
        """Returns ``value`` as logits of the pre, None where it is something else. Raises Mismatch when first asked."""
        if value not in self._asked:
            self._asked[value] = None
            self._asked[value] = self._affine(value)
        return self._asked[value]

    def _affine(self, value: Value) -> Affine | None:
        mine, n, kept = self.pre.pre.affine, self.pre.n, self.group.kept
        if value.node is None or mhc.norm_behind(value, kept) is None:
            return None
        try:
            found = mhc.affine(whole(value), whole(value), kept)
        except Unsupported:
            return None
        except Mismatch as mismatch:
            if mismatch.reason not in mhc.NO_LOGITS:
                raise
            return None
        # Skip z and alpha * z on the way to the logits, unless h_pre has no bias or no alpha either.
        alike = (not found.alpha[1], not found.bias) == (not mine.alpha[1], not mine.bias)
        others = found.phi.value is mine.phi.value and found.phi.start != 2 * n and n == 2
        return found if found.key == mine.key and found.rows == n**2 and alike and not others else None

    def _only_through(self, start: Value, end: Value) -> bool:
        """Checks whether every use of ``start`` goes through ``end``."""
        order, last = self.view.order, node_of(end)

        def readers(node: fx.Node) -> list[fx.Node]:
            early = order[node] < order[last]
            return [user for user in node.users if user is not last and user in self.view.live] if early else []

        return all(order[node] < order[last] for node in reached([node_of(start)], readers))
