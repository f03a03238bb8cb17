# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that exported programs need.

- torch._C._set_grad_enabled: the call that switches grad mode
- torch._decomp.core_aten_decompositions: the table of a program that is not for training
- torch._export.passes.replace_autocast_with_hop_pass.replace_autocast_with_hop_pass: makes regions of autocast
- torch._export.passes.replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass: makes regions of grad modes
- torch._export.verifier.Verifier.dialect: TRAINING while a program has composite operations
- torch._higher_order_ops.wrap.wrap_with_autocast: a region under autocast
- torch._higher_order_ops.wrap.wrap_with_set_grad_enabled: a region under another grad mode
- torch.amp.autocast_mode._enter_autocast: the call that enters autocast
- torch.amp.autocast_mode._exit_autocast: the call that leaves it
- torch.export.ExportedProgram.verifiers: says what form a program has
- torch.fx.experimental.proxy_tensor.make_fx: traces operations of core ATen, or composite ones
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mhc_inductor.compat import shared


def is_mode_region(node: Any) -> bool:
    """Returns whether a node of an exported graph calls a region under another grad mode, or under autocast."""
    from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

    return node.op == "call_function" and node.target in (wrap_with_autocast, wrap_with_set_grad_enabled)


def mode_region(node: Any) -> tuple[tuple[Any, Any], tuple[Any, Any], Any, tuple[Any, ...]]:
    """Returns the parts of a call for which :func:`is_mode_region` holds.

    Returns:
        (call that enters the mode, its arguments), (call that leaves it, its arguments; None for what the first call
        returned), the node that holds the region's graph, and the inputs of that graph.
    """
    from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
    from torch.amp import autocast_mode

    if node.target is wrap_with_set_grad_enabled:
        enabled, holder, *inputs = node.args
        change: Any = torch._C._set_grad_enabled
        return (change, (enabled,)), (change, (not enabled,)), holder, tuple(inputs)
    *mode, holder = node.args[:5]
    enter, leave = autocast_mode._enter_autocast, autocast_mode._exit_autocast
    return (enter, tuple(mode)), (leave, None), holder, tuple(node.args[5:])


def with_mode_regions(gm: Any, signature: Any) -> tuple[Any, Any]:
    """Returns an exported graph, and its signature, with regions made of calls that switch modes."""
    from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
    from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass

    return replace_autocast_with_hop_pass(*replace_set_grad_with_hop_pass(gm, signature))


def traced(fn: Callable[..., Any], inputs: Sequence[Any], mode: Any, composite: bool) -> Any:
    """Returns the graph of the ATen operations that ``fn`` runs on fake tensors and sizes. Adds no guards.

    Args:
        fn: a function of tensors and sizes.
        inputs: its arguments.
        mode: the fake mode of the tensors, or None.
        composite: keep composite operations, such as ``reshape``. Else the graph has core ATen operations only.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    table = None if composite else _core_decompositions()
    with torch.no_grad(), mode or contextlib.nullcontext(), shared.no_new_guards(mode):
        return make_fx(fn, decomposition_table=table, tracing_mode="real", pre_dispatch=composite)(*inputs)


@functools.cache
def _core_decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


def for_training(program: Any) -> bool:
    """Returns whether an exported program still holds composite and in-place operations."""
    return any(verifier.dialect == "TRAINING" for verifier in program.verifiers)


def with_graph(program: Any, gm: Any, signature: Any, calls: Any) -> Any:
    """Returns an exported program with another graph, signature and module call graph, and the same parameters.

    torch checks the new program.
    """
    return torch.export.ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
