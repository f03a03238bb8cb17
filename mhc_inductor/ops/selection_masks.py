# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention under a mask that is data, in ``torch.ops.mhc_inductor``.

The mask is ``[B or 1, S, G or 1, S_kv]``, the order of q's dimensions. It has no gradient: one that requires a gradient
raises ValueError. ``v`` of None means that the values are the first ``v_width`` columns of the keys, which are then read
once and get one gradient. The second output, lse, has a gradient too. Double backward raises RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mhc_inductor.kernels.cpu import selection_masks as cpu
from mhc_inductor.ops import selection_lists
from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import Gradient, define, implement, needed
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection_masks as reference

_INPUTS = "Tensor q, Tensor k, Tensor? v, Tensor mask, Tensor? sink"
SCHEMAS = {
    "selection_mask_attention": f"({_INPUTS}, float scale, SymInt v_width) -> (Tensor o, Tensor lse)",
    "selection_mask_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, SymInt v_width) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if ctx.needs_input_grad[3]:
        raise ValueError(
            "selection_attention: mask must not require a gradient, got one that does; pass mask.detach(), "
            "or write out the softmax where the mask is learned"
        )
    *tensors, ctx.scale, ctx.v_width = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return needed(ctx)
    saved = ctx.saved_tensors
    dq, dk, dv, dsink = call("selection_mask_attention_backward", dout, dlse, *saved, ctx.scale, ctx.v_width)
    return needed(ctx, dq, dk, None if saved[2] is None else dv, None, dsink)


_GRADIENTS: dict[str, Gradient] = {"selection_mask_attention": (_setup, _grad)}
# The outputs are those of attention over lists.
_FAKES: dict[str, Callable[..., Any]] = {
    "selection_mask_attention": selection_lists.fake,
    "selection_mask_attention_backward": selection_lists.backward_fake,
}

for _name, _its_fake in _FAKES.items():
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _its_fake,
        _GRADIENTS.get(_name),
        functools.partial(into_batch, _name),
    )
    implement(_name, getattr(cpu, _name), "CPU")
