# SPDX-License-Identifier: Apache-2.0
"""A generator of attentions masked to selected keys, written in many ways, and of mutants that are other formulas.

A spelling is one pick for each axis of :data:`AXES`, every pick a callable in ordinary PyTorch; :class:`Attention`
composes them: ``(q [B, S, H, D], k [B, T, G, D], v [B, T, G, Dv], picked)``, where ``picked`` is ranges
[B, S, G, r, 2], block ids or keys [B, S, G, r], or keys for all heads [B, S, r]. Sinks [H] and what tells segments
[B, T] follow where they are picked. A mutant replaces one part by one of :data:`MUTATIONS`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import random
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formulas.spellings_e79 import Axes, Part

AXES = Axes()
pick, picks = AXES.pick, AXES.picks
MUTATIONS: dict[str, tuple[str, Part]] = {}
"""Maps each mutation to its axis and the callable that replaces the pick."""
INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, dtype and mode: ``T`` keys, ``S`` queries at the last positions, blocks of ``size`` keys."""

    B: int = 2
    S: int = 12
    T: int = 16
    G: int = 2
    h: int = 3
    D: int = 8
    Dv: int = 6
    r: int = 3
    size: int = 4
    dtype: torch.dtype = torch.float32
    mode: str = "train"
    symbolic: bool = False
    negative: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.T // self.size)


@dataclasses.dataclass(frozen=True)
class Attention:
    """One spelling, callable on ``inputs()``."""

    kind: str
    picks: dict[str, str]
    settings: Settings = Settings()
    mutant: str = ""

    @property
    def name(self) -> str:
        said = ", ".join(f"{a}={p}" for a, p in self.picks.items() if next(iter(AXES[a])) != p)
        return f"{self.mutant or self.kind} [{said}] {self.settings}"

    def part(self, axis: str) -> Part:
        if self.mutant and MUTATIONS[self.mutant][0] == axis:
            return MUTATIONS[self.mutant][1]
        return AXES[axis][self.picks[axis]]

    def has(self, axis: str) -> bool:
        """Returns whether the attention has sinks, or segments."""
        return self.picks[axis] != "none" or (bool(self.mutant) and MUTATIONS[self.mutant][0] == axis)

    def inputs(self) -> tuple[Tensor, ...]:
        s = self.settings
        g = torch.Generator().manual_seed(3)
        q = torch.randn(s.B, s.S, s.G * s.h, s.D, generator=g)
        k = torch.randn(s.B, s.T, s.G, s.D, generator=g)
        v = torch.randn(s.B, s.T, s.G, s.Dv, generator=g)
        shape = (s.B, s.S, s.G, s.r)
        position = torch.arange(s.S).view(1, -1, 1, 1) + s.T - s.S
        if self.kind == "blocks":
            # The query's own block is always selected; others may repeat or be -1 (no block).
            picked = (torch.rand(shape, generator=g) * (position // s.size + 1)).long()
            if s.negative:
                picked = torch.where(torch.rand(shape, generator=g) < 0.3, -1, picked)
            picked[..., 0] = (position // s.size).squeeze(-1)
        elif self.kind == "tokens":
            picked = torch.stack([torch.randperm(s.T, generator=g)[: s.r] for _ in range(s.B * s.S * s.G)]).view(shape)
            picked[..., 0] = torch.where((picked == position).any(-1), picked[..., 0], position.squeeze(-1))
        elif self.kind == "lists":
            picked = torch.stack([torch.randperm(s.T, generator=g)[: s.r] for _ in range(s.B * s.S)])
            picked = picked.view(s.B, s.S, s.r)
            if s.negative:
                picked = torch.where(torch.rand(picked.shape, generator=g) < 0.3, -1, picked)
            own = position.view(1, -1)
            picked[..., 0] = torch.where((picked == own[..., None]).any(-1), picked[..., 0], own)
        else:
            start = torch.randint(0, s.T, shape, generator=g)
            picked = torch.stack([start, (start + torch.randint(0, 6, shape, generator=g)).clamp(max=s.T)], -1)
            picked[..., 0, :] = torch.cat([position - 1, position + 1], -1)
        sink = [torch.randn(s.G * s.h, generator=g).to(s.dtype)] if self.has("sink") else []
        told = [_told(s, self.picks["segments"])] if self.has("segments") else []
        return (*(t.to(s.dtype) for t in (q, k, v)), picked, *sink, *told)

    @property
    def symbolic(self) -> list[tuple[int, int]]:
        """Returns (input, dim) of the sizes that are dynamic: batch, queries and keys."""
        if not self.settings.symbolic:
            return []
        told = [(4 + self.has("sink"), 0), (4 + self.has("sink"), 1)] if self.has("segments") else []
        return [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (3, 1), (1, 1), (2, 1), *told]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, picked: Tensor, *more: Tensor) -> Any:
        T, S = k.shape[1], q.shape[1]
        sinks = more[0] if self.has("sink") else None
        c = Call(self, q.shape[0], S, T, k.shape[2], q.shape[2] // k.shape[2], self.settings.size, sinks)
        mask = self.part(self.kind)(c, picked)
        if self.kind == "blocks":
            mask = self.part("keys")(c, mask) if mask.shape[-1] != T else mask
        mask = self.part("causal")(c, mask)
        if self.has("segments"):
            mask = self.part("segments")(c, mask, more[-1])
        out = self.part("form")(c, q, k, v, mask)
        return self.part("out")(out)


def _told(s: Settings, pick: str) -> Tensor:
    """Returns ids of documents, positions in them, or which tokens are no padding: [B, T], other ones in each row."""
    at, cut = torch.arange(s.T).expand(s.B, -1), torch.tensor([s.T // 2, s.T - 2, 3])[: s.B, None]
    if pick == "padding":  # of keys before the first query, so that each sees itself
        return (at >= (cut % 4).clamp(max=s.T - s.S)).long()
    return at - cut * (at >= cut) if pick == "positions" else (at >= cut).long()


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes of a call, with the picks of all axes as attributes."""

    attention: Attention
    B: int
    S: int
    T: int
    G: int
    h: int
    size: int
    sinks: Tensor | None = None

    def weights(self, s: Tensor, m: Tensor, v: Tensor, *heads: int) -> Tensor:
        """Returns the softmax of masked scores, whose dims of heads are ``heads`` with 1 for each later one."""
        s = self.masked(s, m)
        if self.sinks is None:
            return self.softmax(s, v)
        sinks = self.sinks.repeat(self.B) if heads[0] == -self.B else self.sinks
        return self.sink(s, sinks.view(-1 if heads[0] < 0 else heads[0], *heads[1:]).expand(*s.shape[:-1], 1), v)

    @property
    def blocks(self) -> int:
        return (self.T + self.size - 1) // self.size

    @property
    def t(self) -> Tensor:
        return torch.arange(self.T)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.S) + (self.T - self.S)

    def __getattr__(self, axis: str) -> Part:
        part = self.attention.part(axis)
        return lambda *given: part(self, *given)


# --- masks [B, S, G, T] from ranges [B, S, G, r, 2] ---------------------------------------------------------


def _empty(c: Call, width: int | None = None, dtype: torch.dtype = torch.bool) -> Tensor:
    """Returns zeros [B, S, G, T], or of another width."""
    return torch.zeros(c.B, c.S, c.G, c.T if width is None else width, dtype=dtype)


def _each(c: Call, x: Tensor, mask: Tensor, step: Part) -> Tensor:
    """Joins the masks of all ranges, one after another."""
    for j in range(x.shape[3]):
        mask = step(mask, (c.t >= x[..., j, 0, None]) & (c.t < x[..., j, 1, None]))
    return mask


def _changes(c: Call, x: Tensor, change: Tensor, ends: Part = operator.neg, late: int = 0) -> Tensor:
    """Adds 1 where a range starts and ``ends(1)`` where it ends."""
    start, end = x.clamp(0, c.T).unbind(-1)
    one = torch.ones_like(start, dtype=change.dtype)
    return change.scatter_add(-1, start + late if late else start, one).scatter_add(-1, end, ends(one))


picks(
    "ranges",
    any=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).any(-2),
    flipped=lambda c, x: ((x[..., :1] <= c.t) & (x[..., 1:] > c.t)).any(dim=3),
    not_all=lambda c, x: ~((c.t < x[..., 0, None]) | (c.t >= x[..., 1, None])).all(-2),
    logical=lambda c, x: torch.logical_and(c.t.ge(x[..., 0].unsqueeze(-1)), c.t.lt(x[..., 1].unsqueeze(-1))).any(-2),
    negated=lambda c, x: (~(c.t < x[..., 0:1]) & ~(c.t >= x[..., 1:2])).any(-2),
    sum=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).sum(-2) > 0,
    products=lambda c, x: ((c.t >= x[..., 0:1]).float() * (c.t < x[..., 1:2]).float()).sum(-2).gt(0.5),
    amax=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).int().amax(-2).bool(),
    max=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).to(torch.uint8).max(dim=-2).values != 0,
    inclusive=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t <= x[..., 1:2] - 1)).any(-2),
    shifted=lambda c, x: ((c.t + 1 > x[..., 0:1]) & (c.t + 1 <= x[..., 1:2])).any(-2),
    distance=lambda c, x: ((c.t - x[..., 0:1] >= 0) & (x[..., 1:2] - c.t > 0)).any(-2),
)


@pick("ranges")
def _ranges_unbound(c: Call, x: Tensor) -> Tensor:
    start, end = x.unbind(-1)
    return torch.any((c.t.view(1, 1, 1, 1, -1) >= start[..., None]) & (c.t < end[..., None]), dim=-2)


@pick("ranges")
def _ranges_first(c: Call, x: Tensor) -> Tensor:
    """Permutes the ranges to the first dim."""
    x = x.permute(3, 0, 1, 2, 4)
    return ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:])).any(0)


picks("ranges", **{"or": lambda c, x: _each(c, x, _empty(c), operator.or_)})


@pick("ranges")
def _ranges_ior(c: Call, x: Tensor) -> Tensor:
    mask = torch.zeros((c.B, c.S, c.G, c.T), dtype=torch.bool)
    for j in range(x.shape[3]):
        start, end = x[:, :, :, j].split(1, -1)
        mask |= (c.t >= start) & (c.t < end)
    return mask


@pick("ranges")
def _ranges_logical_or(c: Call, x: Tensor) -> Tensor:
    mask = _empty(c)
    for start, end in (pair.unbind(-1) for pair in x.unbind(3)):
        mask.logical_or_(torch.logical_and(c.t >= start[..., None], c.t < end[..., None]))
    return mask


picks(
    "ranges",
    counted=lambda c, x: _each(c, x, _empty(c, None, torch.float32), lambda m, one: m + one.float()) > 0,
    filled=lambda c, x: _each(c, x, _empty(c), lambda m, one: m.masked_fill(one, True)),
    where=lambda c, x: _each(c, x, _empty(c), lambda m, one: torch.where(one, True, m)),
    differences=lambda c, x: _changes(c, x, _empty(c, c.T + 1, torch.int32)).cumsum(-1)[..., :-1] > 0,
)


@pick("ranges")
def _ranges_differences_in_place(c: Call, x: Tensor) -> Tensor:
    x = x.clamp(min=0, max=c.T)
    change = x.new_zeros(c.B, c.S, c.G, c.T + 1)
    change.scatter_add_(3, x[..., 0], torch.ones_like(x[..., 0]))
    change.scatter_add_(3, x[..., 1], torch.full_like(x[..., 1], -1))
    return torch.cumsum(change[..., : c.T], dim=3).ge(1)


@pick("ranges")
def _ranges_differences_of_two(c: Call, x: Tensor) -> Tensor:
    start, end = x.clamp(0, c.T).unbind(-1)
    zeros = torch.zeros(c.B, c.S, c.G, c.T + 1)
    one = torch.ones(start.shape)
    change = zeros.scatter_add(-1, start, one) - zeros.scatter_add(-1, end, one)
    return change.cumsum(-1)[..., : c.T] > 0.5


@pick("ranges")
def _ranges_differences_joined(c: Call, x: Tensor) -> Tensor:
    start, end = x.clamp(0, c.T).unbind(-1)
    one = torch.ones_like(start)
    change = x.new_zeros(c.B, c.S, c.G, c.T + 1)
    change = change.scatter_add(-1, torch.cat([start, end], -1), torch.cat([one, -one], -1))
    return change.cumsum(-1)[..., : c.T] != 0


@pick("ranges")
def _ranges_reduced(c: Call, x: Tensor) -> Tensor:
    start, end = x.clamp(0, c.T).unbind(-1)
    change = torch.zeros(c.B, c.S, c.G, c.T + 1, dtype=torch.long)
    one = torch.ones_like(start)
    change = change.scatter_reduce(-1, start, one, "sum").scatter_reduce(-1, end, -one, reduce="sum")
    return (change.cumsum(-1) > 0)[..., : c.T]


# --- masks of blocks [B, S, G, blocks] from ids [B, S, G, r], -1 for no block -------------------------------


def _slot(c: Call, x: Tensor) -> Tensor:
    """Maps negative ids to one extra slot after the last block."""
    return torch.where(x < 0, c.blocks, x)


picks(
    "blocks",
    one_hot=lambda c, x: F.one_hot(_slot(c, x), c.blocks + 1)[..., :-1].any(-2),
    one_hot_sum=lambda c, x: F.one_hot(_slot(c, x), c.blocks + 1).sum(-2)[..., : c.blocks] > 0,
    one_hot_max=lambda c, x: F.one_hot(x + 1, c.blocks + 1)[..., 1:].amax(dim=-2).bool(),
    one_hot_valid=lambda c, x: (F.one_hot(x.clamp(min=0), c.blocks).bool() & (x >= 0)[..., None]).any(-2),
    one_hot_product=lambda c, x: (F.one_hot(x.clamp_min(0), c.blocks) * (x >= 0).unsqueeze(-1)).sum(3) > 0,
    one_hot_clamped_sum=lambda c, x: F.one_hot(_slot(c, x), c.blocks + 1)[..., :-1].sum(-2).clamp(max=1).bool(),
    equal=lambda c, x: (x.unsqueeze(-1) == torch.arange(c.blocks)).any(-2),
    equal_masked=lambda c, x: ((x[..., None] == torch.arange(c.blocks)) & (x[..., None] != -1)).any(dim=-2),
    scatter=lambda c, x: _empty(c, c.blocks + 1).scatter(-1, _slot(c, x), True)[..., :-1],
    scatter_float=lambda c, x: (
        torch.zeros(c.B, c.S, c.G, c.blocks + 1).scatter(3, _slot(c, x), 1.0)[..., : c.blocks] > 0
    ),
    scatter_source=lambda c, x: (
        x.new_zeros(c.B, c.S, c.G, c.blocks + 1).scatter(-1, _slot(c, x), torch.ones_like(x))[..., : c.blocks].bool()
    ),
    scatter_false=lambda c, x: (
        ~torch.ones(c.B, c.S, c.G, c.blocks + 1, dtype=torch.bool).scatter(-1, _slot(c, x), False)[..., :-1]
    ),
    scatter_add=lambda c, x: _empty(c, c.blocks, torch.int32).scatter_add(-1, x.clamp(min=0), (x >= 0).int()) > 0,
    scatter_reduce=lambda c, x: (
        torch.zeros(c.B, c.S, c.G, c.blocks).scatter_reduce(-1, x.clamp(min=0), (x >= 0).float(), "amax") > 0
    ),
    keys=lambda c, x: ((c.t // c.size) == x[..., None]).any(-2),
    keys_sum=lambda c, x: (
        (torch.div(c.t, c.size, rounding_mode="floor").view(1, 1, 1, 1, -1) == x[..., None]).sum(3) >= 1
    ),
    starts=lambda c, x: ((c.t >= (x * c.size)[..., None]) & (c.t < ((x + 1) * c.size)[..., None])).any(-2),
    starts_and_size=lambda c, x: (
        (c.t >= (x * c.size).unsqueeze(-1)) & (c.t < (x * c.size).unsqueeze(-1) + c.size)
    ).any(-2),
)


@pick("blocks")
def _blocks_scatter_in_place(c: Call, x: Tensor) -> Tensor:
    mask = _empty(c, c.blocks + 1)
    mask.scatter_(-1, _slot(c, x), True)
    return mask[..., : c.blocks]


@pick("blocks")
def _blocks_put(c: Call, x: Tensor) -> Tensor:
    mask = _empty(c, c.blocks + 1)
    b, s, g = torch.arange(c.B), torch.arange(c.S), torch.arange(c.G)
    mask[b[:, None, None, None], s[None, :, None, None], g[None, None, :, None], _slot(c, x)] = True
    return mask[..., :-1]


@pick("blocks")
def _blocks_put_minus_one(c: Call, x: Tensor) -> Tensor:
    """Index -1 writes the extra last slot, which is sliced off."""
    mask = _empty(c, c.blocks + 1)
    b, s, g = torch.arange(c.B), torch.arange(c.S), torch.arange(c.G)
    mask[b.view(-1, 1, 1, 1), s.view(-1, 1, 1), g.view(-1, 1), x] = True
    return mask[:, :, :, : c.blocks]


@pick("blocks")
def _blocks_loop(c: Call, x: Tensor) -> Tensor:
    mask = _empty(c, c.blocks)
    for j in range(x.shape[-1]):
        mask |= torch.arange(c.blocks) == x[..., j : j + 1]
    return mask


@pick("blocks")
def _blocks_loop_over_keys(c: Call, x: Tensor) -> Tensor:
    block, mask = c.t // c.size, _empty(c)
    for each in x.unbind(-1):
        mask = mask | (block == each[..., None])
    return mask


picks(
    "keys",
    repeat_interleave=lambda c, m: m.repeat_interleave(c.size, dim=-1)[..., : c.T],
    repeat_interleave_function=lambda c, m: torch.repeat_interleave(m, c.size, -1)[:, :, :, : c.T],
    expand=lambda c, m: m.unsqueeze(-1).expand(*m.shape, c.size).reshape(c.B, c.S, c.G, -1)[..., : c.T],
    expand_flatten=lambda c, m: m[..., None].expand(-1, -1, -1, -1, c.size).flatten(-2)[..., : c.T],
    repeat=lambda c, m: m[..., None].repeat(1, 1, 1, 1, c.size).flatten(3)[..., : c.T],
    index=lambda c, m: m[..., c.t // c.size],
    index_dims=lambda c, m: m[:, :, :, c.t // c.size],
    shift=lambda c, m: m[..., c.t >> int(math.log2(c.size))],
    index_select=lambda c, m: m.index_select(-1, torch.div(c.t, c.size, rounding_mode="floor")),
    gather=lambda c, m: m.gather(-1, (c.t // c.size).expand(c.B, c.S, c.G, c.T)),
    take_along=lambda c, m: torch.take_along_dim(m, (c.t // c.size).view(1, 1, 1, -1), -1),
    truncated=lambda c, m: m[..., torch.div(c.t, c.size, rounding_mode="trunc")],
)

# --- single keys -------------------------------------------------------------------------------------------

picks(
    "tokens",
    scatter=lambda c, x: _empty(c).scatter(-1, x, True),
    one_hot=lambda c, x: F.one_hot(x, c.T).any(-2),
    equal=lambda c, x: (x[..., None] == c.t).any(-2),
    additive=lambda c, x: torch.full((c.B, c.S, c.G, c.T), -INF).scatter(-1, x, 0.0) == 0,
    not_infinite=lambda c, x: torch.full((c.B, c.S, c.G, c.T), -INF).scatter_(-1, x, 0.0) != -INF,
)

# --- masks [B, S, G, T] from keys for all heads [B, S, r], -1 for none ---------------------------------------


def _past(c: Call, x: Tensor) -> Tensor:
    """Maps negative keys to one extra column after the last key."""
    return torch.where(x < 0, c.T, x)


def _all_heads(c: Call, m: Tensor) -> Tensor:
    return m.unsqueeze(2).expand(-1, -1, c.G, -1)


picks(
    "lists",
    scatter=lambda c, x: _all_heads(
        c, torch.zeros(c.B, c.S, c.T + 1, dtype=torch.bool).scatter(-1, _past(c, x), True)[..., : c.T]
    ),
    left_out=lambda c, x: _all_heads(
        c, ~torch.ones(c.B, c.S, c.T + 1, dtype=torch.bool).scatter(-1, _past(c, x), False)[..., : c.T]
    ),
    counted=lambda c, x: _all_heads(
        c, torch.zeros(c.B, c.S, c.T, dtype=torch.int32).scatter_add(-1, x.clamp(min=0), x.ge(0).int()).ne(0)
    ),
    spare_column=lambda c, x: _all_heads(
        c, torch.full((c.B, c.S, c.T + 1), -INF).scatter_(-1, _past(c, x), 0.0)[..., : c.T] == 0
    ),
    equal=lambda c, x: _all_heads(c, (x[..., None] == c.t).any(-2)),
    one_hot=lambda c, x: _all_heads(c, F.one_hot(x + 1, c.T + 1).any(-2)[..., 1:]),
)

# --- causality, on [B, S, G, T] -----------------------------------------------------------------------------

picks(
    "causal",
    none=lambda c, m: m,
    compared=lambda c, m: m & (c.t <= c.positions[:, None])[:, None],
    compared_first=lambda c, m: (c.positions.view(1, -1, 1, 1) >= c.t) & m,
    difference=lambda c, m: m & (c.t[None, :] - c.positions[:, None] <= 0).unsqueeze(1),
    arange=lambda c, m: m & (torch.arange(c.T - c.S, c.T)[:, None] >= c.t[None]).view(1, c.S, 1, c.T),
    tril=lambda c, m: m & torch.ones(c.S, c.T, dtype=torch.bool).tril(c.T - c.S)[None, :, None],
    triu=lambda c, m: m & ~torch.triu(torch.ones(c.S, c.T, dtype=torch.bool), diagonal=c.T - c.S + 1).unsqueeze(1),
    filled=lambda c, m: m.masked_fill(torch.ones(c.S, c.T).triu(1 + c.T - c.S).bool()[:, None], False),
    product=lambda c, m: (m.int() * (c.t <= c.positions[:, None]).int()[:, None]) > 0,
    logical=lambda c, m: torch.logical_and(m, torch.tril(torch.ones(c.S, c.T), c.T - c.S)[:, None] == 1),
    where=lambda c, m: torch.where((c.t > c.positions[:, None])[:, None], False, m),
    in_place=lambda c, m: operator.iand(m.clone(), (c.t <= c.positions[:, None])[:, None]),
)

# --- segments, on [B, S, G, T], from a tensor [B, T] ---------------------------------------------------------


def _same_segment(c: Call, m: Tensor, segments: Tensor) -> Tensor:
    return m & (segments[:, c.T - c.S :, None] == segments[:, None])[:, :, None]


picks(
    "segments",
    none=lambda c, m, x: m,
    ids=_same_segment,
    positions=lambda c, m, x: _same_segment(c, m, (torch.diff(x, prepend=x[:, :1] - 1, dim=-1) != 1).cumsum(-1)),
    padding=lambda c, m, x: m & x.bool()[:, None, None],
)

# --- a mask [B, S, G, T] for all heads [B, H, S, T] ----------------------------------------------------------

picks(
    "heads",
    repeat_interleave=lambda c, m: m.permute(0, 2, 1, 3).repeat_interleave(c.h, dim=1),
    expand=lambda c, m: m.transpose(1, 2)[:, :, None].expand(-1, -1, c.h, -1, -1).reshape(c.B, c.G * c.h, c.S, c.T),
    flatten=lambda c, m: m.transpose(1, 2).unsqueeze(2).expand(c.B, c.G, c.h, c.S, c.T).flatten(1, 2),
    before=lambda c, m: m.repeat_interleave(c.h, 2).transpose(1, 2),
    index=lambda c, m: m[:, :, torch.arange(c.G * c.h) // c.h].transpose(1, 2),
    repeat=lambda c, m: m.movedim(2, 1)[:, :, None].repeat(1, 1, c.h, 1, 1).view(c.B, -1, c.S, c.T),
)

# --- K or V [B, T, G, D] for all heads [B, H, T, D] ---------------------------------------------------------

picks(
    "spread",
    repeat_interleave=lambda c, k: k.transpose(1, 2).repeat_interleave(c.h, dim=1),
    before=lambda c, k: k.repeat_interleave(c.h, 2).transpose(1, 2),
    expand=lambda c, k: k.transpose(1, 2)[:, :, None].expand(-1, -1, c.h, -1, -1).reshape(c.B, c.G * c.h, c.T, -1),
    contiguous=lambda c, k: torch.repeat_interleave(k, c.h, dim=2).permute(0, 2, 1, 3).contiguous(),
    flatten=lambda c, k: k[:, :, :, None].expand(-1, -1, -1, c.h, -1).flatten(2, 3).transpose(1, 2),
)

# --- scores -> weights: where (mask, scores) -----------------------------------------------------------------

picks(
    "masked",
    fill=lambda c, s, m: s.masked_fill(~m, -INF),
    fill_not=lambda c, s, m: s.masked_fill(torch.logical_not(m), float("-inf")),
    where=lambda c, s, m: torch.where(m, s, -INF),
    where_not=lambda c, s, m: torch.where(~m, torch.full_like(s, -INF), s),
    where_tensor=lambda c, s, m: torch.where(m, s, torch.tensor(-INF, dtype=s.dtype)),
    equal_0=lambda c, s, m: s.masked_fill(m == 0, -INF),
    lowest=lambda c, s, m: s.masked_fill(~m, torch.finfo(s.dtype).min),
    large=lambda c, s, m: torch.where(m, s, -1e9),
    add_where=lambda c, s, m: s + torch.where(m, 0.0, -INF),
    add_zeros=lambda c, s, m: torch.zeros_like(s).masked_fill(~m, -INF) + s,
    add_full=lambda c, s, m: s + torch.full(m.shape, -INF, dtype=s.dtype).masked_fill(m, 0),
    add_lowest=lambda c, s, m: s + (1.0 - m.to(s.dtype)) * torch.finfo(s.dtype).min,
    add_not=lambda c, s, m: s + (~m).to(s.dtype) * -1e9,
    add_log=lambda c, s, m: s + m.to(s.dtype).log(),
)


@pick("masked")
def _masked_in_place(c: Call, s: Tensor, m: Tensor) -> Tensor:
    s = s.clone()
    s.masked_fill_(~m, -INF)
    return s


@pick("masked")
def _masked_added_in_place(c: Call, s: Tensor, m: Tensor) -> Tensor:
    bias = torch.zeros(m.shape, dtype=s.dtype)
    bias.masked_fill_(~m, -INF)
    s = s * 1.0
    s += bias
    return s


picks(
    "softmax",
    plain=lambda c, s, v: torch.softmax(s, dim=-1).to(v.dtype),
    function=lambda c, s, v: F.softmax(s, -1).to(v.dtype),
    wide=lambda c, s, v: F.softmax(s, dim=-1, dtype=torch.float32).to(v.dtype),
    method=lambda c, s, v: s.float().softmax(-1).type_as(v),
    nan_to_num=lambda c, s, v: torch.nan_to_num(s.softmax(-1), nan=0.0).to(v.dtype),
    dropout=lambda c, s, v: F.dropout(s.softmax(-1).to(v.dtype), p=0.0, training=True),
    dropout_off=lambda c, s, v: F.dropout(s.softmax(-1).to(v.dtype), p=0.1, training=False),
    written_out=lambda c, s, v: _divided(e := (s - s.amax(-1, keepdim=True)).exp(), e.sum(-1, keepdim=True), v),
    written_detached=lambda c, s, v: _divided(
        e := torch.exp(s - s.max(dim=-1).values[..., None].detach()), e.sum(dim=-1).unsqueeze(-1), v
    ),
)


def _divided(e: Tensor, total: Tensor, v: Tensor) -> Tensor:
    return (e / total).to(v.dtype)


picks(
    "sink",
    none=lambda c, s, b, v: c.softmax(s, v),
    last=lambda c, s, b, v: c.softmax(torch.cat([s, b], -1), v)[..., :-1],
    first=lambda c, s, b, v: c.softmax(torch.cat([b, s], dim=-1), v)[..., 1:],
    maximum=lambda c, s, b, v: c.softmax(
        (logits := torch.cat([s, b], dim=-1)) - logits.max(dim=-1, keepdim=True).values, v
    )[..., : c.T],
)

picks(
    "scale",
    after=lambda c, q, k, dot: dot(q, k) * q.shape[-1] ** -0.5,
    root=lambda c, q, k, dot: dot(q, k) / math.sqrt(q.shape[-1]),
    before=lambda c, q, k, dot: dot(q * 0.3, k),
    both=lambda c, q, k, dot: dot(q * 0.5, k * 0.7),
    none=lambda c, q, k, dot: dot(q, k),
    wide=lambda c, q, k, dot: dot(q, k).float() * 0.25,
    wide_inputs=lambda c, q, k, dot: dot(q.float(), k.float()) * 0.25,
    divided=lambda c, q, k, dot: torch.div(dot(q, k), 2.5),
    method=lambda c, q, k, dot: dot(q, k).mul(1 / math.sqrt(q.shape[-1])),
)


# --- the whole attention ------------------------------------------------------------------------------------


def _sdpa(c: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Calls SDPA for all heads, under a mask [B, H, S, T]."""
    k, v = c.spread(k), c.spread(v)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, **options).transpose(1, 2)


picks("form", sdpa=lambda c, q, k, v, m: _sdpa(c, q, k, v, c.heads(m)))


@pick("form")
def _form_sdpa_scaled(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = q.permute(0, 2, 1, 3).contiguous(), c.spread(k), c.spread(v)
    o = F.scaled_dot_product_attention(q, k, v, c.heads(m), 0.0, False, scale=0.3)
    return o.transpose(1, 2).contiguous()


@pick("form")
def _form_sdpa_gqa(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=c.heads(m), enable_gqa=True).transpose(1, 2)


picks(
    "form",
    sdpa_float=lambda c, q, k, v, m: _sdpa(
        c, q, k, v, c.heads(torch.zeros(m.shape, dtype=q.dtype).masked_fill(m.logical_not(), -INF))
    ),
    sdpa_where=lambda c, q, k, v, m: _sdpa(c, q, k, v, torch.where(c.heads(m), 0.0, -INF).to(q.dtype)),
)


@pick("form")
def _form_sdpa_groups(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Uses five dims: the heads of a group broadcast over K and V."""
    q = q.unflatten(2, (c.G, c.h)).permute(0, 2, 3, 1, 4)
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=m.transpose(1, 2).unsqueeze(2))
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3)


picks(
    "form",
    sdpa_mask_read_again=lambda c, q, k, v, m: (
        _sdpa(c, q, k, v, c.heads(m)) * m.sum(-1, keepdim=True).sum(2, keepdim=True)
    ),
)


@pick("form")
def _form_matmul(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), c.spread(k), c.spread(v)
    s = c.scale(q, k, lambda a, b: a @ b.transpose(-2, -1))
    p = c.weights(s, c.heads(m), v, -1, 1, 1)
    return torch.matmul(p, v).transpose(1, 2)


@pick("form")
def _form_einsum(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    k, v = c.spread(k), c.spread(v)
    s = c.scale(q, k, lambda a, b: torch.einsum("bshd,bhtd->bhst", a, b))
    p = c.weights(s, c.heads(m), v, -1, 1, 1)
    return torch.einsum("bhst,bhte->bshe", p, v)


@pick("form")
def _form_einsum_last(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Computes scores [B, S, H, T] from K and V [B, T, H, D]."""
    k, v = (x.repeat_interleave(c.h, dim=2) for x in (k, v))
    s = c.scale(q, k, lambda a, b: torch.einsum("bshd,bthd->bsht", a, b))
    p = c.weights(s, m.repeat_interleave(c.h, 2), v, -1, 1)
    return torch.einsum("bsht,bthe->bshe", p, v)


@pick("form")
def _form_bmm(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    H = c.G * c.h
    q = q.transpose(1, 2).reshape(c.B * H, c.S, -1)
    k, v = (c.spread(x).reshape(c.B * H, c.T, -1) for x in (k, v))
    s = c.scale(q, k, lambda a, b: torch.bmm(a, b.transpose(1, 2)))
    p = c.weights(s, c.heads(m).reshape(c.B * H, c.S, c.T), v, -c.B, 1, 1)
    return torch.bmm(p, v).view(c.B, H, c.S, -1).transpose(1, 2)


@pick("form")
def _form_grouped(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q = q.view(c.B, c.S, c.G, c.h, -1)
    s = c.scale(q, k, lambda a, b: torch.einsum("bsghd,btgd->bsght", a, b))
    p = c.weights(s, m[:, :, :, None], v, c.G, c.h, 1)
    return torch.einsum("bsght,btge->bsghe", p, v).flatten(2, 3)


@pick("form")
def _form_grouped_matmul(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q = q.unflatten(2, (c.G, c.h)).permute(0, 2, 3, 1, 4)
    k, v = (x.permute(0, 2, 1, 3)[:, :, None] for x in (k, v))
    s = c.scale(q, k, lambda a, b: a @ b.mT)
    p = c.weights(s, m.transpose(1, 2).unsqueeze(2), v, c.G, c.h, 1, 1)
    return (p @ v).permute(0, 3, 1, 2, 4).reshape(c.B, c.S, c.G * c.h, -1)


@pick("form")
def _form_grouped_einsum(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    q = q.reshape(c.B, c.S, c.G, c.h, q.shape[-1]).permute(0, 2, 3, 1, 4)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    s = c.scale(q, k, lambda a, b: torch.einsum("bghsd,bgtd->bghst", a, b))
    p = c.weights(s, m.transpose(1, 2)[:, :, None], v, c.G, c.h, 1, 1)
    return torch.einsum("bghst,bgte->bsghe", p, v).reshape(c.B, c.S, c.G * c.h, -1)


@pick("form")
def _form_multiplied(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Uses elementwise products and sums."""
    q, k, v = q.transpose(1, 2), c.spread(k), c.spread(v)
    s = c.scale(q, k, lambda a, b: (a.unsqueeze(3) * b.unsqueeze(2)).sum(-1))
    p = c.weights(s, c.heads(m), v, -1, 1, 1)
    return (p.unsqueeze(-1) * v.unsqueeze(2)).sum(3).transpose(1, 2)


picks(
    "out", plain=lambda o: o, flat=lambda o: o.reshape(o.shape[0], o.shape[1], -1), used=lambda o: torch.tanh(o) + 1.0
)

# --- mistakes -----------------------------------------------------------------------------------------------


def _wrong(axis: str, **parts: Part) -> None:
    MUTATIONS.update({name.replace("_", " "): (axis, part) for name, part in parts.items()})


_wrong(
    "ranges",
    end_inclusive=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t <= x[..., 1:2])).any(-2),
    start_exclusive=lambda c, x: ((c.t > x[..., 0:1]) & (c.t < x[..., 1:2])).any(-2),
    start_later=lambda c, x: ((c.t >= x[..., 0:1] + 1) & (c.t < x[..., 1:2])).any(-2),
    end_earlier=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2] - 1)).any(-2),
    keys_counted_from_1=lambda c, x: ((c.t + 1 >= x[..., 0:1]) & (c.t + 1 < x[..., 1:2])).any(-2),
    no_start=lambda c, x: (c.t < x[..., 1:2]).any(-2),
    no_end=lambda c, x: (c.t >= x[..., 0:1]).any(-2),
    all_ranges=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).all(-2),
    or_for_and=lambda c, x: ((c.t >= x[..., 0:1]) | (c.t < x[..., 1:2])).any(-2),
    not_selected=lambda c, x: ~((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).any(-2),
    in_two_ranges=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).sum(-2) > 1,
    in_one_range_only=lambda c, x: ((c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).sum(-2) == 1,
    keys_doubled=lambda c, x: ((2 * c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).any(-2),
    keys_backwards=lambda c, x: ((c.T - 1 - c.t >= x[..., 0:1]) & (c.t < x[..., 1:2])).any(-2),
    from_the_query=lambda c, x: (
        (c.t >= c.positions.view(-1, 1, 1, 1) - x[..., 0:1]) & (c.t < c.positions.view(-1, 1, 1, 1) - x[..., 0:1] + 5)
    ).any(-2),
    starts_of_one_range_ends_of_another=lambda c, x: (c.t >= x[..., 0:1]).any(-2) & (c.t < x[..., 1:2]).any(-2),
    exclusive_or=lambda c, x: ((c.t >= x[..., 0:1]) ^ (c.t >= x[..., 1:2])).any(-2),
    a_window=lambda c, x: ((c.t > c.positions[:, None] - 4) & (c.t <= c.positions[:, None]))[None, :, None].expand(
        c.B, c.S, c.G, c.T
    ),
    causal_only=lambda c, x: (c.t <= c.positions[:, None])[None, :, None].expand(c.B, c.S, c.G, c.T),
    lengths=lambda c, x: c.t < x[:, :, :, 0, 1:2].amax(1, keepdim=True).expand(c.B, c.S, c.G, 1),
    documents=lambda c, x: (torch.arange(c.T) // 4 == (c.positions // 4)[:, None])[None, :, None].expand(
        c.B, c.S, c.G, c.T
    ),
)


_wrong(
    "ranges",
    differences_added=lambda c, x: (
        _changes(c, x, _empty(c, c.T + 1, torch.long), lambda one: one).cumsum(-1)[..., : c.T] > 0
    ),
    differences_not_summed=lambda c, x: _changes(c, x, _empty(c, c.T + 1, torch.long))[..., : c.T] > 0,
    differences_above_1=lambda c, x: _changes(c, x, _empty(c, c.T + 1, torch.long)).cumsum(-1)[..., : c.T] > 1,
    differences_late=lambda c, x: _changes(c, x, _empty(c, c.T + 2, torch.long), late=1).cumsum(-1)[..., : c.T] > 0,
    # Combines the ranges by xor, so that overlapping ranges cancel.
    last_range_left_out=lambda c, x: _each(c, x, _empty(c), operator.xor),
    loop_of_and=lambda c, x: _each(c, x, torch.ones(c.B, c.S, c.G, c.T, dtype=torch.bool), operator.iand),
)
_wrong(
    "blocks",
    block_after=lambda c, x: (torch.arange(c.blocks) == x[..., None] + 1).any(-2),
    keys_of_the_block_before=lambda c, x: ((c.t + c.size) // c.size == x[..., None]).any(-2),
    blocks_shifted=lambda c, x: ((c.t + 1) // c.size == x[..., None]).any(-2),
    block_one_too_long=lambda c, x: ((c.t >= (x * c.size)[..., None]) & (c.t <= ((x + 1) * c.size)[..., None])).any(-2),
    block_one_too_short=lambda c, x: ((c.t >= (x * c.size)[..., None]) & (c.t < ((x + 1) * c.size - 1)[..., None])).any(
        -2
    ),
    every_block_but_these=lambda c, x: ~F.one_hot(x, c.blocks).any(-2),
    blocks_up_to=lambda c, x: (torch.arange(c.blocks) <= x[..., None]).any(-2),
    block_taken_twice=lambda c, x: F.one_hot(x, c.blocks).sum(-2) > 1,
    all_blocks_the_same=lambda c, x: F.one_hot(x, c.blocks).all(-2),
    scattered_false=lambda c, x: torch.ones(c.B, c.S, c.G, c.blocks, dtype=torch.bool).scatter(-1, x, False),
)
_wrong(
    "causal",
    strictly=lambda c, m: m & (c.t < c.positions[:, None])[:, None],
    one_ahead=lambda c, m: m & (c.t <= c.positions[:, None] + 1)[:, None],
    from_the_first_key=lambda c, m: m & (c.t <= torch.arange(c.S)[:, None])[:, None],
    tril_of_the_first_keys=lambda c, m: m & torch.ones(c.S, c.T, dtype=torch.bool).tril()[:, None],
    tril_one_less=lambda c, m: m & torch.ones(c.S, c.T, dtype=torch.bool).tril(c.T - c.S - 1)[:, None],
    backwards=lambda c, m: m & (c.t >= c.positions[:, None])[:, None],
    or_causal=lambda c, m: m | (c.t <= c.positions[:, None])[:, None],
    not_causal=lambda c, m: m & (c.t > c.positions[:, None])[:, None],
    key_padding=lambda c, m: m & (torch.arange(c.T * 2).view(2, c.T)[:, ::1] % 5 != 0).any(0),
)
_wrong(
    "heads",
    tiled=lambda c, m: m.transpose(1, 2).repeat(1, c.h, 1, 1),
    rolled=lambda c, m: m.transpose(1, 2).repeat_interleave(c.h, 1).roll(1, 1),
    one_head_only=lambda c, m: (
        m.transpose(1, 2).repeat_interleave(c.h, 1) | (torch.arange(c.G * c.h) == 1).view(-1, 1, 1)
    ),
)
_wrong("spread", tiled_keys=lambda c, k: k.transpose(1, 2).repeat(1, c.h, 1, 1))
_wrong(
    "masked",
    filled_with_0=lambda c, s, m: s.masked_fill(~m, 0.0),
    filled_with_a_little=lambda c, s, m: s.masked_fill(~m, -50.0),
    multiplied=lambda c, s, m: s * m,
    inverted=lambda c, s, m: s.masked_fill(m, -INF),
    biased=lambda c, s, m: (s + s.new_ones(c.T).cumsum(0)).masked_fill(~m, -INF),
    biased_after=lambda c, s, m: s.masked_fill(~m, -INF) - (c.t - c.positions[:, None]).abs().to(s.dtype),
    capped=lambda c, s, m: (3.0 * torch.tanh(s / 3.0)).masked_fill(~m, -INF),
    scaled_negatively=lambda c, s, m: -(s.masked_fill(~m, INF)),
    a_little_added=lambda c, s, m: s + (1.0 - m.to(s.dtype)) * -5.0,
    fill_positive=lambda c, s, m: s.masked_fill(~m, 1e9),
    added_the_wrong_way=lambda c, s, m: s + m.to(s.dtype) * -1e9,
)
_wrong(
    "softmax",
    over_queries=lambda c, s, v: s.nan_to_num(neginf=-1e9).softmax(-2).to(v.dtype),
    sigmoid=lambda c, s, v: torch.sigmoid(s).to(v.dtype),
    dropped=lambda c, s, v: F.dropout(s.softmax(-1).to(v.dtype), p=0.5, training=True),
    squared=lambda c, s, v: s.softmax(-1).to(v.dtype) ** 2,
    doubled=lambda c, s, v: 2.0 * s.softmax(-1).to(v.dtype) + 1e-3,
    written_without_maximum=lambda c, s, v: _divided(s.exp(), s.exp().sum(-1, True), v),
    written_with_another_maximum=lambda c, s, v: _divided(e := (s - s.amax(-2, True)).exp(), e.sum(-1, True), v),
    written_with_a_larger_sum=lambda c, s, v: _divided(e := (s - s.amax(-1, True)).exp(), e.sum(-1, True) + 1.0, v),
    written_with_the_sum_of_queries=lambda c, s, v: _divided(e := (s - s.amax(-1, True)).exp(), e.sum(-2, True), v),
    written_with_a_mean=lambda c, s, v: _divided(e := (s - s.amax(-1, True)).exp(), e.mean(-1, True), v),
    written_as_a_power_of_2=lambda c, s, v: _divided(e := (s - s.amax(-1, True)).exp2(), e.sum(-1, True), v),
    written_with_a_sharper_sum=lambda c, s, v: _divided(
        (d := s - s.amax(-1, True)).exp(), (2.0 * d).exp().sum(-1, True), v
    ),
)


_wrong(
    "sink",
    sink_twice=lambda c, s, b, v: c.softmax(torch.cat([s, b, b], -1), v)[..., :-2],
    sink_of_each_query=lambda c, s, b, v: c.softmax(torch.cat([s, b * c.positions[:, None]], -1), v)[..., :-1],
    sink_kept_for_the_first_key=lambda c, s, b, v: c.softmax(torch.cat([b, s], -1), v)[..., :-1],
    sink_scaled=lambda c, s, b, v: c.softmax(torch.cat([s, b], -1) * 0.5, v)[..., :-1],
    sink_as_a_gate=lambda c, s, b, v: c.softmax(s, v) * torch.sigmoid(b),
    sink_of_a_key=lambda c, s, b, v: c.softmax(torch.maximum(s, b), v),
)


def _biased(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    slopes = torch.arange(c.G * c.h, dtype=q.dtype).view(-1, 1, 1) * -(c.positions[:, None] - c.t).abs()
    return _sdpa(c, q, k, v, c.heads(torch.zeros(m.shape, dtype=q.dtype).masked_fill(~m, -INF)) + slopes)


def _weights(c: Call, q: Tensor, k: Tensor, v: Tensor, m: Tensor, other: Part) -> Any:
    """Returns the result, and what ``other`` makes of the scores and their weights."""
    s = c.scale(q.transpose(1, 2), c.spread(k), lambda a, b: a @ b.mT)
    p = c.softmax(c.masked(s, c.heads(m)), v)
    return (p @ c.spread(v)).transpose(1, 2), other(s, p)


_wrong(
    "form",
    dropout=lambda c, q, k, v, m: _sdpa(c, q, k, v, c.heads(m), dropout_p=0.5),
    a_bias_in_the_mask=_biased,
    weights_returned=lambda *given: _weights(*given, lambda s, p: p),
    scores_used=lambda *given: _weights(*given, lambda s, p: s.logsumexp(-1)),
    keys_for_values_of_other_groups=lambda c, q, k, v, m: F.scaled_dot_product_attention(
        q.transpose(1, 2), c.spread(k), v.transpose(1, 2).repeat(1, c.h, 1, 1), c.heads(m)
    ).transpose(1, 2),
)


# --- which spellings ----------------------------------------------------------------------------------------

KINDS = ("ranges", "blocks", "tokens", "lists")
VARIANTS = (
    Settings(),
    Settings(S=16, T=16),
    Settings(mode="no_grad"),
    Settings(S=1, T=16, mode="no_grad"),
    Settings(dtype=torch.bfloat16),
    Settings(dtype=torch.float16, S=16),
    Settings(dtype=torch.float64),
    Settings(T=18, S=5, size=4),
    Settings(B=1, G=3, h=2, r=1),
    Settings(G=1, h=4),
    Settings(h=1, G=3),
    Settings(negative=True),
    Settings(symbolic=True),
    Settings(symbolic=True, B=3, S=16, T=16, mode="no_grad"),
    Settings(mode="autocast"),
)


def plain(kind: str = "ranges", settings: Settings = VARIANTS[0], **picks: str) -> Attention:
    """Returns the plainest spelling, except for ``picks``."""
    return Attention(kind, {**{axis: next(iter(parts)) for axis, parts in AXES.items()}, **picks}, settings)


def singles() -> list[Attention]:
    """Returns every pick and every setting, with everything else at its plainest."""
    found = [plain(kind, s) for kind in KINDS for s in VARIANTS]
    for axis, parts in AXES.items():
        for name in list(parts)[1:]:
            kind = axis if axis in KINDS else {"keys": "blocks", "segments": "lists"}.get(axis, "ranges")
            form = "matmul" if axis in ("masked", "softmax", "scale", "sink") else "sdpa"
            found.append(plain(kind, **{"form": form, axis: name}))
    return found


def _left_out(one: Attention) -> bool:
    """Returns whether Dynamo refuses an attention, or it stays as tests/test_routing_selection.py says."""
    p, s, segments = one.picks, one.settings, one.has("segments")
    # Dynamo specialises the number of classes of a one_hot, here the number of keys or tied to it.
    dynamic = s.symbolic and (
        p["segments"] in ("ids", "positions")
        or (p.get(one.kind, "").startswith("one_hot") and (one.kind != "blocks" or segments))
        # Verification cuts the formula at an in-place write there, and draws ids and mask apart.
        or (one.kind == "blocks" and p["blocks"].startswith("put"))
    )
    written_out = not p["form"].startswith("sdpa")
    rounded = (s.dtype == torch.bfloat16 or s.mode == "autocast") and p["masked"] in ("large", "add_not")
    # In fp64 a score shows through -1e9, in rows without keys.
    rounded = rounded or (s.dtype == torch.float64 and p["masked"] == "add_not")
    # Autocast puts a cast between the difference and its exponential.
    cast = s.mode == "autocast" and p["softmax"].startswith("written")
    return dynamic or (written_out and (rounded or cast))


def spellings(count: int, seed: int = 0) -> list[Attention]:
    """Returns random spellings."""
    g = random.Random(seed)
    found: list[Attention] = []
    while len(found) < count:
        picks = {axis: g.choice(list(parts)) for axis, parts in AXES.items()}
        kind = g.choice(KINDS)
        if kind == "ranges" or g.random() < 0.3:  # segments are read at the entries of lists
            picks["segments"] = "none"
        if picks["form"].startswith("sdpa") or g.random() < 0.3:
            picks["sink"] = "none"
        one = Attention(kind, picks, g.choice(VARIANTS))
        if not _left_out(one):
            found.append(one)
    return found


def held(drawn: Iterable[Attention]) -> dict[str, int]:
    """Counts the attentions with segments, with sinks, and over lists of keys for all heads."""
    each = [(one.has("segments"), one.has("sink"), one.kind == "lists") for one in drawn]
    return dict(zip(("segments", "sinks", "lists"), map(sum, zip(*each, strict=True)), strict=True))


def mutants() -> list[Attention]:
    """Returns every mutation with everything else at its plainest."""
    found = []
    for name, (axis, _) in MUTATIONS.items():
        form = "matmul" if axis in ("masked", "softmax", "sink") else "sdpa"
        kind = "blocks" if axis == "blocks" else "ranges"
        found.append(dataclasses.replace(plain(kind, form=form), mutant=name))
    return found
