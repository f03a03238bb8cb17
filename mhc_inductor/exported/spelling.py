# SPDX-License-Identifier: Apache-2.0
"""Rewrites the ATen calls of an exported graph that Dynamo's graphs spell otherwise, and undoes it where nothing changed.

Exported graphs write in place by operators such as ``aten.add_.Tensor``, index by ``aten.slice.Tensor``, hold a constant
number as an input, and check the dtypes of values.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.exported.examples import KEY
from mhc_inductor.exported.inlining import bodies

aten = torch.ops.aten
_IN_PLACE = {"__ior__": operator.ior, "__iand__": operator.iand, "__ixor__": operator.ixor}
"""In-place operators of ATen that no method of a tensor spells."""
_END = 1 << 62
"""Ends of slices from here on mean the end of the dimension."""


@dataclasses.dataclass
class _Original:
    """How export wrote a node, and the arguments that it was given instead."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any = ()

    def restore(self, node: fx.Node, present: set[fx.Node]) -> None:
        """Writes the node as export did, unless its arguments were rearranged and have changed since."""
        if self.args == self.given:
            node.op, node.target = self.op, self.target
        elif node.args == self.given and all(a in present for a in self.args if isinstance(a, fx.Node)):
            node.op, node.target, node.args, node.kwargs = self.op, self.target, self.args, self.kwargs


class Spelling:
    """Rewrites one graph and the bodies of its operators. ``numbers``: the values of inputs that are constants."""

    def __init__(self, gm: fx.GraphModule, numbers: Mapping[str, Any]) -> None:
        self.gm = gm
        self._originals: dict[fx.Node, _Original] = {}
        self._constants: list[tuple[fx.Node, fx.Node]] = []
        self._checks: list[tuple[fx.Node, Any, Any, dict[str, Any], dict[str, Any]]] = []
        self._bodies = [Spelling(body, {}) for body in bodies(gm)]
        for node in list(gm.graph.nodes):
            if node.op == "placeholder" and node.name in numbers:
                self._constant(node, numbers[node.name])
            elif node.op == "call_function":
                self._rewrite(node)

    def undo(self) -> None:
        """Writes what is still as rewritten as export wrote it, in this graph and the bodies."""
        for body in self._bodies:
            body.undo()
        present = set(self.gm.graph.nodes)
        for node, original in self._originals.items():
            if node in present:
                original.restore(node, present)
        for made, placeholder in self._constants:
            if made in present:
                made.replace_all_uses_with(placeholder)
                self.gm.graph.erase_node(made)
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        for node, target, args, kwargs, meta in self._checks:
            # Not right after the tensor: a check belongs to the module that reads it.
            if node in order and node.users:
                first = min(node.users, key=lambda user: order.get(user, len(order)))
                if first.meta.get("nn_module_stack"):
                    meta["nn_module_stack"] = first.meta["nn_module_stack"]
                with self.gm.graph.inserting_before(first):
                    self.gm.graph.call_function(target, args, kwargs).meta.update(meta)
        self.gm.recompile()

    def _constant(self, placeholder: fx.Node, value: torch.Tensor) -> None:
        """Makes the users of a constant input read a call that makes the number."""
        first = next(n for n in self.gm.graph.nodes if n.op != "placeholder")
        users = list(placeholder.users)
        with self.gm.graph.inserting_before(first):
            options: Any = {"dtype": value.dtype, "device": value.device}
            made = self.gm.graph.call_function(torch.tensor, (value.item(),), options)
        made.meta["val"] = placeholder.meta["val"]
        for user in users:
            user.replace_input_with(placeholder, made)
        self._constants.append((made, placeholder))

    def _rewrite(self, node: fx.Node) -> None:
        if node.target is aten._assert_tensor_metadata.default and isinstance(node.args[0], fx.Node):
            self._checks.append((node.args[0], node.target, node.args, dict(node.kwargs), dict(node.meta)))
            self.gm.graph.erase_node(node)
            return
        spelled = _spelled(node)
        if spelled is None:
            return
        original = self._originals[node] = _Original(node.op, node.target, node.args, dict(node.kwargs))
        node.op, node.target, node.args = spelled
        original.given = node.args
        if node.target is operator.getitem:
            node.kwargs = {}


def _spelled(node: fx.Node) -> tuple[str, Any, tuple[Any, ...]] | None:
    """Returns how a Dynamo graph writes a call: (op, target, arguments), or None if it writes it the same way."""
    target = node.target
    if not isinstance(target, compat.OpOverload) or target.namespace != "aten":
        return None
    name = target.__name__.partition(".")[0]
    if name in _IN_PLACE:
        return "call_function", _IN_PLACE[name], node.args
    if target in (aten.detach_.default, aten.lift_fresh_copy.default):
        # On a constant, both change nothing but who owns the memory.
        return "call_method", "detach" if target is aten.detach_.default else "clone", node.args
    if target._schema.is_mutable and name.endswith("_") and hasattr(torch.Tensor, name):
        return "call_method", name, node.args
    if target in (aten.slice.Tensor, aten.select.int):
        return _indexed(node)
    return None


def _indexed(node: fx.Node) -> tuple[str, Any, tuple[Any, ...]] | None:
    """Returns a slice or a choice of an index as ``x[index]``, joined with such a step before it that nothing else reads."""
    names = ("self", "dim", "start", "end", "step") if node.target is aten.slice.Tensor else ("self", "dim", "index")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, dim = given["self"], given.get("dim", 0)
    value = x.meta.get(KEY, x.meta.get("val"))
    if not isinstance(value, torch.Tensor) or not isinstance(dim, int):
        return None
    if node.target is aten.slice.Tensor:
        start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
        end = None if isinstance(end, int) and end >= _END else end
        picked: Any = slice(start or None, end, None if step == 1 else step)
    else:
        picked = given["index"]
    at = dim % max(1, value.dim())
    index = (*[slice(None)] * at, picked)
    joined = _joined(x, at, picked)
    return "call_function", operator.getitem, joined or (x, index)


def _joined(x: fx.Node, at: int, picked: Any) -> tuple[Any, ...] | None:
    if x.target is not operator.getitem or len(x.users) != 1 or not isinstance(x.args[1], tuple):
        return None
    earlier = x.args[1]
    if any(not isinstance(i, slice) for i in earlier):
        return None
    filled = [*earlier, *[slice(None)] * (at + 1 - len(earlier))]
    if filled[at] != slice(None):
        return None
    filled[at] = picked
    return x.args[0], tuple(filled)
