# SPDX-License-Identifier: Apache-2.0
"""Shapes, targets and inputs of the selection-attention rows, and what they are checked against.

Bars, goals and times of others are microseconds. Source: the project's survey on one NVIDIA H200 (torch 2.11, triton
3.6): bf16, D = 128, 16 blocks of 64 selected per query, L2 flushed, medians. The sparse peers are block-aligned and
causal only. Absolute times count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import mhc_inductor

from . import attention
from .attention import CHUNK
from .running import Target

DENSE, FLA, GATHER = "dense causal SDPA (cuDNN)", "flash-linear-attention", "gather + SDPA"
MASKED = "dense SDPA with a mask"
XUNHAO, FSA, FLEX = "XunhaoLai's Triton", "Flash-Sparse-Attention", "flex_attention"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape: the last ``queries`` positions of ``batch`` sequences of ``keys``, ``heads`` query heads per group.

    A query selects ``picks`` blocks of ``block`` keys, or ``tokens`` single keys if ``tokens`` is not 0.
    """

    name: str
    queries: int
    groups: int
    heads: int
    keys: int = 0
    batch: int = 1
    dim: int = 128
    block: int = 64
    picks: int = 16
    tokens: int = 0

    @property
    def length(self) -> int:
        return self.keys or self.queries

    @property
    def decodes(self) -> bool:
        return self.queries != self.length

    def small(self) -> Shape:
        """Returns a shape of the same kind with a few hundred times less work, for trial runs."""
        keys = max(64, min(256, self.length // 256))
        queries = min(self.queries, 3) if self.decodes else keys
        return dataclasses.replace(
            self,
            queries=queries,
            groups=2,
            heads=min(2, self.heads),
            keys=keys if self.decodes else 0,
            batch=min(2, self.batch),
            dim=16,
            block=8,
            picks=5,
            tokens=min(12, self.tokens),
        )


C1 = Shape("c1", 16384, 4, 16)
C2 = Shape("c2", 16384, 8, 4)
C3 = Shape("c3", 32768, 4, 16)
DECODE = Shape("decode", 1, 4, 16, keys=65536, batch=16)
SHORT = tuple(Shape(f"{n}K", n * 1024, 4, 16) for n in (2, 4, 8))
TOKENS = Shape("tokens", 4096, 4, 16, keys=16384, tokens=512)
TOKENS_DECODE = Shape("tokens, decode", 1, 4, 16, keys=65536, batch=16, tokens=512)
GRADIENTS = (Shape("gradients, 16 heads a group", 1024, 2, 16), Shape("gradients, 4 heads a group", 1024, 2, 4))
CROSSING_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
CROSSING_HEADS = {16: 4, 4: 8}
"""Groups by query heads per group: 64 and 32 heads in all, as in c1 and c2."""

BLOCKS = "ops, from block indices"
SPEED: tuple[tuple[Shape, str, tuple[str, ...]], ...] = (
    *(
        (s, select, (DENSE, FLA, BLOCKS) if select == "corr" else ())
        for s in (C1, C2, C3, DECODE)
        for select in ("corr", "rand")
    ),
    *((s, "corr", (DENSE,)) for s in SHORT),
    *((s, "tokens", (GATHER,)) for s in (TOKENS, TOKENS_DECODE)),
)
"""What is timed next to each other: a shape, its selection, and the implementations next to the op."""

RAND_FACTOR = 1.35
"""The bar of "rand" as a multiple of the bar, which is stated for "corr"."""

TARGETS: dict[tuple[str, str], Target] = {
    ("c1", "fwd"): Target(3900, 2600, {DENSE: 7540, FLA: 5000, XUNHAO: 4680, FSA: 17000, FLEX: 55900}),
    ("c1", "fb"): Target(11000, 8000, {DENSE: 28500, FLA: 29200, XUNHAO: 13500, FSA: 45500}),
    ("c2", "fwd"): Target(3800, 2800, {DENSE: 3820, FLA: 9730, XUNHAO: 9100, FSA: 12800, FLEX: 28500}),
    ("c2", "fb"): Target(13000, 9000, {DENSE: 14400, FLA: 28800, XUNHAO: 20800, FSA: 27700}),
    ("c3", "fwd"): Target(7800, 5200, {DENSE: 29300, FLA: 10100, XUNHAO: 9350, FSA: 26200, FLEX: 204000}),
    ("c3", "fb"): Target(22000, 16000, {DENSE: 113000, FLA: 59300, XUNHAO: 27400, FSA: 66600}),
    ("decode", "fwd"): Target(26, 18, {DENSE: 484, FLA: 78, XUNHAO: 29}),
}
"""``fwd``: the op without gradients; ``fb``: the op and the gradients of its output for q, k and v."""

MEMORY_FACTOR = 1.2
"""Bar of a training step's peak at c1, as a multiple of the bytes of Q, K, V, O and their gradients."""

CPU_SHAPES = (
    Shape("cpu", 1024, 2, 4, dim=64, block=32, picks=8),
    Shape("cpu, decode", 1, 2, 4, keys=8192, batch=4, dim=64),
)
CPU_THREADS = 2


def _cpu(name: str, length: int, groups: int, heads: int, dim: int = 64, block: int = 64) -> Shape:
    return Shape(name, length, groups, heads, dim=dim, block=block, tokens=16 * block)


_NEEDLE = "the needle model"
CPU_DENSE_SHAPES = (
    *(
        (shape, torch.float32)
        for length in (4096, 8192, 16384, 32768)
        for shape in (
            _cpu(_NEEDLE, length, 1, 4, 16, 32),
            _cpu("D = 16", length, 1, 4, 16),
            _cpu("D = 64", length, 1, 4),
        )
    ),
    (_cpu("2 groups", 8192, 2, 4), torch.float32),
    (_cpu("16 heads", 8192, 1, 16), torch.float32),
    (_cpu("D = 64", 8192, 1, 4), torch.bfloat16),
)
"""Shapes at which the op is compared with dense attention on a CPU, and their dtypes."""
CPU_DENSE = "dense causal SDPA"
CPU_LONGEST_WITH_GRADIENTS = 16384
CPU_GRADIENTS = _cpu("gradients", 2048, 1, 4)


def target(name: str, what: str, select: str) -> Target | None:
    """Returns the target of a row, or None; that of "rand" is ``RAND_FACTOR`` times the bar, without a goal."""
    found = TARGETS.get((name, what))
    if found is None or select != "rand":
        return found
    return Target(RAND_FACTOR * found.bar, None, found.peers)


# ---- cases

RUN, REDRAWN, FIXED = 64, 0.25, 3
NAMES = ("q", "k", "v")
SELECTS = ("corr", "rand")


@dataclasses.dataclass
class Case(attention.Case):
    """A case of ranges ``[B, S, G, r, 2]``, and the blocks that they came from."""

    select: str
    ranges: Tensor
    blocks: Tensor | None = None

    @property
    def selected(self) -> dict[str, Any]:
        return {"ranges": self.ranges}

    def mask(self, *at: Any) -> Tensor:
        return mask_of(self.ranges[at], self.shape.length)


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
    rows = max(RUN, CHUNK // count // RUN * RUN)
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


def _one_of_each_part(shape: Shape, device: torch.device) -> Tensor:
    """Returns a random causal key of each of ``tokens`` equal parts of a query's keys, ascending, ``[B, S, G, tokens]``."""
    reach, i = positions(shape, device)[:, None] + 1, torch.arange(shape.tokens, device=device)
    low, high = i * reach // shape.tokens, (i + 1) * reach // shape.tokens
    low, width = low[None, :, None], (high - low).clamp(min=1)[None, :, None]
    draw = torch.rand((shape.batch, shape.queries, shape.groups, shape.tokens), device=device)
    return low + torch.minimum((draw * width).long(), width - 1)


def tokens(shape: Shape, device: torch.device) -> Tensor:
    """Returns distinct causal keys, unordered, int32 ``[B, S, G, tokens]``; ValueError if a query has too few."""
    reach = shape.length - shape.queries + 1
    if reach < shape.tokens:
        raise ValueError(f"{shape.name}: the first query has {reach} keys, fewer than {shape.tokens}")
    at = _one_of_each_part(shape, device)
    return at.gather(-1, torch.rand(at.shape, device=device).argsort(-1)).int()


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
    return Case(shape, q, k, v, normal(B, S, G, h, D), logits, select, ranges, chosen)


def single_keys(shape: Shape) -> Tensor:
    """Returns ascending ranges of single causal keys, int32 ``[B, S, G, tokens, 2]``; all keys where there are fewer."""
    at = _one_of_each_part(shape, torch.device("cpu")).int()
    return torch.stack((at, at + 1), -1)


def cpu_cases(shape: Shape, dtype: torch.dtype) -> list[Case]:
    """Returns cases of the same q, k and v: blocks of neighbours that share most of theirs, and single keys."""
    of_blocks = make_case(dataclasses.replace(shape, tokens=0), "corr", torch.device("cpu"), dtype=dtype)
    of_blocks.select = f"{shape.picks} blocks of {shape.block}"
    ranges, select = single_keys(shape), f"{shape.tokens} keys"
    return [of_blocks, dataclasses.replace(of_blocks, shape=shape, select=select, ranges=ranges, blocks=None)]


# ---- the formula


def mask_of(ranges: Tensor, length: int) -> Tensor:
    """Returns the union of ``ranges [..., r, 2]`` as a mask, bool ``[..., length]``."""
    start, end = ranges.long().clamp(0, length).unbind(-1)
    end = torch.maximum(start, end)
    steps = torch.zeros(*start.shape[:-1], length + 1, dtype=torch.int32, device=ranges.device)
    one = torch.ones_like(start, dtype=torch.int32)
    steps.scatter_add_(-1, start, one).scatter_add_(-1, end, -one)
    return steps.cumsum(-1)[..., :length] > 0
