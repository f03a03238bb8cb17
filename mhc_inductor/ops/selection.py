"""The selection attention ops (the selected branch of native sparse attention) in ``torch.ops.mhc_inductor``.

This module defines the schemas, fakes, gradients and the vmap rule of the attention and its backward op;
``registry.py`` registers them.

The second output, lse, has a gradient too; ranges, boundaries and segment ids have none. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops import checks_selection, selection_cpu
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


# --- vmap: batch merged into B -----------------------------------------------------------------------------


def _fold(a: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Returns ``a`` with the vmap dimension merged into its first dimension."""
    if a is None:
        return None
    batched = a.expand(size, *a.shape) if dim is None else a.movedim(dim, 0)
    return batched.flatten(0, 1)


def _one_by_one(op: Any, size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    rows = [op(*[a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]) for i in range(size)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


def _vmap(op: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size = info.batch_size
    first = 0 if len(args) <= 10 else 2  # index of the first of q, k, v, ranges, sink, cu_seqlens_q, cu_seqlens_k
    sink, packed = args[first + 4], args[first + 5] is not None
    # These entries cannot join B: a sink's gradient is a sum over B, and packed sequences have a B of 1.
    apart = in_dims[first + 4] is not None or (sink is not None and first > 0)
    if packed or apart:
        return _one_by_one(op, size, in_dims, args)
    folded = [
        _fold(a, d, size) if isinstance(a, Tensor) and k != first + 4 else a
        for k, (a, d) in enumerate(zip(args, in_dims, strict=True))
    ]
    out = op(*folded)
    pairs = [(t, None) if t.dim() == 1 else (t.unflatten(0, (size, -1)), 0) for t in out]
    return tuple(t for t, _ in pairs), tuple(dim for _, dim in pairs)


_GRADIENTS: dict[str, Gradient] = {"selection_attention": (_setup, _grad)}

for _name, _its_fake in (("selection_attention", _fake), ("selection_attention_backward", _backward_fake)):
    define(
        _name,
        SCHEMAS[_name],
        getattr(reference, _name),
        _its_fake,
        _GRADIENTS.get(_name),
        getattr(checks_selection, _name),
        _vmap,
    )
    implement(_name, getattr(selection_cpu, _name), "CPU")
