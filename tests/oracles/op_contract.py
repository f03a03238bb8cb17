# SPDX-License-Identifier: Apache-2.0
"""Checks that hold for every op, shared by the tests of each operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.selection import error


def op(name: str) -> Any:
    return getattr(torch.ops.mhc_inductor, name).default


def outputs(out: Any) -> tuple[Tensor, ...]:
    """Returns an op's results as a tuple."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def strided(t: Any) -> Any:
    """Returns the same values with non-contiguous strides."""
    if not isinstance(t, Tensor) or t.dim() < 2:
        return t
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def check_outputs(name: str, sample: Sequence[Any], tolerance: float = 2e-5) -> None:
    """Asserts that outputs are new, contiguous, shaped as the fake's, and independent of the inputs' strides."""
    args = [strided(a) for a in sample]
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
    whole = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
    out, plain, meta = (outputs(op(name)(*some)) for some in (args, whole, meta))
    storages = [a.untyped_storage().data_ptr() for a in (*args, *whole) if isinstance(a, Tensor)]
    for o, p, m in zip(out, plain, meta, strict=True):
        assert (o.shape, o.dtype, o.stride()) == (m.shape, m.dtype, m.stride())
        assert o.is_contiguous() and p.is_contiguous()
        # Another layout sums in another order, which is a small error; a wrong stride gives a large one.
        if o.is_floating_point():
            assert error(o, p) < tolerance + 2 * torch.finfo(o.dtype).eps
    made = [o.untyped_storage().data_ptr() for o in (*out, *plain) if o.numel()]
    assert len({*made}) == len(made) and set(storages).isdisjoint(made)


def check_vmap(name: str, rows: Sequence[Sequence[Any]], batched: Callable[[int, str], bool]) -> bool:
    """Asserts that vmap over the arguments that are ``batched`` gives what calls of each row give.

    ``batched`` takes an argument's position and name. Returns False, without a call, where that is none.
    """
    first, *others = rows
    names = [a.name for a in op(name)._schema.arguments]
    at = enumerate(zip(names, first, strict=False))
    dims = [k % (a.dim() + 1) if isinstance(a, Tensor) and batched(k, n) else None for k, (n, a) in at]
    if dims.count(None) == len(dims):
        return False
    others = [[s if d is None else a for a, s, d in zip(row, first, dims, strict=True)] for row in others]
    columns = zip(dims, *(rows := [first, *others]), strict=True)
    stacked = [row[0] if d is None else torch.stack(row, d) for d, *row in columns]
    want = [torch.stack(column) for column in zip(*(outputs(op(name)(*row)) for row in rows), strict=True)]
    for g, w in zip(outputs(torch.func.vmap(op(name), in_dims=tuple(dims))(*stacked)), want, strict=True):
        if g.numel() or w.numel():
            assert g.dtype is w.dtype and error(g, w) < (2e-2 if g.dtype.itemsize == 2 else 1e-5)
    return True
