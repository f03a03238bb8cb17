"""Decides whether an attention under a mask is worth routing: one closed-form rule on present shapes."""

from __future__ import annotations

import dataclasses
import math

import torch

UNKNOWN = 1024
"""Keys that a query is assumed to see if ranges may have any length: 16 blocks of 64, as in public models."""
FEW_QUERIES = 16
MAX_HEADS, MAX_D = 64, 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Present sizes of an attention.

    ``selected``: the most keys that a query can see, None if there is no bound.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    heads: int
    width: int
    selected: int | None


def refusal(s: Sizes) -> str:
    """Returns why the op does not replace dense attention, an empty string if it does.

    Dense attention under a mask reads ``keys`` keys for every query, the op ``selected`` keys. Each of these costs
    the op ``16 / sqrt(h)`` times as much with h heads per group: 8 times with 4 heads and 4 times with 16, as
    measured on an H200 (docs/design.md). With few queries, where reading dominates, each costs twice as much. On a
    CPU the op always replaces dense attention.
    """
    if s.device != "cuda":
        return ""
    if s.dtype is torch.float64:
        return "float64 has no kernel"
    if s.heads > MAX_HEADS:
        return f"{s.heads} heads a group; the kernels take up to {MAX_HEADS}"
    if s.width > MAX_D:
        return f"heads of {s.width} elements; the kernels take up to {MAX_D}"
    each = 2.0 if s.queries <= FEW_QUERIES else 16.0 / math.sqrt(max(1, s.heads))
    selected = UNKNOWN if s.selected is None else s.selected
    if selected * each <= s.keys:
        return ""
    open_ = "as many as " if s.selected is None else ""
    return f"dense attention is faster: {open_}{selected} of {s.keys} keys, {s.heads} heads a group"
