# SPDX-License-Identifier: Apache-2.0
"""Validation of segment ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mhc_inductor.ops.checks import _shape, integers


def segments(
    op: str,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    queries: Sequence[Any],
    keys: Sequence[Any],
    like: Tensor,
    meaning: tuple[str, str] = ("[B, S]", "[B, S_kv]"),
) -> None:
    """Raises ValueError or TypeError unless both or none of the segment ids are given, and they fit.

    Args:
        op: Name of the op for messages.
        segments_q: Ids of the queries, or None.
        segments_k: Ids of the keys, or None.
        queries: Expected shape of segments_q.
        keys: Expected shape of segments_k.
        like: Tensor q, whose device both must be on.
        meaning: Names of the dimensions of both, for messages.
    """
    if segments_q is None and segments_k is None:
        return
    for name, t, shape, names in (
        ("segments_q", segments_q, queries, meaning[0]),
        ("segments_k", segments_k, keys, meaning[1]),
    ):
        if t is None:
            raise ValueError(f"{op}: segments_q and segments_k must be given together, got {name} of None")
        integers(op, name, t, like)
        _shape(op, name, t, shape, names)
