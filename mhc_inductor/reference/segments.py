# SPDX-License-Identifier: Apache-2.0
"""Segment ids: a key counts for a query only where their ids are equal, or where the key has the id ANY_SEGMENT."""

from __future__ import annotations

from torch import Tensor

ANY_SEGMENT = -(2**31)
"""The id of a key that counts for the queries of every segment. As the id of a query it has no special meaning."""


def same_segment(segments_q: Tensor, segments_k: Tensor) -> Tensor:
    """Returns whether each key ``segments_k[..., T]`` counts for each query ``segments_q[..., S]``: ``[..., S, T]``."""
    keys = segments_k.unsqueeze(-2)
    return (keys == segments_q.unsqueeze(-1)) | (keys == ANY_SEGMENT)
