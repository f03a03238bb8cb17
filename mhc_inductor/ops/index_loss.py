# SPDX-License-Identifier: Apache-2.0
"""The op of an indexer's training loss.

Its second output is the gradient of the loss with respect to the listed scores, so that the backward gathers no keys of
the attention. Double backward raises RuntimeError.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops import checks_index
from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.checks import _floating, _shape, _text, integers, number
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


def check(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    lse: Tensor | None,
    scale: float,
    attention_scale: float,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``index_loss`` fit together."""
    op = "index_loss"
    _index(op, q, k, w, indices, scale)
    _floating(op, q=q, attention_q=attention_q)
    _floating(op, q=q, attention_k=attention_k)
    if attention_q.dim() != 5:
        raise ValueError(f"{op}: attention_q must have shape [B, S, G, h, Dk], got {_text(attention_q.shape)}")
    groups, heads, width = attention_q.shape[2:]
    rows = [*q.shape[:2], groups, heads]
    _shape(op, "attention_q", attention_q, [*rows, width], "[B, S, G, h, Dk]")
    for name, size in (("G", groups), ("h", heads), ("Dk", width)):
        torch._check_value(
            size >= 1, lambda name=name: f"{op}: attention_q[B, S, G, h, Dk] must have {name} of at least 1, got 0"
        )
    _shape(op, "attention_k", attention_k, [k.shape[0], groups, k.shape[1], width], "[B, G, T, Dk]")
    if attention_k.dtype is not attention_q.dtype:
        raise TypeError(f"{op}: attention_k must have attention_q's dtype {attention_q.dtype}, got {attention_k.dtype}")
    if lse is not None:
        _floating(op, q=q, lse=lse)
        _shape(op, "lse", lse, rows, "[B, S, G, h]")
    number(op, "attention_scale", attention_scale)


def check_backward(
    dloss: Tensor, q: Tensor, k: Tensor, w: Tensor, indices: Tensor, dscores: Tensor, scale: float
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``index_loss_backward`` fit together."""
    op = "index_loss_backward"
    _index(op, q, k, w, indices, scale)
    _floating(op, q=q, dloss=dloss, dscores=dscores)
    _shape(op, "dloss", dloss, q.shape[:2], "[B, S]")
    _shape(op, "dscores", dscores, indices.shape, "[B, S, n]")


def _index(op: str, q: Tensor, k: Tensor, w: Tensor, indices: Tensor, scale: float) -> None:
    checks_index.tensors(op, q, k, w)
    integers(op, "indices", indices, q)
    if indices.dim() != 3:
        raise ValueError(f"{op}: indices must have shape [B, S, n], got {_text(indices.shape)}")
    _shape(op, "indices", indices, [*q.shape[:2], indices.shape[2]], "[B, S, n]")
    number(op, "scale", scale)


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
    check,
    functools.partial(into_batch, "index_loss"),
)
define(
    "index_loss_backward",
    SCHEMAS["index_loss_backward"],
    reference.index_loss_backward,
    _backward_fake,
    None,
    check_backward,
    functools.partial(into_batch, "index_loss_backward"),
)
