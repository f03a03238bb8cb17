# SPDX-License-Identifier: Apache-2.0
"""The selection attention ops (the selected branch of native sparse attention) in ``torch.ops.mhc_inductor``.

This module defines the schemas, fakes and gradients of the attention and its backward op; ``registry.py`` registers
them.

The second output, lse, has a gradient too; ranges, boundaries and segment ids have none. Double backward raises RuntimeError.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mhc_inductor.kernels.cpu import selection as cpu
from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import Gradient, define, implement, needed
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection as reference
from mhc_inductor.reference.mhc import acc_dtype

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor ranges, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_SEGMENTS = "Tensor? segments_q=None, Tensor? segments_k=None"
SCHEMAS = {
    "selection_attention": f"({_INPUTS}, float scale, {_SEGMENTS}) -> (Tensor o, Tensor lse)",
    "selection_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, {_SEGMENTS}) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}


# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, s, groups, heads, _width = q.shape
    row = (batch, s, groups, heads)
    return q.new_empty((*row, v.shape[3])), q.new_empty(row, dtype=acc_dtype(q.dtype))


def _backward_fake(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    dsink = q.new_empty((0,), dtype=acc_dtype(q.dtype)) if sink is None else sink.new_empty(sink.shape)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dsink)


# --- gradients ----------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs[:8]
    ctx.save_for_backward(*tensors, *output, *inputs[8:])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return needed(ctx)
    saved = ctx.saved_tensors
    segments = given(*saved[9:])
    dq, dk, dv, dsink = call("selection_attention_backward", dout, dlse, *saved[:9], ctx.scale, *segments)
    return needed(ctx, dq, dk, dv, None, dsink)


def given(*segments: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the arguments for segments_q and segments_k: none where neither is a tensor."""
    return () if all(t is None for t in segments) else segments


_GRADIENTS: dict[str, Gradient] = {"selection_attention": (_setup, _grad)}

for _name, _its_fake in (("selection_attention", _fake), ("selection_attention_backward", _backward_fake)):
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _its_fake,
        _GRADIENTS.get(_name),
        functools.partial(into_batch, _name),
    )
    implement(_name, getattr(cpu, _name), "CPU")
