# SPDX-License-Identifier: Apache-2.0
"""Finds what autograd saves of a call for its backward, by asking PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import Modes
from mhc_inductor.routing.graph.values import example, fresh, reached, run, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Mismatch


def saved_by(node: fx.Node, flows: Callable[[fx.Node], bool], modes: Modes) -> tuple[set[fx.Node], set[int]] | None:
    """Returns the inputs that the backward of a call saves, and the positions of the results that it saves.

    Runs the call once on new fake tensors; those require gradients for which ``flows`` says so. Returns None if PyTorch
    cannot run it alone.
    """
    mode = compat.fake_mode_of([t for a in node.all_input_nodes for t in tensors_in(example(a))])
    if mode is None:
        return None
    kept: set[int] = set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.add(compat.storage_key(t))
        return t

    try:
        with compat.routing.modes_kept(), torch.enable_grad(), modes.entered(), mode, compat.no_new_guards(mode):
            given = {a: _fresh(example(a), flows(a)) for a in node.all_input_nodes}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = run(node, args, kwargs)
    except Exception:  # not every call can be run alone
        return None
    inputs = {a for a, made in given.items() if any(compat.storage_key(t) in kept for t in tensors_in(made))}
    return inputs, {i for i, t in enumerate(tensors_in(out)) if compat.storage_key(t) in kept}


def _fresh(of: Any, flows: bool) -> Any:
    def made(t: torch.Tensor) -> torch.Tensor:
        return fresh(t, flows and (t.is_floating_point() or t.is_complex()))

    return compat.tree_map_only(torch.Tensor, made, of)


def changed_later(view: View, ins: Iterable[fx.Node], region: set[fx.Node], at: int, modes: Modes) -> list[fx.Node]:
    """Returns inputs that only the op, not the formula, saves for its backward, and that may be written before it runs.

    These are inputs that the graph returns, or writes after position ``at``. Raises Mismatch if a tensor of the formula
    is written without autograd knowing: some of its gradients would see the write and others not.
    """
    ins = list(ins)
    if not modes.grad or not any(map(view.flows, ins)):
        return []
    steps = {view.reader.get(n, n) for n in region}
    _check_hidden(view, ins, region, at, steps)
    found = []
    for node in ins:
        returned = node.op not in ("placeholder", "get_attr") and not view.returned.isdisjoint(view.storages(node))
        if (returned or _changed(view, node, at, steps)) and not _kept(view, node, region):
            found.append(node)
    return found


def _changed(view: View, node: fx.Node, after: int, steps: set[fx.Node]) -> bool:
    """Returns whether anything but ``steps`` writes the memory of a view's node after a position."""
    end = len(view.real_nodes)
    late = view.written_between(node, end, after=after)
    return late and any(w not in steps for w in view.writers(node, after, end))


def _check_hidden(view: View, ins: list[fx.Node], region: set[fx.Node], at: int, steps: set[fx.Node]) -> None:
    """Raises Mismatch if a tensor that the formula saves, or an input, is later written through its ``.data``."""
    hidden = {key for node in view.hiding for key in view.effects.storages(node)}
    for node in (*ins, *region) if hidden else ():
        inside = node in region
        after = view.defined(node) if inside else at
        if hidden.isdisjoint(view.storages(node)) or not _changed(view, node, after, steps):
            continue
        if not inside or _kept(view, node, region) or _keeps_result(view, node):
            raise Mismatch("a tensor of the formula is written through its .data later", view.value(node))


def _keeps_result(view: View, node: fx.Node) -> bool:
    """Returns whether autograd saves the result of a call for the call's own backward."""
    modes = view.modes_at(node)
    saved = saved_by(node, view.flows, modes) if modes.grad else (set(), set())
    return saved is None or bool(saved[1])


def _kept(view: View, node: fx.Node, region: set[fx.Node]) -> bool:
    """Returns whether autograd saves a tensor, or a view of it, for the backward of a formula."""
    mine = {*view.storages(node)}
    views = reached([node], lambda n: (u for u in n.users if u in region and not mine.isdisjoint(view.storages(u))))
    for user in dict.fromkeys(u for n in views for u in n.users if u in region and u not in views):
        saved = saved_by(user, view.flows, view.modes_at(user)) if view.modes_at(user).grad else None
        if saved is not None and not saved[0].isdisjoint(views):
            return True
    return False
