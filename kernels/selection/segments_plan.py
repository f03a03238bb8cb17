# SPDX-License-Identifier: Apache-2.0
"""The segment ids that the launch plans of selection attention pass to their kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from .segments import selection_segment_tiles


@dataclasses.dataclass(frozen=True)
class Segments:
    """Contiguous segment ids: q[B, S] and k[B, S_kv]; both None where there are none."""

    q: Any = None
    k: Any = None

    @property
    def given(self) -> bool:
        """Whether there are segments."""
        return self.q is not None

    def args(self) -> dict[str, Any]:
        """Returns the kernels' arguments for them."""
        return dict(seg_q_ptr=self.q, seg_k_ptr=self.k)


NONE = Segments()


def plan_segments(b: Any, seg_q: Any, seg_k: Any) -> Segments:
    """Returns the ids made contiguous."""
    return NONE if seg_q is None else Segments(b.contiguous(seg_q), b.contiguous(seg_k))


def plan_segment_tiles(b: Any, segments: Segments, tile: int) -> Any:
    """Launches ``selection_segment_tiles``; returns bounds[B, NT, 4] of tiles of ``tile`` keys."""
    B, S_kv = b.shape(segments.k)
    NT = b.cdiv(S_kv, tile)
    bounds = b.empty((B, NT, 4), b.i64)
    b.launch(
        selection_segment_tiles, (B * NT, 1, 1), dict(seg_k_ptr=segments.k, bounds_ptr=bounds, S_kv=S_kv, NT=NT),
        dict(BN=tile), 1, 1,
    )  # fmt: skip
    return bounds
