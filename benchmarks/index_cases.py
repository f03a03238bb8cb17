# SPDX-License-Identifier: Apache-2.0
"""Shapes, bars, goals and inputs of the index rows, the formula in fp64, and the formula as models write it.

Times are microseconds. Source: the project's survey on one NVIDIA H200 (torch 2.11, triton 3.6), bf16, L2 flushed,
medians. Absolute times count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mhc_inductor
from mhc_inductor.reference import index_loss as reference

from .accuracy import relative
from .running import Target

SCORES, BOTH, LOSS = "scores", "scores and top-k", "loss with gradients"
COMPILE, TORCH_TOPK = "torch.compile of the models' formula", "torch.topk of given scores"
RELATIVE_BAR = 2e-5  # ||a - b|| / ||b|| against fp64
MEMORY_BAR_MB, MEMORY_GOAL_MB = 2**30 / 1e6, 2**29 / 1e6
"""Bar and goal of the peak beyond inputs and outputs, of a choice at ``LONG`` and of a loss: 1 and 0.5 GiB."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape: S = T = ``tokens`` causal queries and keys, ``heads`` heads of ``dim``, ``topk`` keys chosen."""

    name: str
    tokens: int
    heads: int
    dim: int = 128
    topk: int = 2048
    attention: tuple[int, int] = (64, 576)
    """Heads and width of the attention that the loss takes as its target, in one group."""

    def small(self) -> Shape:
        return Shape(self.name, min(64, self.tokens // 128), max(2, self.heads // 16), 16, 12, (3, 24))


SHAPES = (Shape("64 heads", 8192, 64), Shape("32 heads", 8192, 32))
LONG = Shape("131072 tokens", 131072, 64)
TARGETS = {
    ("64 heads", SCORES): Target(850, 750),
    ("64 heads", BOTH): Target(1600, 1100),
    ("64 heads", LOSS): Target(8000, 5000),
}


# ---- cases


@dataclasses.dataclass
class Case:
    """The inputs of one case: q ``[1, S, H, D]``, k ``[1, T, D]``, w ``[1, S, H]``, limit ``[1, S]``."""

    shape: Shape
    q: Tensor
    k: Tensor
    w: Tensor
    limit: Tensor

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


def make_case(shape: Shape, device: torch.device) -> Case:
    """Returns a random causal case: bf16 q and k, fp32 w, standard normal."""
    n, h, d = shape.tokens, shape.heads, shape.dim
    q = torch.randn(1, n, h, d, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, n, d, device=device, dtype=torch.bfloat16)
    limit = torch.arange(1, n + 1, device=device, dtype=torch.int32)[None]
    return Case(shape, q, k, torch.randn(1, n, h, device=device), limit)


def scores(case: Case) -> Tensor:
    return mhc_inductor.index_scores(case.q, case.k, case.w, scale=case.scale, limit=case.limit)


def chosen(case: Case) -> Tensor:
    return mhc_inductor.index_topk(case.q, case.k, case.w, case.shape.topk, scale=case.scale, limit=case.limit)


def loss_arguments(case: Case) -> tuple[Any, ...]:
    """Returns the arguments of ``index_loss`` for the chosen keys, and a random attention over all visible ones."""
    n, (heads, width) = case.shape.tokens, case.shape.attention
    attention_q, attention_k = (
        torch.randn(1, *sizes, width, device=case.q.device, dtype=case.q.dtype) for sizes in ((n, 1, heads), (1, n))
    )
    # Scores are standard normal: the mean of their exponentials is exp(1/2).
    lse = (case.limit.float().log() + 0.5)[..., None, None].expand(1, n, 1, heads).contiguous()
    return case.q, case.k, case.w, chosen(case), attention_q, attention_k, lse, case.scale, width**-0.5


def trained(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Returns loss, dscores and the gradients of q, k and w for a gradient of 1."""
    ops = torch.ops.mhc_inductor
    loss, dscores = ops.index_loss(*args)
    return loss, dscores, *ops.index_loss_backward(torch.ones_like(loss), *args[:4], dscores, args[7])


def loss_of(args: tuple[Any, ...], at: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the loss ``[n]`` of the queries ``at`` by the formula, in ``dtype``."""
    q, k, w, indices, attention_q, attention_k, lse, *scales = args
    q, w, attention_q, lse = (t[:, at].to(dtype) for t in (q, w, attention_q, lse))
    k, attention_k = k.to(dtype), attention_k.to(dtype)
    return reference.index_loss(q, k, w, indices[:, at], attention_q, attention_k, lse, *scales)[0][0]


def formula(q: Tensor, k: Tensor, w: Tensor, scale: float, at: Tensor | None = None) -> Tensor:
    """Returns the scores as models compute them, in fp32, -inf at keys after the query; ``at``: queries' positions."""
    x = torch.einsum("bshd,btd->bsht", q.float(), k.float())
    total = ((x * scale).relu() * w[..., None]).sum(2)
    keys = torch.arange(k.shape[1], device=q.device)
    return total.masked_fill(keys > (keys if at is None else at)[:, None], float("-inf"))


def formula_topk(q: Tensor, k: Tensor, w: Tensor, scale: float, topk: int) -> Tensor:
    """Returns the indices that models take: after fewer than topk visible keys, those of invisible ones."""
    return formula(q, k, w, scale).topk(topk, -1).indices


def compiled(case: Case, what: str) -> Callable[[], Tensor]:
    """Returns torch.compile of the models' formula."""
    torch.compiler.reset()  # after some recompiles of one function, Dynamo would run it uncompiled
    args = (case.q, case.k, case.w, case.scale)
    if what == SCORES:
        run = torch.compile(formula, dynamic=False)
        return lambda: run(*args)
    both = torch.compile(formula_topk, dynamic=False)
    return lambda: both(*args, case.shape.topk)


def exact(case: Case, at: Tensor) -> Tensor:
    """Returns the scores ``[n, T]`` of the queries ``at`` in fp64, -inf at keys after the query."""
    keys, rows = case.k[0].double(), []
    for s in at.tolist():
        x = (keys @ case.q[0, s].double().T * case.scale).relu()
        row = x @ case.w[0, s].double()
        row[s + 1 :] = float("-inf")
        rows.append(row)
    return torch.stack(rows)


def score_error(got: Tensor, want: Tensor) -> float:
    """Returns the relative error of scores ``[n, T]`` at visible keys; NaN where others are visible."""
    seen = want > float("-inf")
    if not torch.equal(seen, got > float("-inf")):
        return float("nan")
    return relative(got[seen], want[seen])


def wrongly_chosen(got: Tensor, want: Tensor, tolerance: float) -> int:
    """Returns how many keys are wrong among the chosen ``got [n, topk]`` for the fp64 scores ``want [n, T]``.

    Wrong are repeats, keys that are not visible, too few keys, and keys whose score is below that of a key left out by
    more than ``tolerance`` times the largest score.
    """
    wrong = 0
    for row, score in zip(got.long(), want, strict=True):
        seen = int((score > float("-inf")).sum())
        keys = row[row >= 0]
        count = min(len(row), seen)
        wrong += abs(count - len(keys.unique())) + len(keys) - len(keys.unique())
        visible = keys[score[keys] > float("-inf")]
        wrong += len(keys) - len(visible)
        if 0 < count < seen:
            least = score.topk(count).values[-1] - tolerance * score[:seen].abs().max()
            wrong += int((score[visible] < least).sum())
    return wrong
