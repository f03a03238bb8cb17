# SPDX-License-Identifier: Apache-2.0
"""Spellings of index scores, masks on them and choices from them, and formulas that only resemble them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

H, D, K = 3, 8, 4
SCALE = D**-0.5
INF = float("-inf")

Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Scores [B, S, T] from q [B, S, H, D], k [B, T, D] and w [B, S, H]."""


def _products(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))


def _heads_first(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    x = torch.matmul(q.transpose(1, 2).float(), k.float().unsqueeze(1).mT)  # [B, H, S, T]
    return (torch.relu(x * SCALE) * w.float().transpose(1, 2).unsqueeze(-1)).sum(1)


def _batched(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    B, S = q.shape[:2]
    x = torch.bmm(q.float().reshape(B, S * H, D), k.float().transpose(1, 2)).view(B, S, H, -1)
    return torch.einsum("bsh,bsht->bst", w.float(), F.relu(x * SCALE))


def _two_weights(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    x = F.relu(_products(q, k) * SCALE) * w.float().abs().unsqueeze(-1)
    return (x * torch.sign(w.float())[..., None]).sum(2)


SCORES: dict[str, Scores] = {
    "DeepSeek-V3.2": lambda q, k, w: torch.matmul(
        (w.float() * H**-0.5).unsqueeze(-2), F.relu(_products(q, k) * SCALE)
    ).squeeze(-2),
    "DeepSeek-V4": lambda q, k, w: (F.relu(_products(q, k)) * SCALE * (w.float() * H**-0.5).unsqueeze(-1)).sum(dim=2),
    "Hy4": lambda q, k, w: torch.matmul((w.float() * H**-0.5 * SCALE).unsqueeze(-2), F.relu(_products(q, k))).squeeze(
        -2
    ),
    "einsum": lambda q, k, w: torch.einsum(
        "bsht,bsh->bst", torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu() * SCALE, w.float()
    ),
    "einsum, heads first": lambda q, k, w: torch.einsum(
        "bhst,bsh->bst", F.relu(torch.einsum("bshd,btd->bhst", q.float() * SCALE, k.float())), w.float()
    ),
    "heads first": _heads_first,
    "bmm": _batched,
    "scale on q": lambda q, k, w: (F.relu(_products(q.float() * SCALE, k)) * w.float().unsqueeze(-1)).sum(2),
    "scale on k": lambda q, k, w: (F.relu(_products(q, k.float() * SCALE)) * w.float().unsqueeze(-1)).sum(2),
    "scale divides": lambda q, k, w: (F.relu(_products(q, k) / math.sqrt(D)) * w.float().unsqueeze(-1)).sum(2),
    "scale at the end": lambda q, k, w: (F.relu(_products(q, k)) * w.float().unsqueeze(-1)).sum(2) * SCALE,
    "clamp": lambda q, k, w: (_products(q, k).clamp(min=0) * w.float().unsqueeze(-1)).sum(2),
    "clamp_min": lambda q, k, w: (_products(q, k).clamp_min(0.0) * w.float().unsqueeze(-1)).sum(2),
    "maximum": lambda q, k, w: (torch.maximum(_products(q, k), torch.zeros(())) * w.float().unsqueeze(-1)).sum(2),
    "threshold": lambda q, k, w: (F.threshold(_products(q, k), 0.0, 0.0) * w.float().unsqueeze(-1)).sum(2),
    "relu in place": lambda q, k, w: (_products(q, k).mul_(SCALE).relu_() * w.float().unsqueeze(-1)).sum(2),
    "mean": lambda q, k, w: (F.relu(_products(q, k) * SCALE) * w.float().unsqueeze(-1)).mean(2),
    "weights negative": lambda q, k, w: -(F.relu(_products(q, k) * SCALE) * w.float().unsqueeze(-1)).sum(2),
    "scale negative inside": lambda q, k, w: (F.relu(_products(q, k) * -SCALE) * w.float().unsqueeze(-1)).sum(2),
    "two weights": _two_weights,
    "no weights": lambda q, k, w: F.relu(_products(q, k) * SCALE).sum(2),
    "sum of products": lambda q, k, w: (
        F.relu((q.float().unsqueeze(3) * k.float()[:, None, None]).sum(-1)) * w.float().unsqueeze(-1)
    ).sum(2),
    "matmul of 16 bits": lambda q, k, w: (
        F.relu(torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)).float() * SCALE) * w.float().unsqueeze(-1)
    ).sum(2),
    "keys unsqueezed": lambda q, k, w: (
        F.relu(q.float() @ k.unsqueeze(2).permute(0, 2, 3, 1).float() * SCALE) * w.float().unsqueeze(-1)
    ).sum(2),
    "weights as a column": lambda q, k, w: torch.matmul(
        F.relu(_products(q, k) * SCALE).transpose(-1, -2), w.float().unsqueeze(-1)
    ).squeeze(-1),
    "detached": lambda q, k, w: (F.relu(_products(q.detach(), k.detach()) * SCALE) * w.detach().float()[..., None]).sum(
        2
    ),
}

Masked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Masked scores from scores [B, S, T], seen [B, S, T], positions [B, S] and padding [B, T]."""


def _causal(x: Tensor) -> Tensor:
    S, T = x.shape[-2:]
    return torch.arange(T) <= torch.arange(S)[:, None] + (T - S)


def _packed(pos: Tensor, x: Tensor) -> Tensor:
    parts = torch.cumsum(pos.diff(prepend=pos[:, :1] - 1, dim=-1) != 1, -1)
    parts = F.pad(parts, (0, x.shape[-1] - parts.shape[-1]), value=-1)
    return (parts[:, : x.shape[1], None] == parts[:, None, :]) & _causal(x)


def _transformers(x: Tensor, step: int) -> Tensor:
    """Returns the mask that transformers makes without position ids, for S = T; ``step`` 1 keeps nothing apart."""
    S, T = x.shape[-2:]
    positions = ((torch.arange(T) + 0) * step).unsqueeze(0).expand(x.shape[0], -1)
    parts = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b, q, t = (
        torch.arange(x.shape[0])[:, None, None],
        (torch.arange(S) + (T - S))[None, :, None],
        torch.arange(T)[None, None],
    )
    return (parts[b, q] == parts[b, t]) & (positions[b, t] <= positions[b, q])


MASKS: dict[str, Masked] = {
    "none": lambda x, seen, pos, pad: x,
    "causal": lambda x, seen, pos, pad: x.masked_fill(~_causal(x), INF),
    "causal, triu": lambda x, seen, pos, pad: x + torch.full(x.shape[-2:], INF).triu(1 + x.shape[-1] - x.shape[-2]),
    "causal, where": lambda x, seen, pos, pad: torch.where(_causal(x), x, INF),
    "causal, added": lambda x, seen, pos, pad: x + torch.where(_causal(x), 0.0, INF),
    "causal, bf16": lambda x, seen, pos, pad: (
        x + torch.zeros(x.shape[-2:], dtype=torch.bfloat16).masked_fill(~_causal(x), torch.finfo(torch.bfloat16).min)
    ),
    "causal, finfo.min": lambda x, seen, pos, pad: torch.where(
        _causal(x).logical_not(), torch.finfo(torch.float32).min, x
    ),
    "compressed": lambda x, seen, pos, pad: x.masked_fill(
        torch.arange(x.shape[-1]).view(1, 1, -1) >= ((pos + 1) // 2).unsqueeze(-1), INF
    ),
    "compressed, multiplied": lambda x, seen, pos, pad: x.masked_fill(
        (torch.arange(x.shape[-1]) + 1) * 2 > (pos + 1)[..., None], INF
    ),
    "padding": lambda x, seen, pos, pad: x.masked_fill(~pad[:, None, :], INF),
    "causal and padding": lambda x, seen, pos, pad: x.masked_fill(~(_causal(x) & pad[:, None, :]), INF),
    "padding after causal": lambda x, seen, pos, pad: x.masked_fill(~_causal(x), INF).masked_fill(~pad[:, None], INF),
    "added twice": lambda x, seen, pos, pad: (
        x + torch.where(_causal(x), 0.0, INF) + torch.zeros(pad.shape).masked_fill(~pad, INF)[:, None, :]
    ),
    "given": lambda x, seen, pos, pad: x.masked_fill(~seen, INF),
    "given, finfo.min": lambda x, seen, pos, pad: x.masked_fill(~seen, torch.finfo(x.dtype).min),
    "given, 4 dims": lambda x, seen, pos, pad: x.masked_fill(seen.unsqueeze(1).logical_not()[:, 0], INF),
    "given, as numbers": lambda x, seen, pos, pad: x + (1.0 - seen.float()) * torch.finfo(torch.float32).min,
    "rows": lambda x, seen, pos, pad: x.masked_fill(~(_causal(x) & pad[:, : x.shape[1], None]), INF),
    "own positions": lambda x, seen, pos, pad: x.masked_fill(~_transformers(x, 1), INF),
    "own positions, apart": lambda x, seen, pos, pad: x.masked_fill(~_transformers(x, 2), INF),
    "packed": lambda x, seen, pos, pad: x.masked_fill(~_packed(pos, x), INF),
}

CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x.topk(K, dim=-1).indices,
    "function": lambda x: torch.topk(x, K)[1],
    "unsorted": lambda x: x.topk(K, -1, sorted=False).indices.to(torch.int32),
    "at most all": lambda x: torch.topk(x, min(K, x.shape[-1]), dim=-1, largest=True, sorted=True)[1].int(),
}

_READ = SCORES["DeepSeek-V4"]


def _loop(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(q.shape[0], q.shape[1], k.shape[1])
    for h in range(H):
        total = total + F.relu(q[:, :, h].float() @ k.float().mT) * w[:, :, h, None].float()
    return total


NEAR: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], object], str]] = {
    "values used": (lambda q, k, w, m: _READ(q, k, w).topk(K, -1), "values of topk are used"),
    "values used for a threshold": (
        lambda q, k, w, m: _READ(q, k, w) >= _READ(q, k, w).topk(K, -1).values[..., -1:], "values of topk are used"),
    "scores returned": (lambda q, k, w, m: (x := _READ(q, k, w), x.topk(K, -1).indices), "used elsewhere"),
    "smallest": (lambda q, k, w, m: _READ(q, k, w).topk(K, -1, largest=False).indices, "smallest"),
    "another dim": (lambda q, k, w, m: _READ(q, k, w).topk(K, 1).indices, "another dim"),
    "sort": (lambda q, k, w, m: _READ(q, k, w).sort(-1, descending=True).indices[..., :K], "sort"),
    "argsort": (lambda q, k, w, m: _READ(q, k, w).argsort(-1, descending=True)[..., :K], "sort"),
    "magnitudes": (lambda q, k, w, m: _READ(q, k, w).abs().topk(K, -1).indices, "by abs"),
    "soft cap": (lambda q, k, w, m: (torch.tanh(_READ(q, k, w) / 30.0) * 30.0).topk(K, -1).indices, "tanh"),
    "soft cap inside": (
        lambda q, k, w, m: (F.relu(torch.tanh(_products(q, k) / 9.0)) * w[..., None].float()).sum(2).topk(K, -1).indices,
        "tanh"),
    "maximum over heads": (lambda q, k, w, m: F.relu(_products(q, k) * SCALE).amax(2).topk(K, -1).indices, "by amax"),
    "maximum of products": (lambda q, k, w, m: _products(q, k).amax(2).topk(K, -1).indices, "by amax"),
    "no relu": (lambda q, k, w, m: (_products(q, k) * w[..., None].float()).sum(2).topk(K, -1).indices, "by bmm"),
    "gelu": (lambda q, k, w, m: (F.relu(F.gelu(_products(q, k))) * w[..., None].float()).sum(2).topk(K, -1).indices,
             "gelu"),
    "loop over heads": (lambda q, k, w, m: _loop(q, k, w).topk(K, -1).indices, "by add"),
    "loop over queries": (
        lambda q, k, w, m: F.relu(q[0, 0].float() @ k[0].float().mT).sum(0).topk(K, 0).indices, "one query at a time"),
    "best of the choice": (lambda q, k, w, m: _READ(q, k, w).topk(K, -1).indices[..., :2], "by their place"),
    "first of the choice": (lambda q, k, w, m: _READ(q, k, w).topk(K, -1).indices[..., 0], "by their place"),
    "fill of -1e4": (lambda q, k, w, m: _READ(q, k, w).masked_fill(~m, -1e4).topk(K, -1).indices, "-10000"),
    "fill of 0": (lambda q, k, w, m: _READ(q, k, w).masked_fill(~m, 0.0).topk(K, -1).indices, "set to 0"),
    "fill of inf": (lambda q, k, w, m: _READ(q, k, w).masked_fill(~m, math.inf).topk(K, -1).indices, "set to inf"),
    "fp16 mask": (
        lambda q, k, w, m: (_READ(q, k, w) + torch.where(m, 0.0, -65504.0).half()).topk(K, -1).indices, "65504"),
    "unknown mask": (lambda q, k, w, m: (_READ(q, k, w) + m.float().cumsum(0)).topk(K, -1).indices, "cannot see"),
    "two levels": (
        lambda q, k, w, m: _READ(q, k, w).masked_fill(~m, torch.finfo(torch.float32).min).masked_fill(
            ~_causal(_READ(q, k, w)), INF).topk(K, -1).indices, "several levels"),
    "bias of keys": (lambda q, k, w, m: (F.relu(_products(q, k) + 0.5) * w[..., None].float()).sum(2).topk(K, -1).indices,
                     "by add"),
    "squared": (lambda q, k, w, m: (F.relu(_products(q, k)) ** 2 * w[..., None].float()).sum(2).topk(K, -1).indices,
                "by pow"),
    "weights of keys": (
        lambda q, k, w, m: (F.relu(_products(q, k)) * k.float().sum(-1)[:, None, None]).sum(2).topk(K, -1).indices,
        "by mul"),
    "keys of each head": (
        lambda q, k, w, m: (F.relu(torch.einsum("bshd,bthd->bsht", q.float(), torch.stack([k, k.flip(1), k * 2], 2).float()))
                            * w[..., None].float()).sum(2).topk(K, -1).indices, "keys of their own"),
}  # fmt: skip
"""Formulas that resemble an indexer, and a part of the reason why they stay."""

UNSCORED = (
    *("magnitudes", "soft cap", "soft cap inside", "maximum over heads", "maximum of products", "no relu", "gelu"),
    *("loop over heads", "loop over queries", "bias of keys", "squared", "weights of keys", "keys of each head"),
)
"""Those whose scores are not the op's. Of the others ``index_scores`` computes the scores, and the choice stays."""

SILENT: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "router": lambda q, k, w, m: torch.softmax(q.float().flatten(2), -1).topk(2, -1).indices,
    "sampling": lambda q, k, w, m: w.float().topk(2, -1),
}
"""Choices of something else, which nobody expects to be routed."""
