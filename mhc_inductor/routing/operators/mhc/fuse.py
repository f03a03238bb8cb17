# SPDX-License-Identifier: Apache-2.0
"""Fuses the post of a sublayer with what reads its streams next, so that x_out is read once.

That is the pre or the head of the next sublayer or, in single-pass mHC, a collapse with known weights and the next
coefficients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.graph.values import Value, example
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match
from mhc_inductor.routing.operators.kernels import kernels_of

FEW_TOKENS = 256
"""With fewer tokens two ops are faster in inference, as in decoding, where latency counts. Not where the fused op has
kernels of its own for few tokens: these are faster still (docs/tuning.md)."""
_OPS = torch.ops.mhc_inductor
_FUSED: dict[Any, tuple[str, str]] = {
    _OPS.mhc_pre.default: ("mhc_pre", "mhc_post_pre"),
    _OPS.mhc_head.default: ("mhc_head", "mhc_post_head"),
}
"""The ops that may follow a post, each with its name and the name of the fused op."""


_SINGLE = _OPS.mhc_coefficients.default


class Fusion:
    """Fuses every post with the pre or head, or with the collapse and the coefficients, that read its result."""

    name = "mhc_fusion"
    looks_for_ops = True
    kernels = staticmethod(kernels_of)

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the nodes that may end a fusion; no nodes where a checkpoint policy decides which ops are saved."""
        if view.has_policy:
            return []
        return [n for n in view.nodes if n.op == "call_function" and (n.target in _FUSED or n.target is _SINGLE)]

    def match(self, view: View, node: fx.Node) -> Match | None:
        """Returns the fusion that ends at ``node``, or None."""
        first = node.args[0]
        if not isinstance(first, fx.Node) or first.target is not _OPS.mhc_post.default:
            return None
        if not view.modes_at(first).grad and _few(first):
            return None
        if node.target is _SINGLE:
            return _single_pass(view, first, node)
        if not _movable(view, first, node):
            return None
        name, fused = _FUSED[node.target]
        return _fused(view, fused, ("mhc_post", name), first, node) if node.users else None

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the fused op and returns each output of the two ops with its new node."""
        first, second, *collapse = match.data
        *site, transpose_res = first.args
        # The fused op returns x_out first, then h_in of a collapse, then the outputs of the second op.
        place: dict[Any, int] = {first: 0, **{c: 1 for c in collapse}}
        weights = [c.args[1] for c in collapse]
        arguments = fx.node.map_arg((*site, *weights, transpose_res, *second.args[1:]), edit.current)
        call = edit.emit(getattr(_OPS, match.op).default, *arguments)
        pairs = []
        for value in match.outputs:
            node = value.node
            at = place[node] if node in place else len(place) + node.args[1]  # type: ignore[union-attr, operator]
            pairs.append((value, edit.emit(operator.getitem, call, at)))
        return pairs


def _single_pass(view: View, first: fx.Node, second: fx.Node) -> Match | None:
    """Returns the fusion of a post with the coefficients and the collapse of its result, or None."""
    collapse = next((u for u in first.users if u.target is _OPS.mhc_collapse.default and u.args[0] is first), None)
    if collapse is None:
        return None
    ours = {first, second, collapse, *second.users}
    nodes = [a for node in (first, second, collapse) for a in node.args if isinstance(a, fx.Node) and a is not first]
    uses = [view.order[u] for node in ours for u in node.users if u not in ours and u in view.order]
    ready = max((view.order[n] for n in nodes), default=-1)
    modes = {view.modes_at(n).grad for n in (first, second, collapse)}
    # Weights among the coefficients are those of mhc_pre: the collapse has to wait for them.
    if ours.intersection(nodes) or len(modes) > 1 or ready >= min(uses, default=ready + 1):
        return None
    parts = ("mhc_post", "mhc_collapse", "mhc_coefficients")
    return _fused(view, "mhc_single_pass", parts, first, second, collapse)


def _fused(
    view: View, op: str, parts: tuple[str, ...], first: fx.Node, second: fx.Node, *more: fx.Node
) -> Match | None:
    """Returns the fusion of a post with the calls that read its result; None where ``second`` is read as a tuple."""
    if any(user.target is not operator.getitem for user in second.users):
        return None
    nodes = [a for node in (first, second, *more) for a in node.args if isinstance(a, fx.Node) and a is not first]
    read, given = (
        [v for n in each if (v := view.value(n)) is not None] for each in (nodes, (*second.users, first, *more))
    )
    numbers = [n for n in nodes if view.value(n) is None]
    return Match(op, read, given, parts=parts, data=(first, second, *more), numbers=numbers)


def _few(post: fx.Node) -> bool:
    """Checks whether a post on a GPU has so few tokens, known before it runs, that it is faster alone."""
    x, f_out = (example(a) for a in post.args[:2] if isinstance(a, fx.Node))
    if x.device.type != "cuda" or not all(isinstance(n, int) for n in x.shape[:-2]):
        return False
    return math.prod(x.shape[:-2]) < FEW_TOKENS and not _has_kernels_for_few(x, f_out)


def _has_kernels_for_few(x: torch.Tensor, f_out: torch.Tensor) -> bool:
    """Checks whether the fused op runs its own kernels, which it has for any number of tokens; never in a package."""
    from mhc_inductor.kernels.launch import EagerBuilder
    from mhc_inductor.kernels.mhc.fused_plan import runs_gluon

    static = all(isinstance(n, int) for n in x.shape[-2:])
    return static and not compat.in_package() and runs_gluon(EagerBuilder(x.device), x, f_out)


def _movable(view: View, first: fx.Node, second: fx.Node) -> bool:
    """Checks whether ``first`` may run as late as ``second``: no user comes earlier, and the grad mode is the same."""
    end = view.order[second]
    early = any(view.order.get(user, end + 1) < end for user in first.users if user is not second)
    return not early and view.modes_at(first).grad == view.modes_at(second).grad
