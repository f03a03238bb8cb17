"""Fuses the post of a sublayer with the pre (or head) of the next one, so that x_out is read once."""

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
"""With fewer tokens two separate ops are faster in inference (docs/tuning.md), as in decoding, where latency counts."""
_OPS = torch.ops.mhc_inductor
_FUSED: dict[Any, tuple[str, str]] = {
    _OPS.mhc_pre.default: ("mhc_pre", "mhc_post_pre"),
    _OPS.mhc_head.default: ("mhc_head", "mhc_post_head"),
}
"""The ops that may follow a post, each with its name and the name of the fused op."""


class Fusion:
    """Fuses every post with the pre or head that reads its result."""

    name = "mhc_fusion"
    looks_for_ops = True
    kernels = staticmethod(kernels_of)

    def candidates(self, view: View) -> Iterable[fx.Node]:
        """Returns the pre and head nodes; no nodes where a checkpoint policy decides which ops are saved."""
        policy = compat.checkpoint_policy(view.real) is not None
        return [node for node in view.nodes if node.op == "call_function" and node.target in _FUSED and not policy]

    def match(self, view: View, node: fx.Node) -> Match | None:
        """Returns the fusion that ends at ``node``, or None."""
        first = node.args[0]
        if (
            not isinstance(first, fx.Node)
            or first.target is not _OPS.mhc_post.default
            or not _movable(view, first, node)
        ):
            return None
        if not view.modes_at(first).grad and _few(first):
            return None
        outputs = [view.value(user) for user in node.users if user.target is operator.getitem]
        inputs = [view.value(a) for a in (*first.args, *node.args[1:]) if isinstance(a, fx.Node)]
        if not outputs or len(outputs) != len(node.users):
            return None
        name, fused = _FUSED[node.target]
        read, given = [v for v in inputs if v is not None], [v for v in (*outputs, view.value(first)) if v is not None]
        return Match(fused, read, given, parts=("mhc_post", name), data=(first, node))

    def emit(self, edit: Edit, match: Match) -> Iterable[tuple[Value, fx.Node]]:
        """Emits the fused op and returns each output of the two ops with its new node."""
        first, second = match.data
        arguments = fx.node.map_arg((*first.args, *second.args[1:]), edit.current)
        call = edit.emit(getattr(_OPS, match.op).default, *arguments)
        pairs = []
        for value in match.outputs:
            # The fused op returns x_out first, then the outputs of the second op.
            at = 0 if value.node is first else 1 + value.node.args[1]  # type: ignore[union-attr, operator]
            pairs.append((value, edit.emit(operator.getitem, call, at)))
        return pairs


def _few(post: fx.Node) -> bool:
    """Checks whether a post is on a GPU with a static number of tokens below FEW_TOKENS."""
    x = example(post)
    lead = x.shape[:-2]
    return x.device.type == "cuda" and all(isinstance(n, int) for n in lead) and math.prod(lead) < FEW_TOKENS


def _movable(view: View, first: fx.Node, second: fx.Node) -> bool:
    """Checks whether ``first`` may run as late as ``second``: no user comes earlier, and the grad mode is the same."""
    end = view.order[second]
    early = any(view.order.get(user, end + 1) < end for user in first.users if user is not second)
    return not early and view.modes_at(first).grad == view.modes_at(second).grad
