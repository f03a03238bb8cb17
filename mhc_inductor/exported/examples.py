# SPDX-License-Identifier: Apache-2.0
"""Gives each node of an exported graph the fake value that the routing pass reads.

Export leaves values without gradients and, after loading from a file, without shared memory. Both matter to the pass, so
every node is run again on fake tensors, in its grad and autocast modes.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.effects import Modes, modes_of
from mhc_inductor.routing.graph.values import example, fresh, run, tensors_in

KEY = "example_value"


def fill(gm: fx.GraphModule, needs_grad: Mapping[str, bool], outer: Modes) -> None:
    """Runs a graph, and the bodies of its operators, on fake tensors.

    Args:
        gm: the graph. Its nodes hold fake values in ``meta["val"]``; the new ones are in ``meta["example_value"]``.
        needs_grad: whether the inputs, by name, may require gradients; those of a body are not known.
        outer: the modes that the graph starts in.
    """
    mode = _mode(gm)
    modes = modes_of(gm.graph, outer)
    with mode or contextlib.nullcontext(), compat.no_new_guards(mode):
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta[KEY] = _like(node.meta.get("val"), needs_grad.get(node.name, False))
            elif node.op == "call_function" or node.op == "call_method":
                with torch.set_grad_enabled(modes[node].grad), modes[node].entered():
                    node.meta[KEY] = _run(node)
    for held in gm.graph.find_nodes(op="get_attr"):
        if isinstance(body := getattr(gm, str(held.target), None), fx.GraphModule):
            fill(body, {}, modes[next(iter(held.users), held)])


def _mode(gm: fx.GraphModule) -> Any:
    """Returns the fake mode of most values: export keeps one of their own for some constants."""
    modes = (compat.fake_mode_of(tensors_in(node.meta.get("val"))) for node in gm.graph.nodes)
    counted = collections.Counter(mode for mode in modes if mode is not None)
    return max(counted, key=counted.__getitem__, default=None)


def _like(value: Any, grad: bool) -> Any:
    """Returns new fake tensors like ``value``. Those that need gradients are not leaves: a graph may write them."""

    def made(t: torch.Tensor) -> torch.Tensor:
        wanted = grad and (t.is_floating_point() or t.is_complex())
        with torch.enable_grad():
            return fresh(t, True).view_as(t) if wanted else fresh(t, False)

    return compat.tree_map_only(torch.Tensor, made, value)


def _run(node: fx.Node) -> Any:
    """Returns the result of a node on its inputs' values, or a copy of the exported value where it cannot be run."""
    known = node.meta.get("val")
    inputs = [t for a in node.all_input_nodes for t in tensors_in(example(a))]
    flows = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if isinstance(node.target, compat.HigherOrderOperator):
        return _like(known, flows)
    if compat.mode_change(node) is not None:
        return known
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), example)
    try:
        made = run(node, args, kwargs)
    except Exception:  # what only export can run keeps export's value
        return _like(known, flows)
    # A size that depends on data gets a new symbol here, which the program does not know.
    return made if known is None or _sizes(made) == _sizes(known) else _like(known, flows)


def _sizes(value: Any) -> list[str]:
    return [str((*t.shape,)) for t in tensors_in(value)] or [str(value)]
