# SPDX-License-Identifier: Apache-2.0
"""The logits h_res of a pre, and the Sinkhorn iterations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from mhc_inductor.routing.edit import node_of
from mhc_inductor.routing.graph.expressions import VIEWS, Ref, aten, is_cast, peel, summed, whole
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
        self.logits: dict[Value, Affine] = {}
        self.chains: list[tuple[Value, Chain]] = []
        self._others: set[Value] = set()
        self._never: set[Value] = set()
        """Sums that are no logits, and that no further addend makes logits."""

    def choose(self, nodes: Iterable[fx.Node]) -> None:
        """Fills in the logits and the Sinkhorn iterations of the pre. Raises Mismatch."""
        almost = self._collect(nodes)
        if not self.logits:
            if almost is not None:
                raise almost
            return
        upright = [v for v, affine in self.logits.items() if not affine.transposed]
        if not upright:
            raise Mismatch("h_res is laid out transposed; expected row-major [n, n]", next(iter(self.logits)))
        # Iterations on transposed logits are left to a separate Sinkhorn op.
        chains = [(v, c) for v, c in self.chains if c.logits in upright]
        start = next((v for v in upright if len(v.shape) >= 2 and v.shape[-1] == Size(self.pre.n)), upright[0])
        if chains:
            start = chains[0][1].logits
        self.pre.res, self.pre.h_res = self.logits[start], start
        self.pre.steps += [v for v, _ in chains]
        self._choose_chain(start, chains)

    def _choose_chain(self, start: Value, chains: list[tuple[Value, Chain]]) -> None:
        pre = self.pre
        try:
            last = last_of(chains)
        except Mismatch as mismatch:
            pre.foreign = pre.foreign or mismatch
        if pre.foreign is not None or not last:
            return
        pre.mixed, pre.chain = last[0]
        pre.fold = not pre.chain.transposed and self._only_through(start, pre.mixed)

    def _collect(self, nodes: Iterable[fx.Node]) -> Mismatch | None:
        """Finds logits and iterations. Returns the mismatch of the last value that almost is the logits, or None."""
        # Every value on the way to the logits almost matches, so only the last mismatch is worth reporting.
        almost: Mismatch | None = None
        for node in nodes:
            value = self.view.value(node)
            if value is None or self.group.per_token(node) != self.pre.n**2 or self._in_chain(value):
                continue
            if value.func in LIGHT or value.func in VIEWS or is_cast(value):
                try:
                    self._is_logits(value)
                except Mismatch as mismatch:
                    almost = mismatch if square_matrices(value) else almost
        return almost

    def _in_chain(self, value: Value) -> bool:
        """Checks whether ``value`` is a step of Sinkhorn iterations on the logits, or of iterations that do not fit."""
        pre, group = self.pre, self.group.search.chains.group(value)
        if group is None or value not in group.after or value.shape[-1].factor != pre.n:
            return False
        if group.miss is not None:
            pre.foreign = pre.foreign or group.miss
            pre.steps.append(value)
            return True
        chain = group.chains.get(value)
        with contextlib.suppress(Mismatch):  # iterations of something else, such as logits minus their maximum
            if chain is not None and self._is_logits(chain.logits):
                self.chains.append((value, chain))
                return True
        return False

    def _is_logits(self, value: Value) -> bool:
        if value in self.logits:
            return True
        if value.node is None or value in self._others:
            return False
        self._others.add(value)
        found = self._affine(value)
        if found is None:
            return False
        mine = self.pre.pre.affine
        if found.key != mine.key or found.rows != self.pre.n**2:
            return False
        # Skip z and alpha * z on the way to the logits, unless h_pre has no bias or no alpha either.
        if (not found.alpha[1], not found.bias) != (not mine.alpha[1], not mine.bias):
            return False
        if found.phi.value is mine.phi.value and found.phi.start != 2 * self.pre.n and self.pre.n == 2:
            return False
        self.logits[value] = found
        return True

    def _affine(self, value: Value) -> Affine | None:
        """Returns ``value`` as logits, None where it is something else. Raises Mismatch.

        It is asked of every sum of a long chain of sums, each as long as what it sums.
        """
        if not self._never.isdisjoint(_addends(value)):
            self._never.add(value)
            return None
        if mhc.norm_behind(value, mhc.any_norm, self.group.kept) is None:
            return None
        try:
            out = whole(value)
            return mhc.affine(out, out, self.group.kept)
        except Unsupported:
            self._never.add(value)
        except Mismatch as mismatch:
            if mismatch.reason in (mhc.SEVERAL, mhc.NO_BIAS):
                self._never.add(value)
            if mismatch.reason not in mhc.NO_LOGITS:
                raise
        return None

    def _only_through(self, start: Value, end: Value) -> bool:
        """Checks whether every use of ``start`` goes through ``end``."""
        order, last = self.view.order, node_of(end)

        def readers(node: fx.Node) -> list[fx.Node]:
            early = order[node] < order[last]
            return [user for user in node.users if user is not last and user in self.view.live] if early else []

        return all(order[node] < order[last] for node in reached([node_of(start)], readers))


def _addends(value: Value) -> list[Value]:
    """Returns what ``value`` is a view of, and the operands where that is a sum, behind their views and casts."""
    ref = peel(whole(value))
    with contextlib.suppress(Unsupported):
        return [ref.value, *(peel(a).value for _, a in summed(ref) or () if isinstance(a, Ref))]
    return [ref.value]
