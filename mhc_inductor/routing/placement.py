# SPDX-License-Identifier: Apache-2.0
"""Proves that an op may stand where a formula stood, before the graph is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import Modes
from mhc_inductor.routing.graph.expressions import is_cast, loses
from mhc_inductor.routing.graph.values import Value, elements_read, example, fresh, reached, run, tensors_in
from mhc_inductor.routing.graph.view import View
from mhc_inductor.routing.interface import Match, Mismatch, Unplaced

WRITTEN = "a tensor of the formula is written in place before the formula ends"
TRACES = ("stack_trace", "source_fn_stack")
"""Keys in a node's meta that say which line of the user's code its value comes from."""
KEPT = "kept_submodule"
"""Key in the meta of a node of an exported program: the call of the innermost submodule around it that keeps its
signature. A formula does not cross the boundary of such a call."""
PASSED_ON = "passed_on"
"""Key in the meta of a node of an exported program: whether it is a result of such a submodule that a module inside it
computes. Something outside of that module must read it, or torch.export.unflatten loses it."""
_MODULES = ("nn_module_stack", KEPT)


def node_of(value: Value) -> fx.Node:
    """Returns the view's node of a value. Raises Mismatch for a value inside a composite operation."""
    if value.node is None:
        raise Mismatch(
            "an input or result of the op is inside one call of PyTorch, such as F.rms_norm, and has no graph node",
            value,
        )
    return value.node


def module_of(view: View, node: fx.Node) -> dict[str, Any]:
    """Returns the keys of a new node's meta that say in which submodule it stands, if it is put next to ``node``.

    It is the outermost module where ``node`` is an input or the output of the graph.
    """
    found = {k: node.meta[k] for k in _MODULES if k in node.meta}
    if node.op in ("placeholder", "output"):
        stacks = (n.meta[_MODULES[0]] for n in view.real_nodes if n.meta.get(_MODULES[0]))
        stack: dict[str, Any] = next(stacks, {})
        found[_MODULES[0]] = dict([*stack.items()][:1])
    return found


@dataclasses.dataclass
class Place:
    """The position of an op: it goes before ``anchor`` and runs in ``modes``.

    ``region`` holds the view's nodes of the formula, outputs included. ``trace`` is the op's source location, and the
    submodule that the anchor stands in: torch.export.unflatten makes a submodule of neighbouring nodes.
    """

    anchor: fx.Node
    modes: Modes
    region: set[fx.Node]
    trace: dict[str, Any]
    overwritten: list[fx.Node]
    """Inputs, as nodes of the view, that the op must read from a clone.

    They are written between the formula's first read and the anchor; or only the op, not the formula, saves them for
    its backward, and the graph returns or later writes them.
    """
    looks: dict[fx.Node, int]
    """Inputs, each with the position just before the formula first reads it."""


class Placement:
    """Finds where one match's op may stand."""

    def __init__(self, view: View, match: Match) -> None:
        self.view = view
        self.match = match
        self.ins = list(dict.fromkeys(node_of(v) for v in match.inputs))
        if not all(n in view.order for n in self.ins):
            raise Mismatch("the formula reads a tensor from outside the checkpointed region", match.start)
        self.outs = list(dict.fromkeys(node_of(v) for v in match.outputs))
        self.first = min(self.outs, key=view.defined)
        self.at = match.start

    def find(self) -> Place:
        """Returns the position. Raises Unplaced if inputs and results leave no room, or another Mismatch."""
        view = self.view
        region = self._region()
        looks = {n: self._looked_at(n, region) for n in self.ins}
        self._check_writes(region, looks)
        modes = self._modes(region)
        self._check_watched(region)
        self._check_outputs(region)
        self._check_kept(region)
        check_roundings(view, [*self.ins, *self.outs], region)
        anchor = self._anchor(region, modes)
        trace: dict[str, Any] = {k: self.first.meta[k] for k in TRACES[:1] if k in self.first.meta}
        trace |= module_of(view, anchor)
        at = view.position.get(anchor, len(view.position))
        overwritten = [n for n, look in looks.items() if view.written_between(n, at, after=look)]
        if any(view.written_between(n, looks[n] + 1, left=True) for n in overwritten):
            raise Mismatch(WRITTEN, self.at)
        overwritten += [n for n in changed_later(view, self.ins, region, at, modes) if n not in overwritten]
        return Place(anchor, view.modes[anchor], region, trace, overwritten, looks)

    def _looked_at(self, node: fx.Node, region: set[fx.Node]) -> int:
        """Returns the position just before the formula first reads an input."""
        made = self.view.defined(node)
        first = min((self.view.defined(u) for u in node.users if u in region), default=made + 1) - 1
        return max(first, made)

    def _region(self) -> set[fx.Node]:
        """Returns the view's nodes between inputs and outputs. Raises Unplaced if an input depends on an output."""
        ins, order = set(self.ins), self.view.order

        def inside(node: fx.Node) -> Iterator[fx.Node]:
            return (a for a in elements_read(node) if a not in ins and a in order and a.op.startswith("call_"))

        floor = min(order[o] for o in self.outs)
        above = reached(self.ins, lambda n: (a for a in n.all_input_nodes if order.get(a, -1) >= floor))
        if not above.keys().isdisjoint(self.outs):
            raise Unplaced("an input of the op depends on its result", self.at)
        return {*reached(self.outs, inside)}

    def _check_writes(self, region: set[fx.Node], looks: dict[fx.Node, int]) -> None:
        """Raises Mismatch if an in-place write that the view could not make functional lies within the formula."""
        last = max(self.view.defined(o) for o in self.outs)
        since = [*((n, None) for n in region), *looks.items()]
        if any(self.view.written_between(n, last + 1, left=True, after=at) for n, at in since):
            raise Mismatch(WRITTEN, self.at)

    def _modes(self, region: set[fx.Node]) -> Modes:
        """Returns the modes of the formula. Raises Mismatch if they change within it."""
        view = self.view
        flowing = [n for n in region if any(view.flows(a) for a in n.all_input_nodes)]
        # Nodes that no gradient flows into may be computed in any grad mode.
        grads = {view.modes_at(n).grad for n in flowing}
        if len(grads) > 1:
            raise Mismatch("gradients are switched on or off within the formula", self.at)
        first = view.modes_at(self.first)
        if len({view.modes_at(n).inference for n in region}) > 1:
            raise Mismatch("inference mode is switched on or off within the formula", self.at)
        return dataclasses.replace(first, grad=grads.pop()) if grads else first

    def _check_watched(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if a hook, or anything else that keeps a tensor, is on a value that disappears."""
        outs = set(self.outs)
        for node in region:
            inside = any(u in region for u in node.users)
            if node in outs and not inside:
                continue
            for user in node.users:
                effect = self.view.effects.of(self.view.reader.get(user, user))
                if user not in region and (effect.watches or not effect.known):
                    raise Mismatch("an intermediate result of the formula has a hook", self.view.value(node))

    def _check_outputs(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if a result shares memory with a tensor that stays, or is later written by another name."""
        view, outs = self.view, set(self.outs)
        for node in self.outs:
            if node in view.made and any(u in view.made and u not in region for u in node.users):
                raise Mismatch("a result of the formula is changed in place later", self.at)
            storages = {*view.effects.storages(node)}
            for other in region - outs:
                shared = not storages.isdisjoint(view.effects.storages(other))
                if shared and any(u not in region and u in view.live for u in other.users) and view.escapes(other):
                    raise Mismatch("a result of the formula shares memory with another result", self.at)

    def _check_kept(self, region: set[fx.Node]) -> None:
        """Raises Mismatch if the formula lies in part in a submodule whose inputs and outputs must stay the model's."""
        inside = region - set(self.outs)
        if len({n.meta.get(KEPT) for n in region}) > 1 or any(n.meta.get(PASSED_ON) for n in inside):
            raise Mismatch("the formula crosses the boundary of a submodule whose signature export preserves", self.at)

    def _anchor(self, region: set[fx.Node], modes: Modes) -> fx.Node:
        """Returns the node to insert before: the first result, or a later node if an input is computed later."""
        view = self.view
        real = view.real_nodes
        late = max((view.defined(n) for n in (*self.ins, *self.match.numbers)), default=-1)
        start = view.defined(self.first)
        uses = [view.defined(u) for o in self.outs for u in o.users if u not in region]
        end = min(uses, default=len(real) - 1)
        kept = self.first.meta.get(KEPT)
        for at in (start, *range(max(late + 1, start), end + 1)):
            here = view.modes[real[at]]
            alike = here.grad == modes.grad and here.inference == modes.inference
            if at > late and alike and real[at].meta.get(KEPT) == kept:
                return real[at]
        if late >= end:
            raise Unplaced("an input of the op is computed after one of its results is used", self.at)
        raise Mismatch("gradients are switched on or off within the formula", self.at)


def check_roundings(view: View, around: Iterable[fx.Node], region: Iterable[fx.Node]) -> None:
    """Raises Mismatch if ``region`` rounds to a dtype narrower than those of ``around``, the inputs and results.

    A cast of coefficients to the streams' dtype may be dropped: without it the result is closer to exact, and ops
    compute in fp32. Coefficients cast to fp8 between bf16 streams are a quantisation that the model wrote, and must
    stay. What autocast computes in a narrow dtype is not a cast of the model's.
    """
    kept = {torch.float32, *(d for n in around for d in _dtypes(n))}
    for node in region:
        narrow = [d for d in _dtypes(node) if not _holds(d, kept)]
        if not narrow or all(not _holds(d, kept) for a in node.all_input_nodes for d in _dtypes(a)):
            continue
        value = view.value(node)
        if view.modes_at(node).autocast and not (isinstance(value, Value) and is_cast(value)):
            continue
        raise Mismatch(
            f"an intermediate result is rounded to {narrow[0]}; no input or output of the op has that dtype", value
        )


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    return {t.dtype for t in tensors_in(example(node)) if t.is_floating_point()}


def _holds(dtype: torch.dtype, others: Iterable[torch.dtype]) -> bool:
    """Returns whether ``dtype`` represents every number of one of ``others``."""
    return not all(loses(dtype, other) for other in others)


# --- what autograd saves of a call for its backward, by asking PyTorch ---


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
