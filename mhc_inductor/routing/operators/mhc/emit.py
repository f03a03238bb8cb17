# SPDX-License-Identifier: Apache-2.0
"""Replaces the formulas that :mod:`.search` found with mHC ops, and assembles their weights as the ops read them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.expressions import close
from mhc_inductor.routing.graph.index import Size, product_of
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.formula import Piece, Weighted
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, PostUse, Pre, Sinkhorn
from mhc_inductor.routing.operators.mhc.mixing import streams_last
from mhc_inductor.routing.operators.mhc.norm import root_of
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain

_OPS = torch.ops.mhc_inductor
ROLES = ("pre", "post", "res")

Pairs = list[tuple[Value, fx.Node]]
_Parts = Mapping[str, Sequence[Weighted]]


class Emission:
    """Emits the ops of one graph. A post reads the outputs of its pre directly, without the model's casts."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit
        self._given: dict[Value, fx.Node] = {}
        self._streams: dict[Pre, fx.Node] = {}

    # --- the three ops ---

    def pre(self, pre: Pre) -> Pairs:
        """Emits a pre or a head and returns each replaced value with its new node. Raises Mismatch."""
        edit, x_value = self.edit, pre.norm.x
        x = self._split(x_value, pre.n, pre.norm.width // pre.n)
        if pre.h_in is not None:
            x = edit.widened(x, pre.h_in)
        self._streams[pre] = x
        call = edit.emit(getattr(_OPS, pre.op).default, x, *Weights(edit, pre, x).all(), *_numbers(pre))
        pairs = []
        for role, value in pre.outputs.items():
            got = edit.emit(operator.getitem, call, ROLES.index(role))
            if not edit.view.flows(node_of(value)) and edit.needs_grad(got):
                got = edit.emit("detach", got)
            same = pre.posts if role == "post" else [value]
            if role in ("post", "res") and any(edit.view.hooked(node_of(v)) for v in (value, *same)):
                # The hook must see the gradients of all readers, but later ops read the op's own output.
                raise Mismatch(
                    f"h_{role} has a hook, and the post that reads it is part of the op: the hook would miss that gradient",
                    value,
                )
            edit.keep(got, value)
            self._given.update(dict.fromkeys(same if value is not pre.collapsed else pre.weights, got))
            pairs.append((value, edit.as_like(got, value, x)))
        return pairs

    def post(self, use: PostUse) -> Pairs:
        """Emits a post and returns x_out with its new node. Raises Mismatch."""
        edit, found, n = self.edit, use.found, use.found.n
        if use.pre is not None and not self._placed(use.pre):
            raise Mismatch("")
        own = None
        if use.pre is not None and use.pre.norm.x is found.x and not edit.copied(node_of(root_of(found.x)[0])):
            # Reuse the pre's x node, so that gradients of widened streams are rounded only once.
            own = self._streams.get(use.pre)
        x = own or self._split(found.x, n, found.width // n, found.x_stream)
        x = functools.reduce(edit.widened, use.outputs, x)
        lead, d = list(example(x).shape[:-2]), example(x).shape[-1]
        f = edit.shaped(edit.input(found.f_out), [*lead, d], x)
        for vector in found.added:
            f = edit.emit(operator.add, self._wide(f), edit.shaped(edit.input(vector), [d], x))
        h_post = self._own(found.h_post, use.pre) or self._coefficients(found.h_post, [n], x)
        matrix = None
        if found.matrix is not None:
            mixed = self._own(found.matrix, use.pre)
            matrix = edit.shaped(mixed, [*lead, n, n], x) if mixed else self._coefficients(found.matrix, [n, n], x)
        out = edit.emit(_OPS.mhc_post.default, x, f, h_post, matrix, found.transpose)
        each = edit.emit("unbind", out, -2) if use.streams else None
        pairs = [(v, edit.as_like(edit.emit(operator.getitem, each, o), v, x)) for o, v in use.streams.items()]
        if use.x_out in use.streams.values():
            return pairs
        if found.stream != -2:
            wanted = example(node_of(use.x_out)).shape
            order = streams_last(len(wanted), found.stream % len(wanted))
            out = edit.emit("movedim", edit.shaped(out, [wanted[k] for k in order], x), -2, found.stream)
        return [(use.x_out, edit.as_like(out, use.x_out, x)), *pairs]

    def collapse(self, use: CollapseUse) -> Pairs:
        """Emits a collapse with given weights and returns h_in with its new node. Raises Mismatch."""
        edit = self.edit
        x = edit.widened(self._split(use.x, use.n, use.d, use.stream), use.h_in)
        h_in = edit.emit(_OPS.mhc_collapse.default, x, self._coefficients(use.weight, [use.n], x))
        return [(use.h_in, edit.as_like(h_in, use.h_in, x))]

    def sinkhorn(self, found: Sinkhorn) -> Pairs:
        """Emits Sinkhorn iterations and returns their last matrix with its new node. Raises Mismatch."""
        edit, logits = self.edit, found.chain.logits
        own = found.pre if found.pre is not None and self._placed(found.pre) else None
        source = self._own(logits, own) or edit.input(logits)
        if torch.finfo(found.mixed.dtype).bits > torch.finfo(example(source).dtype).bits:
            source = edit.to(source, found.mixed.dtype)
        mixed = self._mixed(source, found.chain)
        if not edit.view.hooked(node_of(found.mixed)):
            edit.keep(mixed, found.mixed)
            self._given[found.mixed] = mixed
        return [(found.mixed, edit.as_like(mixed, found.mixed, source))]

    def _mixed(self, logits: fx.Node, chain: Chain) -> fx.Node:
        emit, turned = self.edit.emit, chain.transposed
        logits = emit("transpose", logits, -1, -2) if turned else logits
        mixed = emit(_OPS.mhc_sinkhorn.default, logits, chain.iters, chain.eps, chain.form)
        return emit("transpose", mixed, -1, -2) if turned else mixed

    def _own(self, value: Value, pre: Pre | None) -> fx.Node | None:
        """Returns the unrounded op output for ``value``, to be read by an op of the same formula.

        Returns None where no op computed the value, where that op was refused, or where ops must read a copy of it.
        """
        made = None if pre is None or self.edit.copied(node_of(value)) else self._given.get(value)
        return made if made in self.edit.unrounded else None

    def _placed(self, pre: Pre) -> bool:
        """Checks whether the op of ``pre`` was put into the graph."""
        node = node_of(pre.collapsed)
        return self.edit.current(node) is not self.edit.view.node(node)

    # --- streams and coefficients ---

    def _split(self, x: Value, n: int, d: int, dim: int = -2) -> fx.Node:
        """Returns x as [..., n, D]; its streams may have a dim of their own (``dim``) or share the last one with D."""
        root, order = root_of(x)
        node = self.edit.input(root)
        if order != tuple(range(len(order))):
            node = self.edit.emit("permute", node, *order)
        if dim != -2:
            return self.edit.emit("movedim", node, dim, -2)
        shape = example(node).shape
        if len(shape) >= 2 and shape[-1] == d and shape[-2] == n:
            return node
        if shape[-1] == n * d:
            return self.edit.emit("unflatten", node, -1, (n, d))
        return self.edit.emit("reshape", node, -1, n, d)

    def _coefficients(self, value: Value, own: list[int], x: fx.Node) -> fx.Node:
        """Returns coefficients that no op computed as [..., *own]; those without tokens are expanded to all tokens."""
        edit, node = self.edit, self.edit.input(value)
        lead = list(example(x).shape[:-2])
        if product_of(value.shape) != product_of(map(Size, own)):
            return self._wide(edit.shaped(node, [*lead, *own], x))
        sizes = [size if isinstance(size, int) else edit.emit("size", x, d) for d, size in enumerate(lead)]
        return self._wide(edit.emit("expand", edit.shaped(node, own, x), *sizes, *own))

    def _wide(self, node: fx.Node) -> fx.Node:
        """Returns coefficients in fp32 at least, as the ops of this package return them."""
        return node if torch.finfo(example(node).dtype).bits >= 32 else self.edit.emit("to", node, torch.float32)


def _numbers(pre: Pre) -> tuple[Any, ...]:
    """Returns the numeric arguments of mhc_pre or mhc_head."""
    form = () if pre.norm.form == "inside" else (pre.norm.form,)
    if pre.op == "mhc_head":
        return pre.norm.eps, pre.pre.add, *form
    post = (pre.post.mult, pre.post.add) if pre.post is not None else (2.0, 0.0)
    folded = pre.chain if pre.fold else None
    iterations = (folded.iters or 0, folded.eps, folded.form) if folded is not None else (0, 1e-6, "softmax")
    return pre.norm.eps, pre.pre.add, *post, *iterations, *form


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
        dtype = functools.reduce(torch.promote_types, (example(node).dtype for node in nodes))
        nodes = [self.edit.to(node, dtype) for node in nodes]
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
        return node if tuple(example(node).shape) == (n, d) else emit("reshape", node, n, d)
