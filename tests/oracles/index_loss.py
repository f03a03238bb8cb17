# SPDX-License-Identifier: Apache-2.0
"""Inputs of an indexer's training loss, and the dense formula in fp64."""

from __future__ import annotations

import torch

F32, F64 = torch.float32, torch.float64


def lists(B, S, T, n, seed=2):
    """Returns random lists with repeats and positions out of range; query 0 of each sequence lists nothing."""
    indices = torch.randint(-3, T + 2, (B, S, n), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    indices[:, :1] = -1
    return indices


def make(B=2, S=5, T=9, H=3, D=8, G=2, heads=3, Dk=6, n=7, dtype=F32, *, w_dtype=None, with_lse=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=F64).to(dtype)

    q, k, w = draw(B, S, H, D), draw(B, T, D), draw(B, S, H).to(w_dtype or dtype)
    aq, ak = draw(B, S, G, heads, Dk), draw(B, G, T, Dk)
    lse = (draw(B, S, G, heads).abs() + 3).float() if with_lse else None
    return q, k, w, lists(B, S, T, n), aq, ak, lse, 0.7, 0.6


def dense(q, k, w, indices, aq, ak, lse, scale, attention_scale):
    """Returns the loss [B, S] by the dense formula in fp64, over all T keys under a mask."""
    q, k, w, aq, ak = (t.double() for t in (q, k, w, aq, ak))
    B, S, T = q.shape[0], q.shape[1], k.shape[1]
    listed = torch.zeros((B, S, T + 1), dtype=torch.bool)
    listed.scatter_(-1, torch.where((indices < 0) | (indices >= T), T, indices).long(), True)
    listed = listed[..., :T]
    index = (w.unsqueeze(-1) * torch.relu(scale * torch.einsum("bshd,btd->bsht", q, k))).sum(2)
    r = torch.softmax(index.masked_fill(~listed, -1e9), -1)
    scores = (attention_scale * torch.einsum("bsghd,bgtd->bsght", aq, ak)).masked_fill(~listed[:, :, None, None], -1e9)
    p = torch.softmax(scores, -1) if lse is None else torch.exp(scores - lse.double().unsqueeze(-1))
    p = p.sum((2, 3)) * listed
    p = (p / p.sum(-1, keepdim=True).clamp(min=1e-300)).detach()
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - r.clamp(min=1e-300).log()), 0.0).sum(-1)
