# SPDX-License-Identifier: Apache-2.0
"""The choice of keys for sparse attention, and the loss that trains it: :class:`SparseIndexer`.

::

    index = SparseIndexer(2048)
    picks = index(q_i, k_i, w_i)                                 # [B, S, H, D], [B, T, D], [B, S, H] -> [B, S, 1, topk]
    o = SelectionAttention(groups=1, heads=64)(q, k, v, indices=picks)
    loss = index.loss(q_i, k_i, w_i, picks, q, k)                # no gradient to q and k
    loss = index.loss(q_i, k_i, w_i, None, q, k)                 # over all visible keys: before sparse training
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhc_inductor.api.index import index_loss, index_topk
from mhc_inductor.nn.arguments import flags, sizes
from mhc_inductor.ops.checks import integers, number


class SparseIndexer(nn.Module):
    """Chooses the keys of the largest index scores with :func:`mhc_inductor.index_topk`. It has no parameters.

    The projections that make q, k and w are the model's. The choice has no gradient: :meth:`loss` trains them.

    Args:
        topk: Number of keys per query, at least 1; all T where T is smaller.
        scale: Factor of the products inside the relu, at least 0; None for 1/sqrt(D).
        causal: Whether, without a ``limit``, a query sees the keys up to its own position only; the queries are the
            last S of the T positions.

    Raises:
        ValueError: topk is below 1, or scale is negative or not finite.
        TypeError: topk is not an int, scale is not a number, or causal is not a bool.

    Source: the lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, equation 1).
    """

    def __init__(self, topk: int, *, scale: float | None = None, causal: bool = True) -> None:
        super().__init__()
        sizes("SparseIndexer", topk=topk)
        flags("SparseIndexer", causal=causal)
        if scale is not None:
            number("SparseIndexer", "scale", scale, 0.0)
        self.topk, self.scale, self.causal = topk, scale, causal

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        limit: Tensor | None = None,
        mask: Tensor | None = None,
        segments_q: Tensor | None = None,
        segments_k: Tensor | None = None,
    ) -> Tensor:
        """Chooses keys for each query.

        Args:
            q: Queries ``[B, S, H, D]``; bf16, fp16, fp32 or fp64.
            k: Keys ``[B, T, D]`` in q's dtype.
            w: Weights ``[B, S, H]`` of the heads, any floating dtype.
            limit: How many of the first keys a query sees, ``[B, S]``, int32 or int64. None for ``s + 1 + T - S``, or
                for T with ``causal=False``.
            mask: Which keys a query sees, bool, broadcastable to ``[B, S, T]``, or None for all.
            segments_q: Segment ids ``[B, S]`` of the queries, int32 or int64; given together with segments_k.
            segments_k: Segment ids ``[B, T]`` of the keys.

        Returns:
            Indices ``[B, S, 1, min(topk, T)]``, int32, increasing, then -1 where fewer keys are visible. They are the
            ``indices`` of :class:`SelectionAttention`, and of :func:`mhc_inductor.selection_attention` expanded to its
            groups.

        Raises:
            ValueError: A shape or device does not fit; see :func:`mhc_inductor.index_topk`.
            TypeError: A dtype or type does not fit.
        """
        _check_dims("SparseIndexer", q, k)
        # operator.index: a plain number even for dynamic sizes. A size of 0 is reported by the op.
        scale = 1 / math.sqrt(operator.index(q.shape[-1]) or 1) if self.scale is None else self.scale
        limit = _limit(self.causal, q, k) if limit is None else limit  # no method: integrations/hub/ has this forward
        visible = {"limit": limit, "mask": mask, "segments_q": segments_q, "segments_k": segments_k}
        picks = index_topk(q, k, w, min(self.topk, k.shape[1]), scale=scale, **visible)
        return picks.unsqueeze(2)

    def loss(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        indices: Tensor | None,
        attention_q: Tensor,
        attention_k: Tensor,
        *,
        limit: Tensor | None = None,
        lse: Tensor | None = None,
        attention_scale: float | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> Tensor:
        """Computes how far the index scores are from the attention's own distribution over the listed keys.

        It is :func:`mhc_inductor.index_loss` with this module's scale. Gradients reach q, k and w, none the attention.

        Without ``indices`` all keys that a query sees are listed: the loss of the dense warm-up, in which the index
        learns alone. It holds a few times B * S * T numbers. The kernels take at most 4096 keys a query. With more the
        formula runs in plain PyTorch, in chunks of queries, and logs one line. torch.compile on a GPU makes new code for
        each T. Segments and other masks are given as indices: the positions of the keys that a query sees, -1 in place
        of the others.

        Args:
            q: Queries of the index, as for :meth:`forward`.
            k: Keys of the index.
            w: Weights of the heads.
            indices: The listed keys ``[B, S, 1, n]``, as :meth:`forward` returns them, or None for all visible keys.
            attention_q: Queries of the attention ``[B, S, G, h, Dk]``.
            attention_k: Keys of the attention ``[B, G, T, Dk]``.
            limit: Without indices, how many of the first keys a query sees, ``[B, S]``, as for :meth:`forward`.
            lse: As for :func:`mhc_inductor.index_loss`.
            attention_scale: Factor of the attention's scores; None for 1/sqrt(Dk).
            reduction: "mean" over the queries that list a key (0 if there are none), "sum", or "none".

        Returns:
            The loss, a scalar or ``[B, S]``, in fp32, in fp64 if q is fp64. It is 0 for a query that lists no key.

        Raises:
            ValueError: A shape or device does not fit, a scale is not finite, or limit and indices are both given.
            TypeError: A dtype or type does not fit.
            RuntimeError: In a second derivative.
        """
        if indices is None:
            indices = self._visible(q, k, limit)
        elif limit is not None:
            raise ValueError("SparseIndexer.loss: limit must be None where indices are given; they say what is listed")
        if not isinstance(indices, Tensor) or indices.dim() != 4 or indices.shape[2] != 1:
            got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
            raise ValueError(f"SparseIndexer.loss: indices must have shape [B, S, 1, n] or be None, got {got}")
        options: dict[str, Any] = {"attention_scale": attention_scale, "reduction": reduction}
        listed = indices.squeeze(2)
        return index_loss(q, k, w, listed, attention_q, attention_k, lse=lse, scale=self.scale, **options)

    def _visible(self, q: Tensor, k: Tensor, limit: Tensor | None) -> Tensor:
        """Returns the positions of all keys ``[B, S, 1, T]``, int32, with -1 for those that a query does not see."""
        _check_dims("SparseIndexer.loss", q, k)
        if limit is not None:
            integers("SparseIndexer.loss", "limit", limit, q)
            if limit.shape != q.shape[:2]:
                expected = f"[B, S] = {list(q.shape[:2])}"
                raise ValueError(f"SparseIndexer.loss: limit must have shape {expected}, got {list(limit.shape)}")
        limit = _limit(self.causal, q, k) if limit is None else limit
        at = torch.arange(k.shape[1], dtype=torch.int32, device=q.device).expand(*q.shape[:2], -1)
        return (at if limit is None else torch.where(at < limit.unsqueeze(-1), at, -1)).unsqueeze(2)

    def extra_repr(self) -> str:
        """Returns the options, for ``repr``."""
        return f"topk={self.topk}, scale={self.scale}, causal={self.causal}"


def _limit(causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns how many of the first keys a query sees unless told, ``[B, S]``, or None for all."""
    batch, s = q.shape[:2]
    return (torch.arange(1, s + 1, device=q.device) + (k.shape[1] - s)).expand(batch, s) if causal else None


def _check_dims(op: str, q: Tensor, k: Tensor) -> None:
    for name, t, dims, meaning in (("q", q, 4, "[B, S, H, D]"), ("k", k, 3, "[B, T, D]")):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() != dims:
            raise ValueError(f"{op}: {name} must have shape {meaning}, got {list(t.shape)}")
