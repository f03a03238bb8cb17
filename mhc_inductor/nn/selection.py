# SPDX-License-Identifier: Apache-2.0
"""Selection attention as a module without projections: :class:`SelectionAttention`.

::

    attend = SelectionAttention(groups=4, heads=16, sink=True, block_size=64)
    o = attend(q, k, v, block_indices)          # [B, S, G, h, Dk], [B, G, S_kv, D*], [B, S, G, k] -> [B, S, G, h, Dv]
    o = attend(q, k, v, indices=keys)           # keys [B, S, G, n], or [B, S, 1, n] for all groups
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor.api.selection import blocks_to_ranges, selection_attention
from mhc_inductor.nn.arguments import flags, sizes
from mhc_inductor.ops.checks import integers, strided


class SelectionAttention(nn.Module):
    """Runs :func:`mhc_inductor.selection_attention` with a fixed scale and block size and an optional learned sink.

    Parameter: ``sink[G, h]`` in fp32 with ``sink=True``; otherwise ``sink`` is None.

    Args:
        groups: G, the number of groups of query heads; each group has one head of keys and values.
        heads: h, the number of query heads per group.
        scale: Factor of the scores; None for 1/sqrt(Dk).
        sink: Whether to learn one logit per head that is added to the softmax's denominator only.
        block_size: Keys per block if the selection consists of block indices, which are then clipped causally; None if
            it consists of ranges.
        device: Device of the sink.

    Raises:
        ValueError: groups, heads or block_size is below 1.
        TypeError: One of these is not an int, or sink is not a bool.

    Source: the selected branch of native sparse attention, arXiv 2502.11089, section 3.3.2.
    """

    sink: nn.Parameter | None

    def __init__(
        self,
        groups: int,
        heads: int,
        *,
        scale: float | None = None,
        sink: bool = False,
        block_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        blocks = {} if block_size is None else {"block_size": block_size}
        sizes("SelectionAttention", groups=groups, heads=heads, **blocks)
        flags("SelectionAttention", sink=sink)
        self.groups, self.heads, self.scale, self.block_size = groups, heads, scale, block_size
        self.sink = nn.Parameter(torch.empty((groups, heads), device=device, dtype=torch.float32)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the sinks to 0, like one more key that is orthogonal to the query and has the value 0."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        indices: Tensor | None = None,
        segments_q: Tensor | None = None,
        segments_k: Tensor | None = None,
        v_width: int | None = None,
    ) -> Tensor:
        """Attends from each query to the keys that it selects.

        Args:
            q: Queries ``[B, S, G, h, Dk]``.
            k: Keys ``[B, G, S_kv, Dk]``.
            v: Values ``[B, G, S_kv, Dv]``.
            selection: With a block size, block indices ``[B, S, G, k]`` (-1 for no block; the queries are the last S of
                the S_kv positions); without one, ranges ``[B, S, G, r, 2]``. int32 or int64. None where indices are
                given.
            cu_seqlens_q: Boundaries ``[N+1]`` of packed sequences in S, int32 or int64; blocks and ranges are then
                relative to the query's own sequence. None for no packing.
            cu_seqlens_k: The same boundaries in S_kv; None for cu_seqlens_q.
            indices: Single keys ``[B, S, G, n]``, or ``[B, S, 1, n]`` for all groups, as :class:`SparseIndexer` makes
                them; -1 for none. int32 or int64. They are not clipped causally. None where a selection is given.
            segments_q: Segment ids ``[B, S]`` of the queries, int32 or int64; given together with segments_k. None for
                no segments.
            segments_k: Segment ids ``[B, S_kv]`` of the keys.
            v_width: Dv, where the values are the first v_width columns of v. None for all.

        Returns:
            o ``[B, S, G, h, Dv]`` in q's dtype.

        Raises:
            ValueError: q has other groups or heads, a shape or device does not fit, or selection and indices are both
                given.
            TypeError: Neither selection nor indices are given, or a dtype or type does not fit; see :func:`mhc_inductor.selection_attention`.
        """
        strided("SelectionAttention", "q", q)
        if q.dim() != 5 or q.shape[2] != self.groups or q.shape[3] != self.heads:
            expected = f"[B, S, {self.groups}, {self.heads}, Dk]"
            raise ValueError(
                f"SelectionAttention: q must have shape [B, S, G, h, Dk] = {expected}, got {list(q.shape)}"
            )
        if (selection is None) == (indices is None):
            got = "neither" if indices is None else "both"
            kind = TypeError if indices is None else ValueError
            raise kind(f"SelectionAttention: one of selection and indices must be given, got {got}")
        if isinstance(indices, Tensor) and indices.dim() == 4:
            indices = indices.expand(-1, -1, self.groups if indices.shape[2] == 1 else -1, -1)
        if selection is not None:
            integers("SelectionAttention", "selection", selection)
            meaning = "[B, S, G, r, 2]" if self.block_size is None else "[B, S, G, k]"
            if selection.dim() != (5 if self.block_size is None else 4):
                came = list(selection.shape)
                raise ValueError(f"SelectionAttention: selection must have shape {meaning}, got {came}")
        packed: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        if self.block_size is not None and selection is not None:
            strided("SelectionAttention", "k", k)
            if k.dim() != 4:
                raise ValueError(f"SelectionAttention: k must have shape [B, G, S_kv, Dk], got {list(k.shape)}")
            selection = blocks_to_ranges(selection, self.block_size, k.shape[2], **packed)
        options: dict[str, Any] = {**packed, "segments_q": segments_q, "segments_k": segments_k, "v_width": v_width}
        return selection_attention(q, k, v, selection, indices=indices, scale=self.scale, sink=self.sink, **options)

    def extra_repr(self) -> str:
        """Returns the sizes and options, for ``repr``."""
        return (
            f"groups={self.groups}, heads={self.heads}, scale={self.scale}, sink={self.sink is not None}, "
            f"block_size={self.block_size}"
        )
