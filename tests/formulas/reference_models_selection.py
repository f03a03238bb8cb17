# SPDX-License-Identifier: Apache-2.0
"""Reference models of sparse attention in the style of public code: dense attention masked to selected keys or blocks.

They follow descriptions of such references (DeepSeek sparse attention, NSA's and MoBA's selected blocks, paged top-k
decoding) and do not use this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INF = float("inf")


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Repeats [B, G, T, D] to [B, G * n_rep, T, D]."""
    B, G, T, D = x.shape
    if n_rep == 1:
        return x
    return x[:, :, None, :, :].expand(B, G, n_rep, T, D).reshape(B, G * n_rep, T, D)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Computes attention as a library's models share it, with an additive mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = weights + attention_mask[:, :, :, : key.shape[-2]]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


class Indexer(nn.Module):
    """Scores the keys of each query and returns the indices of the largest."""

    def __init__(self, dim: int, heads: int, width: int, topk: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(dim, heads * width, bias=False), nn.Linear(dim, width, bias=False)
        self.weights = nn.Linear(dim, heads, bias=False)
        self.heads, self.width, self.topk = heads, width, topk

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.width))
        score = F.relu(torch.einsum("bshd,btd->bsht", q, self.k(x)))
        score = torch.einsum("bsht,bsh->bst", score, self.weights(x)) + mask
        return score.topk(min(self.topk, score.shape[-1]), dim=-1)[1]


class DeepseekSparse(nn.Module):
    """Token-level selection: 0 scattered into -inf, plus a causal mask, added to the scores of all heads."""

    def __init__(self, dim: int = 24, heads: int = 3, width: int = 8, topk: int = 5) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * heads * width, bias=False)
        self.out = nn.Linear(heads * width, dim, bias=False)
        self.indexer = Indexer(dim, 2, 4, topk)
        self.heads, self.scale = heads, width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        mask = torch.full((S, S), -INF, device=x.device).triu_(1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bshd,bthd->bsht", q.float(), k.float()) * self.scale
        topk = self.indexer(x, mask)
        index_mask = torch.full((B, S, S), -INF, device=x.device).scatter_(-1, topk, 0)
        index_mask += mask
        scores += index_mask.unsqueeze(2)
        scores = scores.softmax(dim=-1, dtype=torch.float32)
        o = torch.einsum("bsht,bthd->bshd", scores.type_as(x), v)
        return self.out(o.flatten(2))


class DeepseekSparseInLibrary(nn.Module):
    """The same as a library's model writes it: grouped keys, [B, 1, S, T] masks, a shared attention function."""

    def __init__(self, dim: int = 24, heads: int = 4, groups: int = 2, width: int = 6, topk: int = 4) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(dim, heads * width), nn.Linear(dim, 2 * groups * width)
        self.out = nn.Linear(heads * width, dim, bias=False)
        self.indexer = Indexer(dim, 2, 4, topk)
        self.width, self.scaling = width, width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        B, S = x.shape[:2]
        shape = (B, S, -1, self.width)
        q = self.q(x).view(shape).transpose(1, 2)
        k, v = (t.view(shape).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        low = torch.finfo(x.dtype).min
        causal = torch.full((S, S), low, dtype=x.dtype, device=x.device)
        causal = torch.triu(causal, diagonal=1)[None, None].expand(B, 1, -1, -1)
        topk = self.indexer(x, causal[:, 0])
        index_mask = torch.full((B, S, S), -INF, device=x.device, dtype=x.dtype)
        index_mask.scatter_(-1, topk, 0.0)
        index_mask = index_mask.unsqueeze(1)
        o = eager_attention(self, q, k, v, index_mask + causal, self.scaling)
        return self.out(o.reshape(B, S, -1))


class SelectedBlocks(nn.Module):
    """NSA's selected branch: blocks by the scores of mean keys, summed over a group's heads.

    The query's own block and the first block are always selected.
    """

    def __init__(self, dim: int = 32, heads: int = 4, groups: int = 2, size: int = 4, top: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.top = heads, groups, size, top
        self.width = dim // heads
        self.to_q = nn.Linear(dim, heads * self.width, bias=False)
        self.to_k, self.to_v = (nn.Linear(dim, groups * self.width, bias=False) for _ in range(2))
        self.combine = nn.Linear(heads * self.width, dim, bias=False)

    def select(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the selected blocks [B, G, S, top + 2], -1 for no block."""
        B, _, S, D = q.shape
        blocks = S // self.size
        means = k.view(B, self.groups, blocks, self.size, D).mean(3)
        grouped = q.view(B, self.groups, -1, S, D)
        scores = torch.einsum("bghsd,bgnd->bghsn", grouped, means).softmax(-1).sum(2)
        own = torch.arange(S, device=q.device) // self.size
        later = torch.arange(blocks, device=q.device) >= own[:, None]
        best = scores.masked_fill(later, -1.0).topk(min(self.top, blocks), dim=-1)
        picked = torch.where(best.values >= 0, best.indices, -1)
        own = own.view(1, 1, S, 1).expand(B, self.groups, S, 1)
        return torch.cat([torch.zeros_like(own), own, picked], dim=-1)

    def mask(self, picked: Tensor, S: int) -> Tensor:
        blocks = S // self.size
        valid = picked >= 0
        chosen = F.one_hot(picked.clamp(min=0), blocks).bool() & valid.unsqueeze(-1)
        tokens = chosen.any(dim=-2).repeat_interleave(self.size, dim=-1)
        causal = torch.ones(S, S, dtype=torch.bool, device=picked.device).tril()
        return tokens & causal

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.to_q(x).view(B, S, self.heads, self.width).transpose(1, 2)
        k, v = (f(x).view(B, S, self.groups, self.width).transpose(1, 2) for f in (self.to_k, self.to_v))
        mask = self.mask(self.select(q, k), S).repeat_interleave(self.heads // self.groups, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.combine(o.transpose(1, 2).reshape(B, S, -1))


class MixtureOfBlocks(SelectedBlocks):
    """MoBA: each head's top blocks by a gate, scattered into a float mask of -inf; the own block is always selected."""

    def __init__(self) -> None:
        super().__init__(groups=4)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        blocks = S // self.size
        q, k, v = (f(x).view(B, S, self.heads, self.width) for f in (self.to_q, self.to_k, self.to_v))
        means = k.view(B, blocks, self.size, self.heads, self.width).mean(2)
        gate = torch.einsum("bshd,bnhd->bhsn", q.float(), means.float())
        own = torch.arange(S) // self.size
        gate.masked_fill_(torch.arange(blocks) > own[:, None], -INF)
        gate.masked_fill_(torch.arange(blocks) == own[:, None], INF)
        _, top = torch.topk(gate, k=self.top, dim=-1, largest=True, sorted=False)
        gate_mask = torch.zeros_like(gate, dtype=torch.bool).scatter_(dim=-1, index=top, value=True)
        bias = torch.zeros_like(gate).masked_fill_(~gate_mask, -INF).repeat_interleave(self.size, dim=-1)
        bias.masked_fill_(torch.ones(S, S, dtype=torch.bool).tril().logical_not(), -INF)
        qk = torch.einsum("bxhd,byhd->bhxy", q.float(), k.float()) + 0.0
        qk = qk * self.width**-0.5
        qk += bias
        p = qk.softmax(dim=-1)
        o = torch.einsum("bhxy,byhd->bxhd", p, v.float()).to(x.dtype)
        return self.combine(o.reshape(B, S, -1))


def packed_reference(q: Tensor, k: Tensor, v: Tensor, topk: Tensor, size: int = 4) -> Tensor:
    """One sequence, no batch: q [S, H, D], k and v [S, G, D], top blocks [G, S, n] with -1 for no block."""
    S, H, D = q.shape
    G = k.shape[1]
    blocks = math.ceil(S / size)
    mask = torch.zeros(G, S, blocks + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(topk >= 0, topk, blocks), True)
    mask = mask[..., :blocks].repeat_interleave(size, dim=-1)[..., :S]
    mask = mask & (torch.arange(S)[None, :] <= torch.arange(S)[:, None])
    mask = mask.repeat_interleave(H // G, dim=0)
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    attn = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
    attn = attn.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", attn, v)


def by_query_blocks(q: Tensor, k: Tensor, v: Tensor, topk: Tensor, size: int = 4) -> Tensor:
    """Selects blocks of keys for blocks of queries: q, k, v [B, H, S, D], top blocks [B, H, S / size, n]."""
    B, H, S, _ = q.shape
    n = S // size
    block_mask = torch.zeros(B, H, n, n, dtype=torch.bool).scatter(-1, topk, True)
    mask = block_mask.repeat_interleave(size, dim=-2).repeat_interleave(size, dim=-1)
    mask = torch.logical_and(mask, torch.tril(torch.ones(S, S, dtype=torch.bool)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def ranges_reference(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    """The formula in fp32: q [B, S, G, h, D], k and v [B, G, T, D], ranges [B, S, G, r, 2]."""
    t = torch.arange(k.shape[2], device=k.device)
    inside = (t >= ranges[..., :1]) & (t < ranges[..., 1:])
    selected = inside.any(dim=3)
    scores = torch.einsum("bsghd,bgtd->bsght", q.float(), k.float()) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~selected.unsqueeze(3), float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    probs = torch.where(selected.any(-1)[..., None, None], probs, torch.zeros_like(probs))
    return torch.einsum("bsght,bgtd->bsghd", probs, v.float()).to(q.dtype)


def window_and_blocks(q: Tensor, k: Tensor, v: Tensor, topk: Tensor, size: int = 4, window: int = 6) -> Tensor:
    """Selected blocks or the last few keys, the same for all heads: q, k, v [B, H, S, D], top blocks [B, S, n]."""
    S, T = q.shape[2], k.shape[2]
    rows, cols = torch.arange(T - S, T)[:, None], torch.arange(T)[None, :]
    causal, local = cols <= rows, cols > rows - window
    picked = (cols.view(1, 1, 1, T) // size == topk[..., None]).any(2)
    mask = (picked | local) & causal
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])


def paged_decode(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, lengths: Tensor, size: int = 4) -> Tensor:
    """One new token: q [B, H, 1, D], a cache [B, G, T, D] of which ``lengths`` are filled, pages [B, G, n]."""
    B, H, _, D = q.shape
    G, T = k.shape[1:3]
    page_mask = torch.zeros(B, G, T // size, dtype=torch.bool)
    page_mask.scatter_(2, pages, True)
    mask = page_mask.unsqueeze(-1).expand(-1, -1, -1, size).reshape(B, G, T)
    mask = mask & (torch.arange(T) < lengths[:, None, None])
    mask = mask[:, :, None].expand(B, G, H // G, T).reshape(B, H, 1, T)
    weights = torch.matmul(q, repeat_kv(k, H // G).transpose(2, 3)) / math.sqrt(D)
    weights = weights.masked_fill(mask == 0, torch.finfo(weights.dtype).min)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v, H // G))


def looped_reference(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Separate starts and ends [B, G, S, r], with a loop over them; q [B, H, S, D], k and v [B, G, T, D]."""
    B, H, S, D = q.shape
    G, T = k.shape[1:3]
    pos = torch.arange(T, device=q.device)
    allowed = torch.zeros(B, G, S, T, dtype=torch.bool, device=q.device)
    for i in range(starts.size(-1)):
        lo, hi = starts[..., i : i + 1], ends[..., i : i + 1]
        allowed |= (pos >= lo) & (pos < hi)
    allowed = allowed.unsqueeze(2).expand(B, G, H // G, S, T).reshape(B * H, S, T)
    q = q.reshape(B * H, S, D) * (D**-0.5)
    k, v = (x.repeat_interleave(H // G, 1).reshape(B * H, T, -1) for x in (k, v))
    attn = torch.baddbmm(torch.where(allowed, 0.0, -INF).to(q.dtype), q, k.transpose(1, 2))
    return torch.nan_to_num(torch.bmm(attn.softmax(-1), v)).view(B, H, S, -1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator()) + 0.1 * torch.arange(shape[-1])


def _blocks(shape: tuple[int, ...], S: int, size: int, rows: int, negative: bool = False) -> Tensor:
    """Returns random block ids, the query's own block first; dim ``rows`` counts the queries."""
    own = (torch.arange(S) // size).view(*[-1 if d == rows else 1 for d in range(len(shape))])
    picked = (torch.rand(shape, generator=_generator()) * (own + 1)).long()
    if negative:
        picked[..., -1] = -1
    picked[..., :1] = own.expand(*shape[:-1], 1)
    return picked


def _modules(make: Callable[[], nn.Module], dim: int = 32) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
    return make, (torch.randn(2, 16, dim, generator=_generator()),)


def _ranges(*lead: int, T: int) -> Tensor:
    start = torch.randint(-2, T, lead, generator=_generator())
    return torch.stack([start, start + torch.randint(0, 7, lead, generator=_generator())], -1)


_LOOPED = _ranges(2, 2, 9, 3, T=12)
REFERENCE_MODELS: dict[str, tuple[Callable[[], Any], tuple[Tensor, ...]]] = {
    "DeepSeek sparse attention": _modules(DeepseekSparse, 24),
    "DeepSeek sparse attention in a library": _modules(DeepseekSparseInLibrary, 24),
    "selected blocks": _modules(SelectedBlocks),
    "mixture of blocks": _modules(MixtureOfBlocks),
    "packed, no batch": (
        lambda: packed_reference,
        (_randn(14, 4, 8), _randn(14, 2, 8), _randn(14, 2, 8), _blocks((2, 14, 3), 14, 4, 1, True)),
    ),
    "blocks of queries": (
        lambda: by_query_blocks,
        (_randn(2, 3, 16, 8), _randn(2, 3, 16, 8), _randn(2, 3, 16, 8), _blocks((2, 3, 4, 2), 4, 1, 2)),
    ),
    "ranges": (
        lambda: ranges_reference,
        (_randn(2, 9, 2, 3, 8), _randn(2, 2, 12, 8), _randn(2, 2, 12, 6), _ranges(2, 9, 2, 3, T=12)),
    ),
    "window and blocks": (
        lambda: window_and_blocks,
        (_randn(2, 3, 16, 8), _randn(2, 3, 16, 8), _randn(2, 3, 16, 8), _blocks((2, 16, 2), 16, 4, 1)),
    ),
    "paged decode": (
        lambda: paged_decode,
        (
            *(_randn(3, 4, 1, 8), _randn(3, 2, 24, 8), _randn(3, 2, 24, 8)),
            *(torch.randint(0, 5, (3, 2, 3), generator=_generator()), torch.tensor([24, 21, 22])),
        ),
    ),
    "loop over ranges": (
        lambda: looped_reference,
        (_randn(2, 4, 9, 8), _randn(2, 2, 12, 8), _randn(2, 2, 12, 8), _LOOPED[..., 0], _LOOPED[..., 1]),
    ),
}
