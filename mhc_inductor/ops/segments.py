# SPDX-License-Identifier: Apache-2.0
"""Segment ids: a key counts for a query only where their ids are equal, or where the key has the id ANY_SEGMENT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mhc_inductor.ops.checks import _shape, integers

ANY_SEGMENT = -(2**31)
"""The id of a key that counts for the queries of every segment. As the id of a query it has no special meaning."""


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


def same_segment(segments_q: Tensor, segments_k: Tensor) -> Tensor:
    """Returns whether each key ``segments_k[..., T]`` counts for each query ``segments_q[..., S]``: ``[..., S, T]``."""
    keys = segments_k.unsqueeze(-2)
    return (keys == segments_q.unsqueeze(-1)) | (keys == ANY_SEGMENT)
