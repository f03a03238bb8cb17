"""What nothing needs any more once formulas are replaced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mhc_inductor.routing.graph.values import example
from mhc_inductor.routing.graph.view import GRAD, View


def unneeded(view: View, formulas: set[fx.Node]) -> set[fx.Node]:
    """Returns the real nodes of ``formulas`` that nothing else reads, in-place steps on their own tensors included."""
    gone = {view.node(n) for n in formulas | _unread(view, formulas) if n.op.startswith("call_")}
    # Results of in-place steps on what the formulas made are known to the view under another name.
    gone |= {node for _, _, node in view.events if gone.issuperset(view.effects.written(node))}
    before = -1
    while before != len(gone):
        before = len(gone)
        # Readers come later in the graph: one look from its end settles all but what in-place steps hold.
        for n in sorted(gone, key=view.position.__getitem__, reverse=True):
            if not gone.issuperset(n.users) or not _removable(view, n, gone):
                gone.discard(n)
    return gone


def _unread(view: View, formulas: set[fx.Node]) -> set[fx.Node]:
    """What is computed from the formulas and never read: Dynamo leaves dead code in its graphs."""
    found: set[fx.Node] = set()
    todo = list(formulas)
    while todo:
        new = [user for user in todo.pop().users if user not in view.live and user not in found]
        found.update(new)
        todo += new
    return found


def _removable(view: View, node: fx.Node, gone: set[fx.Node]) -> bool:
    effect, targets = view.effects.of(node), view.effects.written(node)
    if (example(node) is None and not targets) or not effect.known or (effect.watches and not effect.writes):
        return False
    return all(gone.issuperset(view.holders[s]) for n in targets for s in view.effects.storages(n))


def pure(view: View, node: fx.Node) -> bool:
    """Whether a node does nothing but compute its result."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method") or example(node) is None:
        return False
    effect = view.effects.of(node)
    return effect.known and not effect.writes and not effect.watches and view.values.inspectable(node)


def share_memory(view: View, replaced: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Makes views of what was replaced views of what took its place, for the operator that looks at the graph next."""
    for old, new in replaced:
        if isinstance(example(view.node(old)), torch.Tensor):
            (was,), (now,) = view.storages(old), view.effects.storages(new)
            for user in view.holding(new, {was})[1:]:
                user.meta[GRAD] = view.flows(user)
                view.effects.move(user, was, now)
