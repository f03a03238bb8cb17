# SPDX-License-Identifier: Apache-2.0
"""Runs single nodes on fake values."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.routing.graph.values import example, run, tensors_in


def fresh(t: torch.Tensor, grad: bool) -> torch.Tensor:
    """Returns a new tensor with the shape, strides, dtype and device of ``t``, in the current fake mode."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(grad)


def run_fake(node: fx.Node) -> Any:
    """Returns the result of ``node`` on the fake values of its inputs. Adds no guards."""
    values, options = fx.node.map_arg(node.args, example), fx.node.map_arg(node.kwargs, example)
    mode = compat.fake_mode_of([e for a in node.all_input_nodes for e in tensors_in(example(a))])
    with torch.no_grad(), mode or contextlib.nullcontext(), compat.no_new_guards(mode):
        return run(node, values, options)
