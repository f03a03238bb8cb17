# SPDX-License-Identifier: Apache-2.0
"""Assembles phi, alpha, bias and gamma of a pre, as the op reads them, from the model's tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.expressions import close
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import Piece
from mhc_inductor.routing.operators.mhc.matches import Pre

ROLES = ("pre", "post", "res")
_Parts = Mapping[str, Piece | float]


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
            self._gathered({r: a.phi for r, a in affines}, "phi"),
            self._gathered({r: a.alpha or a.scale for r, a in affines}, "alpha"),
            self._gathered({r: a.bias or 0.0 for r, a in affines}, "bias"),
            self._gamma(),
        )

    def _gathered(self, parts: _Parts, what: str) -> fx.Node:
        """Returns phi, alpha or bias of all roles as one tensor; a number stands for all elements of a role."""
        n = self.n
        rows = {"pre": n, "post": n, "res": n * n} if what != "alpha" else dict.fromkeys(ROLES, 1)
        outer = what == "bias" and any(a.outer is not None or a.added is not None for a in self.affines.values())
        scaled = what == "alpha" and any(a.alpha is not None and not close(a.scale, 1.0) for a in self.affines.values())
        whole = None if outer or scaled else self._stored(parts, {role: rows[role] for role in self.wanted}, what)
        if whole is not None:
            return whole
        missing = [role for role in self.wanted if role not in parts]
        if missing:
            raise Mismatch(f"no {what} for h_{missing[0]}: expected those of h_pre, h_post and h_res in one tensor")
        nodes = [self._part(role, parts[role], rows[role], what) for role in self.wanted]
        if scaled:
            factors = [self.affines[role].scale if isinstance(parts[role], Piece) else 1.0 for role in self.wanted]
            nodes = [self._times(node, factor) for node, factor in zip(nodes, factors, strict=True)]
        if len({example(node).dtype for node in nodes}) > 1:
            nodes = [self.edit.to(node, torch.float32) for node in nodes]
        return self.edit.emit(torch.cat, nodes) if len(nodes) > 1 else nodes[0]

    def _stored(self, parts: _Parts, rows: Mapping[str, int], what: str) -> fx.Node | None:
        """Returns the one tensor that already holds all parts in the op's order, or None."""
        pieces = [part for part in parts.values() if isinstance(part, Piece)]
        leaves = {piece.value for piece in pieces}
        if len(leaves) != 1 or len(pieces) != len(parts):
            return None
        (leaf,), start = leaves, 0
        for role, count in rows.items():
            part = parts.get(role)
            if isinstance(part, Piece) and part.start != start:
                return None
            start += count
        size = self._rows(leaf, what)
        if size < start:
            return None
        node = self._rowed(pieces[0], what)
        return node if size == start else self.edit.emit(operator.getitem, node, slice(0, start))

    def _part(self, role: str, part: Piece | float, rows: int, what: str) -> fx.Node:
        edit = self.edit
        if not isinstance(part, Piece):
            return edit.emit("new_full", self.x, [rows], part, dtype=self._wide(self.x))
        node = self._taken(role, part, rows, what)
        return self._whole_bias(node, role) if what == "bias" else node

    def _taken(self, role: str, piece: Piece, rows: int, what: str) -> fx.Node:
        edit, node = self.edit, self._rowed(piece, what)
        if self._rows(piece.value, what) != rows:
            node = edit.emit(operator.getitem, node, slice(piece.start, piece.start + rows))
        return edit.emit("detach", node) if role in self.unasked and edit.needs_grad(node) else node

    def _whole_bias(self, bias: fx.Node, role: str) -> fx.Node:
        """Returns a bias times what multiplies it and z, plus the second bias."""
        affine = self.affines[role]
        if affine.outer is not None:
            if affine.alpha is not None:
                bias = self._times(bias, self._part(role, affine.alpha, 1, "alpha"))
            bias = self._times(bias, affine.outer)
        if affine.added is None:
            return bias
        both = (bias, self._taken(role, affine.added, affine.rows, "bias"))
        return self.edit.emit(operator.add, *(self.edit.to(b, self._wide(b)) for b in both))

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
        total = 1
        for size in value.shape:
            if size.symbols:
                raise Mismatch("a weight's size is dynamic", value)
            total *= size.factor
        return total // (self.width if what == "phi" else 1)

    def _rowed(self, piece: Piece, what: str) -> fx.Node:
        """Returns a weight with its rows in the first dim."""
        emit, node, width = self.edit.emit, self.edit.input(piece.value), self.width
        shape = tuple(example(node).shape)
        if what != "phi":
            return node if len(shape) == 1 else emit("reshape", node, -1)
        if piece.columns:
            return emit("t", node if len(shape) == 2 else emit("reshape", node, width, -1))
        return node if shape == (shape[0], width) and len(shape) == 2 else emit("reshape", node, -1, width)

    def _gamma(self) -> fx.Node | None:
        gammas = {a.gamma for a in self.affines.values()}
        if len(gammas) != 1:
            raise Mismatch("h_pre, h_post and h_res have different gammas")
        gamma = gammas.pop()
        if gamma is None:
            return None
        emit, node, n, d = self.edit.emit, self.edit.input(gamma.value), self.n, self.width // self.n
        if gamma.rows == self.width:
            return node if tuple(example(node).shape) == (n, d) else emit("reshape", node, n, d)
        if gamma.rows != d:
            raise Mismatch("gamma has neither n * D elements nor D", gamma.value)
        return emit("expand", emit("reshape", node, d), n, d)
