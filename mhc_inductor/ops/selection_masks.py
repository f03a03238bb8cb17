# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention under a mask that is data, in ``torch.ops.mhc_inductor``.

The mask is ``[B or 1, S, G or 1, S_kv]``, the order of q's dimensions. It has no gradient: one that requires a gradient
raises ValueError. ``v`` of None means that the values are the first ``v_width`` columns of the keys, which are then read
once and get one gradient. The second output, lse, has a gradient too. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor.kernels.cpu import selection_masks as cpu
from mhc_inductor.ops.derived import define_ops, gradient
from mhc_inductor.reference import selection_masks as reference

_INPUTS = "Tensor q, Tensor k, Tensor? v, Tensor mask, Tensor? sink"
SCHEMAS = {
    "selection_mask_attention": f"({_INPUTS}, float scale, SymInt v_width) -> (Tensor o, Tensor lse)",
    "selection_mask_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, SymInt v_width) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}

_SETUP, _BACKWARD = gradient("selection_mask_attention")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    if ctx.needs_input_grad[3]:
        raise ValueError(
            "selection_attention: mask must not require a gradient, got one that does; pass mask.detach(), "
            "or write out the softmax where the mask is learned"
        )
    _SETUP(ctx, inputs, output)


define_ops(SCHEMAS, reference, cpu, gradients={"selection_mask_attention": (_setup, _BACKWARD)})
