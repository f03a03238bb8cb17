# SPDX-License-Identifier: Apache-2.0
"""The E79 ops (coupled memory-modulation matrix recurrence) in the namespace ``torch.ops.mhc_inductor``.

This module has the schemas and vmap rules of the scan and its backward op; ``derived.py`` makes the rest of them.

The checkpoints and gates have no gradient: they exist for the backward op. Double backward raises RuntimeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor.kernels.cpu import e79 as cpu
from mhc_inductor.ops.batching import fold
from mhc_inductor.ops.derived import define_ops, gradient
from mhc_inductor.ops.registry import call as call
from mhc_inductor.reference import e79 as reference
from mhc_inductor.reference.precision import acc_dtype

_INPUTS = "Tensor kvqm, Tensor? b_s, Tensor? b_m, Tensor? S0, Tensor? M0"
SCHEMAS = {
    "e79_scan": f"({_INPUTS}, SymInt segment) -> (Tensor out, Tensor S, Tensor M, Tensor checkpoints, Tensor gates)",
    "e79_scan_backward": f"(Tensor? dout, Tensor? dS, Tensor? dM, {_INPUTS}, Tensor checkpoints, Tensor gates, SymInt segment) -> "
    "(Tensor dkvqm, Tensor db_s, Tensor db_m, Tensor dS0, Tensor dM0)",
}

# The states of one segment, recomputed in the backward, should stay in a GPU's L2 cache.
_SCRATCH_BYTES = 24 * 2**20
_MOST_CHECKPOINTS = 256


def segment_length(n: int, batch: int, steps: int) -> int:
    """Returns the number of steps from one checkpoint to the next, for a scan that needs gradients.

    It is between 8 and 32 and as large as keeps the states of a segment (8*n*n bytes per sequence and step) within
    24 MiB. It grows beyond that where T would need more than 256 checkpoints, and is at most T. ``batch`` and ``steps``
    may be symbolic.
    """
    states = _most(batch * 8 * n * n, 1)
    base = _most(8, _least(32, _SCRATCH_BYTES // states))
    longest = _most(base, (steps + _MOST_CHECKPOINTS - 1) // _MOST_CHECKPOINTS)
    return _least(longest, steps)


def _most(a: int, b: int) -> int:
    # Dynamo of torch 2.11 does not support torch.sym_max of two integers.
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def _least(a: int, b: int) -> int:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


# --- vmap: batch merged into B -----------------------------------------------------------------------------


def _fold_bias(
    bias: Tensor | None, dim: int | None, size: int, kvqm: Tensor, apart: bool
) -> tuple[Tensor | None, bool]:
    """Returns a bias for the folded kvqm, and whether it was expanded from ``[n]`` to ``[T, size*B, n]``.

    An ``[n]`` bias per vmap entry is expanded. An ``[n]`` bias without a vmap dimension is left as it is, unless its
    gradients are wanted ``apart``, one per entry.
    """
    if bias is None:
        return None, False
    if bias.dim() - (dim is not None) == 3:
        return fold(bias, dim, size, 1), False
    if dim is None and not apart:
        return bias, False
    rows = bias.expand(size, *bias.shape) if dim is None else bias.movedim(dim, 0)
    steps, batch = kvqm.shape[0], kvqm.shape[1] // size
    # In the arithmetic's dtype, so that the gradient is rounded once, after the sum over the steps.
    rows = rows.to(acc_dtype(kvqm.dtype))[None, :, None].expand(steps, size, batch, rows.shape[-1])
    return rows.flatten(1, 2), True


def _fold_inputs(
    size: int, dims: tuple[int | None, ...], inputs: tuple[Any, ...], apart: bool
) -> tuple[tuple[Tensor | None, ...], tuple[bool, bool]]:
    kvqm = fold(inputs[0], dims[0], size, 1)
    assert kvqm is not None
    b_s, s_apart = _fold_bias(inputs[1], dims[1], size, kvqm, apart)
    b_m, m_apart = _fold_bias(inputs[2], dims[2], size, kvqm, apart)
    states = [fold(a, dim, size, 0) for a, dim in zip(inputs[3:], dims[3:], strict=True)]
    return (kvqm, b_s, b_m, *states), (s_apart, m_apart)


def _unfold(t: Tensor, size: int, at: int, batch: int) -> tuple[Tensor, int | None]:
    """Returns an output with its vmap dimension split off again; a placeholder of shape [0] has no such dimension."""
    if t.dim() == 1:
        return t, None
    return t.unflatten(at, (size, batch)), at


def _scan_vmap(op: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size = info.batch_size
    inputs, _ = _fold_inputs(size, in_dims[:5], args[:5], apart=False)
    out = op(*inputs, args[5])
    batch = out[1].shape[0] // size
    pairs = [_unfold(t, size, at, batch) for t, at in zip(out, (1, 0, 0, 1, 1), strict=True)]
    return tuple(t for t, _ in pairs), tuple(dim for _, dim in pairs)


def _scan_backward_vmap(op: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size = info.batch_size
    grads = [fold(a, dim, size, at) for a, dim, at in zip(args[:3], in_dims[:3], (1, 0, 0), strict=True)]
    inputs, summed = _fold_inputs(size, in_dims[3:8], args[3:8], apart=True)
    assert inputs[0] is not None
    batch = inputs[0].shape[1] // size
    out = op(*grads, *inputs, fold(args[8], in_dims[8], size, 1), fold(args[9], in_dims[9], size, 1), args[10])
    pairs = [_unfold(t, size, at, batch) for t, at in zip(out, (1, 1, 1, 0, 0), strict=True)]
    for k, apart in enumerate(summed, 1):
        if apart:  # [T, size, B, n] -> one [n] per vmap entry
            pairs[k] = pairs[k][0].sum((0, 2)).to(args[3 + k].dtype), 0
    return tuple(t for t, _ in pairs), tuple(dim for _, dim in pairs)


_SETUP, _BACKWARD = gradient("e79_scan")


def _grad(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(g is not None for g in grads[:3]) and ctx.others[-1] == 0:
        raise RuntimeError(
            "mhc_inductor: e79_scan was called with segment = 0, which keeps no checkpoints, but a gradient arrived; "
            "give the op a segment of at least 1, or call mhc_inductor.e79_scan, which chooses it"
        )
    return _BACKWARD(ctx, *grads)


define_ops(
    SCHEMAS,
    reference,
    cpu,
    gradients={"e79_scan": (_SETUP, _grad)},
    vmap_rules={"e79_scan": _scan_vmap, "e79_scan_backward": _scan_backward_vmap},
)
