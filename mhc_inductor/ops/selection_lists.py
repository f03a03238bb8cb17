# SPDX-License-Identifier: Apache-2.0
"""The ops of selection attention over lists of single keys in ``torch.ops.mhc_inductor``.

``v`` of None means that the values are the first ``v_width`` columns of the keys, which are then read once and get one
gradient. The second output, lse, has a gradient too; indices, boundaries and segment ids have none. Double backward
raises RuntimeError.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mhc_inductor.kernels.cpu import selection_lists as cpu
from mhc_inductor.ops.batching import into_batch
from mhc_inductor.ops.registry import Gradient, define, implement, needed
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import selection_lists as reference
from mhc_inductor.reference.mhc import acc_dtype

_INPUTS = (
    "Tensor q, Tensor k, Tensor? v, Tensor indices, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? segments_q, Tensor? segments_k"
)
SCHEMAS = {
    "selection_list_attention": f"({_INPUTS}, float scale, SymInt v_width) -> (Tensor o, Tensor lse)",
    "selection_list_attention_backward": (
        f"(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, float scale, SymInt v_width) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
    ),
}


# --- shapes and dtypes of the outputs (fakes) ---------------------------------------------------------------


def fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Returns empty outputs; the last argument is v_width."""
    batch, s, groups, heads, _width = q.shape
    row = (batch, s, groups, heads)
    return q.new_empty((*row, args[-1])), q.new_empty(row, dtype=acc_dtype(q.dtype))


def backward_fake(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    """Returns empty gradients."""
    dv = k.new_empty((0,)) if v is None else v.new_empty(v.shape)
    dsink = q.new_empty((0,), dtype=acc_dtype(q.dtype)) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), dv, dsink


# --- gradients ----------------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.v_width = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return needed(ctx)
    saved = ctx.saved_tensors
    dq, dk, dv, dsink = call("selection_list_attention_backward", dout, dlse, *saved, ctx.scale, ctx.v_width)
    return needed(ctx, dq, dk, None if saved[2] is None else dv, None, dsink)


_GRADIENTS: dict[str, Gradient] = {"selection_list_attention": (_setup, _grad)}

for _name, _its_fake in (("selection_list_attention", fake), ("selection_list_attention_backward", backward_fake)):
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _its_fake,
        _GRADIENTS.get(_name),
        functools.partial(into_batch, _name),
    )
    implement(_name, getattr(cpu, _name), "CPU")
