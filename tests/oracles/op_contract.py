# SPDX-License-Identifier: Apache-2.0
"""Checks that hold for every op, shared by the tests of each operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def trainable(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the sample with every floating-point tensor requiring a gradient."""
    return tuple(a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def strided(t: Any) -> Any:
    """Returns the same values with non-contiguous strides."""
    if not isinstance(t, Tensor) or t.dim() < 2:
        return t
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def check_outputs(
    name: str, sample: Sequence[Any], error: Callable[[Tensor, Tensor], float], tolerance: float = 1e-5
) -> None:
    """Asserts that outputs are new, contiguous, shaped as the fake's, and independent of the inputs' strides."""
    args = [strided(a) for a in sample]
    out = op(name)(*args)
    plain = op(name)(*[a.contiguous() if isinstance(a, Tensor) else a for a in args])
    meta = op(name)(*[a.to("meta") if isinstance(a, Tensor) else a for a in args])
    out, plain, meta = ((t,) if isinstance(t, Tensor) else t for t in (out, plain, meta))
    storages = [a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)]
    for o, p, m in zip(out, plain, meta, strict=True):
        assert (o.shape, o.dtype, o.stride()) == (m.shape, m.dtype, m.stride())
        assert o.is_contiguous() and (o.numel() == 0 or o.untyped_storage().data_ptr() not in storages)
        # Another layout sums in another order, which is a small error; a wrong stride gives a large one.
        assert error(o, p) < tolerance + 2 * torch.finfo(o.dtype).eps
    assert len({o.untyped_storage().data_ptr() for o in out if o.numel()}) == sum(o.numel() > 0 for o in out)


def check_vmap(
    name: str,
    rows: list[list[Any]],
    batched: Callable[[int], bool],
    error: Callable[[Tensor, Tensor], float],
    tolerance: float = 1e-5,
) -> None:
    """Asserts that vmap over the tensors at the positions ``batched`` gives what calls of each row give."""
    first = rows[0]
    dims = [k % (a.dim() + 1) if isinstance(a, Tensor) and batched(k) else None for k, a in enumerate(first)]
    for row in rows[1:]:
        row[:] = [shared if d is None else a for a, shared, d in zip(row, first, dims, strict=True)]
    stacked = [
        a if d is None else torch.stack([row[k] for row in rows], d)
        for k, (a, d) in enumerate(zip(first, dims, strict=True))
    ]
    want = [torch.stack(column) for column in zip(*(op(name)(*row) for row in rows), strict=True)]
    got = torch.func.vmap(op(name), in_dims=tuple(dims))(*stacked)
    for g, w in zip(got, want, strict=True):
        if g.numel() or w.numel():
            assert g.dtype is w.dtype and error(g, w) < (2e-2 if g.dtype is torch.bfloat16 else tolerance)
