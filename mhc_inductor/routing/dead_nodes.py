# SPDX-License-Identifier: Apache-2.0
"""Finds nodes that are no longer needed once formulas are replaced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mhc_inductor.routing.graph.values import example, reached
from mhc_inductor.routing.graph.view import GRAD, View


def unneeded(view: View, formulas: set[fx.Node]) -> set[fx.Node]:
    """Returns the real nodes of ``formulas`` that nothing else reads, in-place steps on their own tensors included."""
    # Dynamo leaves dead code in its graphs. New nodes, which read sizes of the formulas' tensors, are not in the view.
    unread = reached(formulas, lambda n: (user for user in n.users if user in view.order and user not in view.live))
    gone = {view.node(n) for n in unread if n.op.startswith("call_")}
    # The view knows in-place steps on the formulas' tensors under other nodes: add the real ones.
    gone |= {node for _, _, node in view.events if gone.issuperset(view.effects.written(node))}
    before = -1
    while before != len(gone):
        before = len(gone)
        # Readers come later, so one sweep from the end settles everything except nodes that in-place steps read.
        for n in sorted(gone, key=view.position.__getitem__, reverse=True):
            if not gone.issuperset(n.users) or not _removable(view, n, gone):
                gone.discard(n)
    return gone


def _removable(view: View, node: fx.Node, gone: set[fx.Node]) -> bool:
    """Returns whether a node has no effect other than writes to tensors that only nodes of ``gone`` hold."""
    effect, targets = view.effects.of(node), view.effects.written(node)
    if (example(node) is None and not targets) or not effect.known or (effect.watches and not effect.writes):
        return False
    return all(gone.issuperset(view.holders[s]) for n in targets for s in view.effects.storages(n))


def pure(view: View, node: fx.Node) -> bool:
    """Returns whether a node does nothing but compute its result."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or example(node) is None:
        return False
    effect = view.effects.of(node)
    return effect.known and not effect.writes and not effect.watches and view.values.inspectable(node)


def share_memory(view: View, replaced: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Records the views of each replaced result as views of its replacement, for the operators that run next."""
    for old, new in replaced:
        if isinstance(example(view.node(old)), torch.Tensor):
            (was,), (now,) = view.storages(old), view.effects.storages(new)
            for user in view.holding(new, {was})[1:]:
                user.meta[GRAD] = view.flows(user)
                view.effects.move(user, was, now)
