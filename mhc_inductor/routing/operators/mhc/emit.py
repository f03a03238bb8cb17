# SPDX-License-Identifier: Apache-2.0
"""Replaces the formulas that :mod:`.search` found with mHC ops."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mhc_inductor.routing.edit import Edit, node_of
from mhc_inductor.routing.graph.index import Size, product_of
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.interface import Mismatch
from mhc_inductor.routing.operators.mhc.matches import CollapseUse, PostUse, Pre, Sinkhorn
from mhc_inductor.routing.operators.mhc.mixing import streams_last
from mhc_inductor.routing.operators.mhc.norm import root_of
from mhc_inductor.routing.operators.mhc.sinkhorn import Chain
from mhc_inductor.routing.operators.mhc.weights import ROLES, Weights

_OPS = torch.ops.mhc_inductor

Pairs = list[tuple[Value, fx.Node]]


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
