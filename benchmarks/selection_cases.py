# SPDX-License-Identifier: Apache-2.0
"""Inputs of the selection-attention rows, and the formula in fp64 and as dense SDPA with a mask.

The formula is written independently of the package's reference. It gives the values that outputs are checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mhc_inductor

from .selection_targets import Shape

RUN, REDRAWN, FIXED = 64, 0.25, 3
NAMES = ("q", "k", "v")
SELECTS = ("corr", "rand")
_CHUNK = 1 << 26
Named = dict[str, Tensor]


@dataclasses.dataclass
class Case:
    """The tensors of one case: the op's inputs, its output's gradient, and the blocks that the ranges came from."""

    shape: Shape
    select: str
    q: Tensor
    k: Tensor
    v: Tensor
    ranges: Tensor
    dout: Tensor
    blocks: Tensor | None = None
    sink: Tensor | None = None

    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]


def positions(shape: Shape, device: torch.device) -> Tensor:
    """Returns the positions of the queries among the keys, ``[S]``."""
    return torch.arange(shape.length - shape.queries, shape.length, device=device)


# ---- what is selected


def blocks(shape: Shape, select: str, device: torch.device) -> Tensor:
    """Returns the selected blocks, int32 ``[B, S, G, picks]``, -1 for none.

    Every query selects block 0, its own block and the one before; the rest are random and distinct. "rand" draws them
    for every query. "corr" draws once for each run of ``RUN`` queries, and a query redraws each pick with probability
    ``REDRAWN``.
    """
    own = positions(shape, device) // shape.block
    count, drawn = -(-shape.length // shape.block), shape.picks - FIXED
    drawn = min(drawn, count)
    made = torch.full((shape.batch, shape.queries, shape.groups, shape.picks), -1, dtype=torch.int32, device=device)
    rows = max(RUN, _CHUNK // count // RUN * RUN)
    for b in range(shape.batch):
        for g in range(shape.groups):
            for at in range(0, shape.queries, rows):
                made[b, at : at + rows, g] = _blocks(own[at : at + rows], count, drawn, shape.picks, select)
    return made


def _blocks(own: Tensor, count: int, drawn: int, picks: int, select: str) -> Tensor:
    every = torch.arange(count, device=own.device)
    free = (every > 0) & (every < own[:, None] - 1)
    score = torch.rand(free.shape, device=own.device)
    found = _top(score.masked_fill(~free, -1), drawn)
    if select == "corr":
        shared = score[::RUN].repeat_interleave(RUN, 0)[: len(own)]
        # Queries of one run may lie in different blocks, so mask what is not free for each query.
        base = _top(shared.masked_fill(~free, -1), drawn)
        other = torch.rand(free.shape, device=own.device).masked_fill(~free, -1)
        other = other.scatter(1, base.clamp(min=0).long(), -1)
        fresh = _top(other, drawn)
        redraw = (torch.rand(base.shape, device=own.device) < REDRAWN) & (fresh >= 0)
        found = torch.where(redraw, fresh, base)
    row = own.new_full((len(own), picks), -1)
    row[:, 0] = 0
    row[:, 1] = torch.where(own > 0, own, -1)
    row[:, 2] = torch.where(own > 1, own - 1, -1)
    row[:, FIXED : FIXED + drawn] = found
    return row.int()


def _top(score: Tensor, count: int) -> Tensor:
    best, at = score.topk(count, 1)
    return torch.where(best < 0, -1, at)


def tokens(shape: Shape, device: torch.device) -> Tensor:
    """Returns distinct causal keys, unordered, int32 ``[B, S, G, tokens]``; ValueError if a query has too few."""
    reach = positions(shape, device)[:, None] + 1
    if int(reach[0]) < shape.tokens:
        raise ValueError(f"{shape.name}: the first query has {int(reach[0])} keys, fewer than {shape.tokens}")
    i = torch.arange(shape.tokens, device=device)
    low, high = i * reach // shape.tokens, (i + 1) * reach // shape.tokens
    size = (shape.batch, shape.queries, shape.groups, shape.tokens)
    draw = torch.rand(size, device=device)
    low, width = low[None, :, None], (high - low)[None, :, None]
    at = low + torch.minimum((draw * width).long(), width - 1)
    return at.gather(-1, torch.rand(size, device=device).argsort(-1)).int()


# ---- inputs


def make_case(
    shape: Shape,
    select: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    std: float = 1.0,
    sink: bool = False,
) -> Case:
    """Returns a random case: k, v and sinks standard normal; q normal, logits of standard deviation ``std``."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    B, S, G, h, D = shape.batch, shape.queries, shape.groups, shape.heads, shape.dim
    chosen = None
    if shape.tokens:
        start = tokens(shape, device)
        ranges = torch.stack((start, start + 1), -1)
    else:
        chosen = blocks(shape, select, device)
        ranges = mhc_inductor.blocks_to_ranges(chosen, shape.block, shape.length)
    q = normal(B, S, G, h, D)
    if std != 1.0:
        q *= std
    k, v = normal(B, G, shape.length, D), normal(B, G, shape.length, D)
    logits = torch.randn(G, h, device=device) if sink else None
    return Case(shape, select, q, k, v, ranges, normal(B, S, G, h, D), chosen, logits)


# ---- calls


def op(case: Case, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return mhc_inductor.selection_attention(q, k, v, case.ranges, sink=case.sink, **kwargs)


def forward(case: Case) -> Named:
    """Returns o and lse, computed without gradients."""
    with torch.no_grad():
        o, lse = op(case, case.q, case.k, case.v, return_lse=True)
    return {"o": o, "lse": lse}


def both(case: Case, leaves: list[Tensor]) -> Named:
    """Returns o and the gradients of q, k and v."""
    o = op(case, *leaves)
    grads = torch.autograd.grad(o, leaves, case.dout)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(NAMES, grads, strict=True)}}


# ---- the formula


def mask_of(ranges: Tensor, length: int) -> Tensor:
    """Returns the union of ``ranges [..., r, 2]`` as a mask, bool ``[..., length]``."""
    start, end = ranges.long().clamp(0, length).unbind(-1)
    end = torch.maximum(start, end)
    steps = torch.zeros(*start.shape[:-1], length + 1, dtype=torch.int32, device=ranges.device)
    one = torch.ones_like(start, dtype=torch.int32)
    steps.scatter_add_(-1, start, one).scatter_add_(-1, end, -one)
    return steps.cumsum(-1)[..., :length] > 0


def sample(shape: Shape, count: int, device: torch.device) -> Tensor:
    """Returns query positions ``[n]``: the first, the last and random ones between."""
    return sample_of(shape.queries, count, device)


def sample_of(queries: int, count: int, device: torch.device) -> Tensor:
    """Returns positions ``[n]`` of ``queries``: the first, the last and random ones between."""
    if queries <= count:
        return torch.arange(queries, device=device)
    middle = torch.randperm(queries - 2, device=device)[: count - 2] + 1
    ends = torch.tensor([0, queries - 1], device=device)
    return torch.cat((ends, middle)).sort().values


def _sequences(case: Case, at: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields q ``[n, G, h, D]``, k and v ``[G, S_kv, D]``, mask ``[n, G, S_kv]`` per sequence and chunk of queries."""
    few = max(1, _CHUNK // (case.shape.length * case.shape.groups * case.shape.heads))
    for b in range(case.shape.batch):
        for some in at.split(few):
            yield case.q[b, some], case.k[b], case.v[b], mask_of(case.ranges[b, some], case.shape.length)


def exact(case: Case, at: Tensor) -> Named:
    """Returns o ``[B * n, G, h, D]`` and lse in fp64 for the queries ``at``."""
    outs, sums = [], []
    for q, k, v, mask in _sequences(case, at):
        s = torch.einsum("nghd,gkd->nghk", q.double(), k.double()) * case.shape.dim**-0.5
        s = s.masked_fill(~mask[:, :, None], float("-inf"))
        lse = s.logsumexp(-1)
        total = lse if case.sink is None else torch.logaddexp(lse, case.sink.double())
        p = (s - total.nan_to_num(neginf=0.0)[..., None]).exp()
        outs.append(torch.einsum("nghk,gkd->nghd", p, v.double()))
        sums.append(lse)
    return {"o": torch.cat(outs), "lse": torch.cat(sums)}


def dense_masked(case: Case, at: Tensor) -> Named:
    """Returns o by ``scaled_dot_product_attention`` in the case's dtype, with a boolean mask and without a sink."""
    outs = []
    h = case.shape.heads
    for q, k, v, mask in _sequences(case, at):
        k, v, mask = k.repeat_interleave(h, 0), v.repeat_interleave(h, 0), mask.movedim(0, 1).repeat_interleave(h, 0)
        o = F.scaled_dot_product_attention(q.flatten(1, 2).movedim(0, 1)[None], k[None], v[None], attn_mask=mask[None])
        outs.append(o[0].movedim(0, 1).unflatten(1, (-1, h)))
    return {"o": torch.cat(outs)}


def picked(case: Case, got: Named, at: Tensor) -> Named:
    """Returns the rows of o and lse of the queries ``at``, in the layout of ``exact``."""
    return {name: t[:, at].flatten(0, 1) for name, t in got.items() if name in ("o", "lse")}


def masked_gradients(case: Case, dtype: torch.dtype) -> Named:
    """Returns o and all gradients, for B = 1: the formula in fp64, or dense SDPA in a narrower ``dtype``."""
    h, mask = case.shape.heads, mask_of(case.ranges[0], case.shape.length).movedim(0, 1)
    leaves = [t.to(dtype).detach().requires_grad_() for t in (case.q, case.k, case.v)]
    q, k, v = leaves
    if dtype is torch.float64:
        s = torch.einsum("ngxd,gkd->gxnk", q[0], k[0]) * case.shape.dim**-0.5
        s = s.masked_fill(~mask[:, None], float("-inf"))
        if case.sink is not None:
            column = case.sink.to(dtype)[:, :, None, None].expand(-1, -1, s.shape[2], 1)
            s = torch.cat((s, column), -1)
        p = s.softmax(-1)[..., : case.shape.length]
        o = torch.einsum("gxnk,gkd->ngxd", p, v[0])[None]
    else:
        keys, values = (t[0].repeat_interleave(h, 0)[None] for t in (k, v))
        rows = q[0].flatten(1, 2).movedim(0, 1)[None]
        o = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask.repeat_interleave(h, 0)[None])
        o = o[0].movedim(0, 1).unflatten(1, (-1, h))[None]
    grads = torch.autograd.grad(o, leaves, case.dout.to(dtype))
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(NAMES, grads, strict=True)}}


def relative(a: Tensor, b: Tensor) -> float:
    """Returns ||a - b|| / ||b|| in fp64; NaN if ``a`` holds a NaN, so that no bar is met."""
    b = b.double()
    return float((a.double() - b).norm() / b.norm())
