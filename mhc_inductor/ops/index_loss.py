# SPDX-License-Identifier: Apache-2.0
"""The op of an indexer's training loss.

Its second output is the gradient of the loss with respect to the listed scores, so that the backward gathers no keys of
the attention. Double backward raises RuntimeError.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import call as call
from mhc_inductor.ops.registry import define, needed
from mhc_inductor.reference import index_loss as reference
from mhc_inductor.reference.mhc import acc_dtype

SCHEMAS = {
    "index_loss": (
        "(Tensor q, Tensor k, Tensor w, Tensor indices, Tensor attention_q, Tensor attention_k, Tensor? lse, "
        "float scale, float attention_scale) -> (Tensor loss, Tensor dscores)"
    ),
    "index_loss_backward": (
        "(Tensor dloss, Tensor q, Tensor k, Tensor w, Tensor indices, Tensor dscores, float scale) "
        "-> (Tensor dq, Tensor dk, Tensor dw)"
    ),
}


def _fake(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = acc_dtype(q.dtype)
    return q.new_empty(q.shape[:2], dtype=dtype), q.new_empty(indices.shape, dtype=dtype)


def _backward_fake(dloss: Tensor, q: Tensor, k: Tensor, w: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, w, indices, *_, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, w, indices, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dloss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dloss is None or not any(ctx.needs_input_grad[:3]):
        return needed(ctx)
    # The attention's tensors are the target: they have no gradient.
    grads = call("index_loss_backward", dloss, *ctx.saved_tensors, ctx.scale)
    return needed(ctx, *grads, *[None] * (len(ctx.needs_input_grad) - 3))


define(
    "index_loss",
    SCHEMAS["index_loss"],
    reference.index_loss,
    _fake,
    (_setup, _grad),
    functools.partial(into_batch, "index_loss"),
)
define(
    "index_loss_backward",
    SCHEMAS["index_loss_backward"],
    reference.index_loss_backward,
    _backward_fake,
    None,
    functools.partial(into_batch, "index_loss_backward"),
)
