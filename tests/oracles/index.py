# SPDX-License-Identifier: Apache-2.0
"""Inputs, an fp64 oracle and checks for the tests of the index ops, on any device.

The oracle holds all products of all heads, and is written independently of ``mhc_inductor.reference.index``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ANY = -(2**31)
KINDS = ("all", "causal", "limits", "mask", "row_mask", "segments", "everything")
"""What hides keys in :func:`visibility`."""


def make_inputs(
    B: int = 2,
    S: int = 5,
    T: int = 9,
    H: int = 3,
    D: int = 8,
    dtype: torch.dtype = torch.float32,
    *,
    w_dtype: torch.dtype | None = None,
    whole: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns standard normal q, k and w; with ``whole`` small integers, of which every sum is exact."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        x = torch.randint(-2, 3, shape, generator=g) if whole else torch.randn(shape, generator=g, dtype=torch.float64)
        return x.to(dtype).to(device)

    w_dtype = torch.promote_types(dtype, torch.float32) if w_dtype is None else w_dtype
    return draw(B, S, H, D, dtype=dtype), draw(B, T, D, dtype=dtype), draw(B, S, H, dtype=w_dtype)


def visibility(kind: str, q: Tensor, k: Tensor, seed: int = 1) -> tuple[Tensor | None, ...]:
    """Returns (limit, mask, segments_q, segments_k) of a ``kind`` in KINDS."""
    B, S, T = q.shape[0], q.shape[1], k.shape[1]
    g = torch.Generator().manual_seed(seed)
    limit = mask = sq = sk = None
    if kind == "causal":
        limit = (torch.arange(S, dtype=torch.int32) + 1 + T - S).expand(B, S)
    if kind in ("limits", "everything"):  # below 0 and above T too
        limit = torch.randint(-3, T + 5, (B, S), generator=g)
    if kind == "mask":
        mask = torch.rand((B, S, T), generator=g) < 0.6
    if kind in ("row_mask", "everything"):
        mask = torch.rand((B, 1, T), generator=g) < 0.6
    if kind in ("segments", "everything"):
        sq = torch.randint(0, 3, (B, S), generator=g, dtype=torch.int32)
        sk = torch.randint(0, 3, (B, T), generator=g)
        sk[torch.rand((B, T), generator=g) < 0.2] = ANY
        sq, sk = sq.long() if kind == "everything" else sq, sk.int() if kind == "segments" else sk
    return tuple(None if t is None else t.to(q.device) for t in (limit, mask, sq, sk))


def seen(q: Tensor, k: Tensor, visible: tuple[Tensor | None, ...]) -> Tensor:
    """Returns which keys each query sees, bool [B, S, T]."""
    B, S, T = q.shape[0], q.shape[1], k.shape[1]
    limit, mask, sq, sk = visible
    out = torch.ones((B, S, T), dtype=torch.bool, device=q.device)
    if limit is not None:
        out &= torch.arange(T, device=q.device).view(1, 1, T) < limit.unsqueeze(-1)
    if mask is not None:
        out &= mask
    if sq is not None and sk is not None:
        out &= (sk.unsqueeze(1).long() == sq.unsqueeze(-1).long()) | (sk.unsqueeze(1).long() == ANY)
    return out


def oracle(q: Tensor, k: Tensor, w: Tensor, scale: float, visible: tuple[Tensor | None, ...]) -> Tensor:
    """Returns the scores in fp64."""
    x = torch.einsum("bshd,btd->bsht", q.double(), k.double())
    scores = torch.einsum("bsh,bsht->bst", w.double(), torch.relu(scale * x))
    return scores.masked_fill(~seen(q, k, visible), -torch.inf)


def formula_error(q: Tensor, k: Tensor, w: Tensor, scale: float) -> float:
    """Returns the largest error of the plain formula in fp32, against fp64."""
    x = torch.einsum("bshd,btd->bsht", q.float(), k.float())
    plain = (torch.relu(scale * x) * w.float().unsqueeze(-1)).sum(2)
    exact = oracle(q, k, w, scale, (None,) * 4)
    return float((plain.double() - exact).abs().max()) if plain.numel() else 0.0


def first_of(scores: Tensor, hidden: Tensor, topk: int) -> Tensor:
    """Returns the choice by exact scores, row by row, with NaN as the largest."""
    out = torch.full((*scores.shape[:2], topk), -1, dtype=torch.int32)
    for b in range(scores.shape[0]):
        for s in range(scores.shape[1]):
            row = scores[b, s].tolist()
            order = sorted(
                (t for t in range(len(row)) if not hidden[b, s, t]),
                key=lambda t: (row[t] == row[t], -row[t] if row[t] == row[t] else 0, t),
            )
            chosen = sorted(order[:topk])
            out[b, s, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out


def check_topk(got: Tensor, args: tuple[Any, ...], topk: int, scale: float, visible: tuple[Tensor | None, ...]) -> None:
    """Checks number, order and visibility of the chosen keys, and that none scores lower than one left out.

    "Lower" means by more than twice the error of the plain fp32 formula, against fp64.
    """
    q, k, w = args
    exact, see = oracle(q, k, w, scale, visible), seen(q, k, visible)
    B, S, T = exact.shape
    assert got.shape == (B, S, topk) and got.dtype is torch.int32 and got.is_contiguous()
    if topk == 0 or B * S == 0:
        return
    count = see.sum(-1).clamp(max=topk)
    place = torch.arange(topk, device=got.device)
    there = place < count.unsqueeze(-1)
    assert torch.equal(got >= 0, there) and bool((got[~there] == -1).all())
    assert int(got.max()) < T
    assert bool((got[..., 1:] > got[..., :-1])[there[..., 1:]].all())
    chosen = torch.zeros((B, S, T + 1), dtype=torch.bool, device=got.device)
    chosen.scatter_(-1, torch.where(there, got, T).long(), True)
    chosen = chosen[..., :T]
    assert bool((see | ~chosen).all())
    worst = torch.where(chosen, exact, torch.inf).amin(-1)
    best = torch.where(see & ~chosen, exact, -torch.inf).amax(-1)
    slack = 2 * formula_error(q, k, w, scale)
    assert bool((best - worst <= slack).all()), float((best - worst).max())
