# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention in ``torch.ops.mhc_inductor``, and the one that selects blocks of keys.

This module has the schemas; ``derived.py`` makes the rest of them. The attention is over ranges of keys (native sparse
attention), lists of single keys, lists with a bias per entry, or under a mask that is data, ``[B or 1, S, G or 1, S_kv]``,
the order of q's dimensions. ``v`` of None means that the values are the first ``v_width`` columns of the keys, which are
then read once and get one gradient.

The second output, lse, has a gradient too; ranges, indices, boundaries and segment ids have none. A bias and a mask have
none either: one that requires a gradient raises. Double backward raises RuntimeError.

``selection_blocks`` (arXiv 2502.11089, section 3.3.2) loops over chunks of queries to bound its memory, which a graph with
dynamic sizes cannot express. Therefore generated code calls the op, and an AOTInductor package that holds it needs Python.
It has no gradient: its outputs are integers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from mhc_inductor.kernels.cpu import selection as cpu
from mhc_inductor.kernels.cpu import selection_lists as cpu_lists
from mhc_inductor.kernels.cpu import selection_masks as cpu_masks
from mhc_inductor.ops.derived import define_ops, gradient
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection, selection_blocks, selection_entries, selection_lists, selection_masks

_BOUNDARIES = "Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_BLOCKS = "(Tensor q, Tensor k, Tensor lse, float scale, int length, int stride, int block, int count, SymInt s_kv)"


def given(*segments: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the arguments for segments_q and segments_k: none where neither is a tensor."""
    return () if all(t is None for t in segments) else segments


def _define(
    name: str, tensors: str, options: str, formulas: ModuleType, on_cpu: ModuleType | None = None, refused: Any = None
) -> None:
    """Defines an attention and its backward op; ``refused``: an input, and the error and its text if that requires a gradient."""
    schemas = {
        name: f"({tensors}, {options}) -> (Tensor o, Tensor lse)",
        f"{name}_backward": f"(Tensor? dout, Tensor? dlse, {tensors}, Tensor o, Tensor lse, {options}) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    }
    setup, backward = gradient(name)

    def checked(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if refused is not None and ctx.needs_input_grad[refused[0]]:
            raise refused[1](refused[2])
        setup(ctx, inputs, output)

    define_ops(schemas, formulas, on_cpu, gradients={name: (checked, backward)})


_define(
    "selection_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor ranges, {_BOUNDARIES}",
    "float scale, Tensor? segments_q=None, Tensor? segments_k=None",
    selection,
    cpu,
)
define_ops({"selection_blocks": f"{_BLOCKS} -> Tensor blocks"}, selection_blocks)
_define(
    "selection_entry_attention",
    "Tensor q, Tensor k, Tensor? v, Tensor indices, Tensor bias, Tensor? sink",
    "float scale, SymInt v_width, bool repeats",
    selection_entries,
    refused=(4, RuntimeError, "mhc_inductor: selection_attention has no gradient for bias; pass bias.detach()"),
)
_define(
    "selection_list_attention",
    f"Tensor q, Tensor k, Tensor? v, Tensor indices, {_BOUNDARIES}, Tensor? segments_q, Tensor? segments_k",
    "float scale, SymInt v_width",
    selection_lists,
    cpu_lists,
)
_define(
    "selection_mask_attention",
    "Tensor q, Tensor k, Tensor? v, Tensor mask, Tensor? sink",
    "float scale, SymInt v_width",
    selection_masks,
    cpu_masks,
    refused=(
        3,
        ValueError,
        "selection_attention: mask must not require a gradient, got one that does; pass mask.detach(), "
        "or write out the softmax where the mask is learned",
    ),
)
