"""Selection attention as a module: :class:`SelectionAttention`, without projections.

::

    attend = SelectionAttention(groups=4, heads=16, sink=True, block_size=64)
    o = attend(q, k, v, block_indices)          # [B, S, G, h, Dk], [B, G, S_kv, D*], [B, S, G, k] -> [B, S, G, h, Dv]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor.api.selection import blocks_to_ranges, selection_attention


class SelectionAttention(nn.Module):
    """:func:`mhc_inductor.selection_attention` with its scale, its sink and its block size.

    Parameter: ``sink[G, h]`` fp32 with ``sink=True``, else None.

    Args:
        groups: G, groups of query heads, each with one head of keys and values.
        heads: h, query heads a group.
        scale: of the scores; None for 1/sqrt(Dk).
        sink: learn a logit a head that joins the softmax's denominator only.
        block_size: the selection is blocks of so many keys, clipped causally; None: it is ranges.
        device: of the sink, fp32.

    Raises:
        ValueError: groups, heads or block_size below 1.
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
        for name, size in (("groups", groups), ("heads", heads), ("block_size", block_size)):
            if size is not None and size < 1:
                raise ValueError(f"SelectionAttention: {name} must be at least 1, got {size}")
        self.groups, self.heads, self.scale, self.block_size = groups, heads, scale, block_size
        self.sink = nn.Parameter(torch.empty((groups, heads), device=device, dtype=torch.float32)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise: sinks of 0, as one more key that is orthogonal to the query."""
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``q[B, S, G, h, Dk]`` to the selected of ``k[B, G, S_kv, Dk]`` and ``v[B, G, S_kv, Dv]``.

        ``selection``: with a block size block_indices ``[B, S, G, k]`` (-1 for none; the queries are the last S of the
        S_kv positions), without ranges ``[B, S, G, r, 2]``. ``cu_seqlens_q`` and ``cu_seqlens_k`` pack sequences, to which
        blocks and ranges are relative then. Returns o ``[B, S, G, h, Dv]``; raises as :func:`mhc_inductor.selection_attention`, and
        ValueError for q of other groups or heads.
        """
        if q.dim() != 5 or q.shape[2] != self.groups or q.shape[3] != self.heads:
            expected = f"[B, S, {self.groups}, {self.heads}, Dk]"
            raise ValueError(
                f"SelectionAttention: q must have shape [B, S, G, h, Dk] = {expected}, got {list(q.shape)}"
            )
        if self.block_size is not None:
            selection = blocks_to_ranges(
                selection, self.block_size, k.shape[2], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
            )
        return selection_attention(
            q,
            k,
            v,
            selection,
            scale=self.scale,
            sink=self.sink,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return (
            f"groups={self.groups}, heads={self.heads}, scale={self.scale}, sink={self.sink is not None}, "
            f"block_size={self.block_size}"
        )
