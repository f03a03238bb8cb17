# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of the index ops. Values of limits, masks and segment ids are never read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops.checks import _floating, _shape, _text, integers, number, strided
from mhc_inductor.ops.segments import segments


def _visibility(
    op: str,
    q: Tensor,
    k: Tensor,
    limit: Tensor | None,
    mask: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
) -> None:
    batch, s, t = q.shape[0], q.shape[1], k.shape[1]
    if limit is not None:
        integers(op, "limit", limit, q)
        _shape(op, "limit", limit, [batch, s], "[B, S]")
    if mask is not None:
        _mask(op, mask, q, [batch, s, t])
    if (segments_q is None) != (segments_k is None):
        name, other = ("segments_q", "segments_k") if segments_q is None else ("segments_k", "segments_q")
        raise ValueError(f"{op}: {name} must be given where {other} is, got None")
    segments(op, segments_q, segments_k, [batch, s], [batch, t], q, ("[B, S]", "[B, T]"))


def _is_one(size: Any) -> bool:
    """Returns whether ``size`` is known to be 1, without a guard on a symbol."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(size == 1)


def _mask(op: str, mask: Tensor, q: Tensor, full: list[Any]) -> None:
    strided(op, "mask", mask)
    if mask.dtype is not torch.bool:
        raise TypeError(f"{op}: mask must be bool, got {mask.dtype}")
    broadcasts(op, mask, q, full, f"broadcast to [B, S, T] = {_text(full)}")


def broadcasts(op: str, mask: Tensor, q: Tensor, full: list[Any], meaning: str, ones: Sequence[int] = range(3)) -> None:
    """Raises ValueError unless the mask is on q's device and of shape ``full``, or 1 in the dimensions ``ones``."""
    if mask.device != q.device:
        raise ValueError(f"{op}: mask must be on q's device {q.device}, got {mask.device}")

    def message() -> str:
        return f"{op}: mask must {meaning}, got {_text(mask.shape)}"

    if mask.dim() != len(full):
        raise ValueError(message())
    for d, (got, want) in enumerate(zip(mask.shape, full, strict=True)):
        if d not in ones or not _is_one(got):
            torch._check_value(got == want, message)


def tensors(op: str, q: Tensor, k: Tensor, w: Tensor) -> None:
    """Raises ValueError or TypeError unless the queries, the keys and the weights of an index fit together."""
    _floating(op, q=q, k=k, w=w)
    if q.dim() != 4:
        raise ValueError(f"{op}: q must have shape [B, S, H, D], got {_text(q.shape)}")
    if k.dim() != 3:
        raise ValueError(f"{op}: k must have shape [B, T, D], got {_text(k.shape)}")
    _shape(op, "k", k, [q.shape[0], k.shape[1], q.shape[3]], "[B, T, D]")
    _shape(op, "w", w, q.shape[:3], "[B, S, H]")
    if k.dtype is not q.dtype:
        raise TypeError(f"{op}: k must have q's dtype {q.dtype}, got {k.dtype}")


def index_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    scale: float,
    limit: Tensor | None,
    mask: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    *,
    op: str = "index_scores",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``index_scores`` fit together."""
    tensors(op, q, k, w)
    for name, size in (("H", q.shape[2]), ("D", q.shape[3])):
        torch._check_value(
            size >= 1, lambda name=name: f"{op}: q[B, S, H, D] must have {name} of at least 1, got {_text(q.shape)}"
        )
    number(op, "scale", scale, 0.0, " (put a negative scale into w)")
    _visibility(op, q, k, limit, mask, segments_q, segments_k)


def index_scores_backward(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    scale: float,
    limit: Tensor | None,
    mask: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``index_scores_backward`` fit together."""
    op = "index_scores_backward"
    index_scores(q, k, w, scale, limit, mask, segments_q, segments_k, op=op)
    _floating(op, q=q, dscores=dscores)
    _shape(op, "dscores", dscores, [q.shape[0], q.shape[1], k.shape[1]], "[B, S, T]")


def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    scale: float,
    limit: Tensor | None,
    mask: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    *,
    op: str = "index_topk",
) -> None:
    """Raises ValueError or TypeError unless the arguments of ``index_topk``, or of ``op``, fit together."""
    index_scores(q, k, w, scale, limit, mask, segments_q, segments_k, op=op)
    if isinstance(topk, bool) or not isinstance(topk, (int, torch.SymInt)):
        raise TypeError(f"{op}: topk must be an int, got {type(topk).__name__}")
    torch._check_value(topk >= 0, lambda: f"{op}: topk must be at least 0, got {topk}")
    torch._check_value(
        topk <= k.shape[1], lambda: f"{op}: topk must be at most T = {k.shape[1]}, the number of keys, got {topk}"
    )


index_topk_scores = functools.partial(index_topk, op="index_topk_scores")
