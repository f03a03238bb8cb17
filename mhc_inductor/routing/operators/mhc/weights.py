# SPDX-License-Identifier: Apache-2.0
"""Assembles phi, alpha, bias and gamma of a pre, as the op reads them, from the model's tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.expressions import close
from mhc_inductor.routing.graph.index import product_of
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import Piece, Weighted
from mhc_inductor.routing.operators.mhc.matches import Pre

ROLES = ("pre", "post", "res")
_Parts = Mapping[str, Sequence[Weighted]]


class Weights:
    """Emits the weights of one pre; ``x`` is the node of its streams."""

    def __init__(self, edit: Edit, pre: Pre, x: fx.Node) -> None:
        self.edit = edit
        self.x = x
        self.n, self.width = pre.n, pre.norm.width
        self.affines = pre.affines
        present = set(self.affines)
        self.wanted = ROLES if "res" in present else ROLES[:1] if present == {"pre"} else ROLES[:2]
        ends = {role: edit.view.ends.get(node_of(value), 0) for role, value in pre.outputs.items()}
        # Roles that no gradient comes back to: packed with others, their weights would get zeros instead of None.
        self.unasked = {role for role in self.wanted if not ends.get(role)}

    def all(self) -> tuple[fx.Node | None, ...]:
        """Returns phi, alpha, bias and gamma. Raises Mismatch where one of them cannot be assembled."""
        affines = self.affines.items()
        return (
            self._gathered({r: [(1.0, (a.phi,))] for r, a in affines}, "phi"),
            self._gathered({r: [a.alpha] for r, a in affines}, "alpha"),
            self._gathered({r: a.bias for r, a in affines}, "bias"),
            self._gamma(),
        )

    def _gathered(self, parts: _Parts, what: str) -> fx.Node:
        """Returns phi, alpha or bias of all roles, each a sum, as one tensor."""
        n = self.n
        rows = {"pre": n, "post": n, "res": n * n} if what != "alpha" else dict.fromkeys(ROLES, 1)
        one = {r: s[0] for r, s in parts.items() if len(s) == 1 and close(s[0][0], 1.0)}
        alone = {r: p[0] for r, (_, p) in one.items() if [piece.rows for piece in p] == [rows[r]]}
        stored = self._stored(alone, {r: rows[r] for r in self.wanted}, what) if len(alone) == len(parts) else None
        if stored is not None:
            return stored
        missing = [role for role in self.wanted if role not in parts]
        if missing:
            raise Mismatch(f"no {what} for h_{missing[0]}: expected those of h_pre, h_post and h_res in one tensor")
        nodes = [self._sum(role, parts[role], rows[role], what) for role in self.wanted]
        if len({example(node).dtype for node in nodes}) > 1:
            nodes = [self.edit.to(node, torch.float32) for node in nodes]
        return self.edit.emit(torch.cat, nodes) if len(nodes) > 1 else nodes[0]

    def _stored(self, parts: Mapping[str, Piece], rows: Mapping[str, int], what: str) -> fx.Node | None:
        """Returns the one tensor that already holds all parts in the op's order, or None."""
        leaves = {piece.value for piece in parts.values()}
        if len(leaves) != 1:
            return None
        (leaf,), start = leaves, 0
        for role, count in rows.items():
            if role in parts and parts[role].start != start:
                return None
            start += count
        size = self._rows(leaf, what)
        if size < start:
            return None
        node = self._rowed(next(iter(parts.values())), what)
        return node if size == start else self.edit.emit(operator.getitem, node, slice(0, start))

    def _sum(self, role: str, terms: Sequence[Weighted], rows: int, what: str) -> fx.Node:
        """Returns a sum of products, in fp32 at least where there is more than one tensor; zeros without terms."""
        nodes = [self._product(role, number, pieces, rows, what) for number, pieces in terms or [(0.0, ())]]
        if len(nodes) == 1:
            return nodes[0]
        wide = [self.edit.to(node, self._wide(node)) for node in nodes]
        return functools.reduce(functools.partial(self.edit.emit, operator.add), wide)

    def _product(self, role: str, number: float, pieces: tuple[Piece, ...], rows: int, what: str) -> fx.Node:
        if pieces and pieces[-1].rows == rows:
            node, pieces = self._taken(role, pieces[-1], rows, what), pieces[:-1]
        else:
            node, number = self.edit.emit("new_full", self.x, [rows], number, dtype=self._wide(self.x)), 1.0
        for scalar in pieces:
            node = self._times(node, self._taken(role, scalar, 1, "alpha"))
        return self._times(node, number)

    def _taken(self, role: str, piece: Piece, rows: int, what: str) -> fx.Node:
        edit, node = self.edit, self._rowed(piece, what)
        if self._rows(piece.value, what) != rows:
            node = edit.emit(operator.getitem, node, slice(piece.start, piece.start + rows))
        return edit.emit("detach", node) if role in self.unasked and edit.needs_grad(node) else node

    def _times(self, weight: fx.Node, factor: fx.Node | float) -> fx.Node:
        """Returns a weight times another one or a number, in fp32 at least; the weight itself times 1."""
        if isinstance(factor, float) and close(factor, 1.0):
            return weight
        wide = self._wide(weight)
        factor = self.edit.to(factor, wide) if isinstance(factor, fx.Node) else factor
        return self.edit.emit(operator.mul, self.edit.to(weight, wide), factor)

    def _wide(self, weight: fx.Node) -> torch.dtype:
        """Returns the dtype in which weights are put together: fp32 at least."""
        return torch.promote_types(example(weight).dtype, torch.float32)

    def _rows(self, value: Value, what: str) -> int:
        # The search fixes the sizes of weights, so that none is dynamic.
        return product_of(value.shape).factor // (self.width if what == "phi" else 1)

    def _rowed(self, piece: Piece, what: str) -> fx.Node:
        """Returns a weight with its rows in the first dim."""
        emit, node, width = self.edit.emit, self.edit.input(piece.value), self.width
        shape = tuple(example(node).shape)
        if what != "phi":
            return node if len(shape) == 1 else emit("reshape", node, -1)
        if piece.columns:
            return emit("t", node if len(shape) == 2 else emit("reshape", node, width, -1))
        return node if shape[1:] == (width,) else emit("reshape", node, -1, width)

    def _gamma(self) -> fx.Node | None:
        gamma = self.affines["pre"].gamma  # the search takes only projections with the same one together
        if gamma is None:
            return None
        emit, node, n, d = self.edit.emit, self.edit.input(gamma.value), self.n, self.width // self.n
        if gamma.rows == self.width:
            return node if tuple(example(node).shape) == (n, d) else emit("reshape", node, n, d)
        if gamma.rows != d:
            raise Mismatch("gamma has neither n * D elements nor D", gamma.value)
        return emit("expand", emit("reshape", node, d), n, d)
