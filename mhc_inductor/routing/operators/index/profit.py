# SPDX-License-Identifier: Apache-2.0
"""Decides whether index scores are worth routing: one closed-form rule on present sizes."""

from __future__ import annotations

import dataclasses

import torch

MAX_D, MAX_HEADS, MAX_TOPK = 256, 128, 4096
"""What the kernels take (kernels/index/plan.py)."""
MOST_ON_CPU = 1 << 30
"""Bytes of the fp32 products of all heads from which on the op replaces the formula on a CPU."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Present sizes of index scores; ``rows`` counts the queries of all sequences."""

    dtype: torch.dtype
    rows: int
    keys: int
    heads: int
    width: int
    topk: int


def refusal(s: Sizes, device: str) -> str:
    """Returns why no kernel takes these sizes on a GPU, an empty string if one does.

    On a GPU the op is always the faster one, since it never writes the products of all heads.
    """
    if s.topk > MAX_TOPK:
        return f"topk of {s.topk} keys; the kernels take up to {MAX_TOPK}"
    if device != "cuda":
        return ""
    if s.dtype is torch.float64:
        return "float64 has no kernel"
    if s.width > MAX_D:
        return f"heads of {s.width} elements; the kernels take up to {MAX_D}"
    if s.heads > MAX_HEADS:
        return f"{s.heads} heads; the kernels take up to {MAX_HEADS}"
    return ""


def keeps_formula(s: Sizes) -> bool:
    """Returns whether, on a CPU, Inductor's code for the formula is preferred to the op.

    There the op saves memory, not time: it holds the products of a few queries. Milliseconds with 8 heads of 64
    elements, 256 of S causal keys, bf16, on two cores of a busy machine (formula in eager, compiled, op):
    S = 1024: 147, 100, 276; S = 2048: 721, 390, 399; S = 4096: 3427, 1797, 4021. In fp32: 151, 76, 126;
    730, 477, 1248; 2989, 1649, 4153. The formula then holds 32, 128 and 512 MiB of products, more than once.
    """
    return 4 * s.rows * s.keys * s.heads < MOST_ON_CPU
