# SPDX-License-Identifier: Apache-2.0
"""The vmap rules: of ops whose tensors begin with B, which the vmap dimension joins, and of any op, one call per entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The dimensions of a call's arguments that vmap maps over, and the rule's results: outputs and their dimensions.
Dims = tuple[int | None, ...]
Mapped = tuple[Any, Any]


def fold(a: Tensor | None, dim: int | None, size: int, at: int = 0) -> Tensor | None:
    """Returns ``a`` with the vmap dimension merged into dimension ``at``, which is B.

    A tensor without a vmap dimension is expanded first.
    """
    if a is None:
        return None
    batched = a.unsqueeze(at).expand(*a.shape[:at], size, *a.shape[at:]) if dim is None else a.movedim(dim, at)
    return batched.flatten(at, at + 1)


def one_by_one(op: Callable[..., Any], size: int, in_dims: Dims, args: tuple[Any, ...]) -> Mapped:
    """Calls the op once per vmap entry."""
    rows = [op(*[a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]) for i in range(size)]
    if isinstance(rows[0], Tensor):
        return torch.stack(rows), 0
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


def into_batch(name: str, op: Callable[..., Any], info: Any, in_dims: Dims, *args: Any) -> Mapped:
    """Merges the vmap dimension into B, the first dimension of every tensor of op ``name`` but ``sink``."""
    names = [a.name for a in getattr(torch.ops.mhc_inductor, name).default._schema.arguments]
    # strict=False: arguments that have their default may be left out.
    given, dims, size = dict(zip(names, args, strict=False)), dict(zip(names, in_dims, strict=False)), info.batch_size
    if _apart(given, dims):
        return one_by_one(op, size, in_dims, args)
    out = op(*[_folded(n, given, dims, size) for n in given])
    if isinstance(out, Tensor):
        return out.unflatten(0, (size, -1)), 0
    # A placeholder of shape [0] has no vmap dimension.
    pairs = [(t, None) if t.dim() == 1 else (t.unflatten(0, (size, -1)), 0) for t in out]
    return tuple(t for t, _ in pairs), tuple(dim for _, dim in pairs)


def _apart(given: dict[str, Any], dims: dict[str, int | None]) -> bool:
    """Returns whether entries cannot join B: a sink's gradient is a sum over B, and packed sequences have a B of 1."""
    if given.get("cu_seqlens_q") is not None or dims.get("sink") is not None:
        return True
    return given.get("sink") is not None and "dout" in given


def _folded(name: str, given: dict[str, Any], dims: dict[str, int | None], size: int) -> Any:
    a, dim = given[name], dims[name]
    if not isinstance(a, Tensor) or name == "sink":
        return a
    if name == "mask":
        return _folded_mask(a, dim, size, given["q"].shape[1 if dims["q"] == 0 else 0])
    return fold(a, dim, size)


def _folded_mask(a: Tensor, dim: int | None, size: int, batch: int) -> Tensor | None:
    """Returns the mask, whose B may be 1, with the vmap dimension merged into B; unchanged where all entries share it."""
    if dim is None and a.shape[0] == 1:
        return a
    a, at = (a, 0) if dim is None else (a.movedim(dim, 0), 1)
    return fold(a.expand(*a.shape[:at], batch, *a.shape[at + 1 :]), None if dim is None else 0, size)
