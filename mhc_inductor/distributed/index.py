# SPDX-License-Identifier: Apache-2.0
"""Index scores and the keys of the largest ones, over a sequence that is split across the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc_inductor.api import index as local
from mhc_inductor.distributed.agreement import Facts, agree, requires
from mhc_inductor.distributed.gather import gather, gather_ids
from mhc_inductor.distributed.groups import Members, eagerly, members
from mhc_inductor.ops import checks

# limit, mask, segments_q, segments_k
_Visible = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@eagerly
def index_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    scale: float = 1.0,
    limit: Tensor | None = None,
    mask: Tensor | None = None,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Computes :func:`mhc_inductor.index_scores` where each rank holds a part of the queries and of the keys.

    The keys of all ranks are gathered; the backward sends each rank's dk to the ranks that hold the keys. With P ranks
    and T keys in all, a rank sends ``(P - 1) * B * T/P * D * itemsize`` bytes forward, as many backward, and receives
    as much. dq and dw are this rank's own. What :func:`~mhc_inductor.distributed.selection_attention` says of ranks,
    errors and torch.compile holds here too.

    Args:
        q: This rank's queries ``[B, S, H, D]``; S may differ between ranks.
        k: This rank's keys ``[B, L, D]``; L may differ between ranks. T is the sum of all L.
        w: This rank's weights ``[B, S, H]``.
        scale: As for the local function, the same on all ranks.
        limit: How many of the first of the T joined keys a query sees, ``[B, S]``.
        mask: Which of the T joined keys a query sees, bool, broadcastable to ``[B, S, T]``.
        segments_q: Segment ids ``[B, S]`` of this rank's queries.
        segments_k: Segment ids ``[B, L]`` of this rank's keys.
        group: A process group, a device mesh of one dimension, or None for the default group.

    Returns:
        Scores ``[B, S, T]`` of this rank's queries for all keys, in fp32 (fp64 if q is fp64).

    Raises:
        ValueError: A shape, device or value does not fit on some rank, or differs between ranks where it must not.
            Every rank raises the same message.
        TypeError: The same for types and dtypes.
        RuntimeError: There is no process group, or a rank does not answer.

    Source: as the local function.
    """
    keys, ids = _joined("index_scores", (q, k, w), scale, (limit, mask, segments_q, segments_k), None, group)
    return local.index_scores(q, keys, w, scale=scale, limit=limit, mask=mask, segments_q=segments_q, segments_k=ids)


@eagerly
def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    *,
    scale: float = 1.0,
    limit: Tensor | None = None,
    mask: Tensor | None = None,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Returns, for each of this rank's queries, the keys of the ``topk`` largest :func:`index_scores` of all ranks.

    The keys of all ranks are gathered as :func:`index_scores` gathers them; there is no gradient and no backward. The
    indices are those that :func:`~mhc_inductor.distributed.selection_attention` takes.

    Args:
        q: As for :func:`index_scores`.
        k: As for :func:`index_scores`.
        w: As for :func:`index_scores`.
        topk: Number of keys, 0 to T; the same on all ranks.
        scale: As for :func:`index_scores`.
        limit: As for :func:`index_scores`.
        mask: As for :func:`index_scores`.
        segments_q: As for :func:`index_scores`.
        segments_k: As for :func:`index_scores`.
        group: As for :func:`index_scores`.

    Returns:
        Positions in the joined keys ``[B, S, topk]``, int32, increasing; then -1 where fewer keys are visible.

    Raises:
        ValueError: As :func:`index_scores`, or topk is negative or above T.
        TypeError: As :func:`index_scores`.
        RuntimeError: As :func:`index_scores`.

    Source: as the local function.
    """
    with torch.no_grad():
        keys, ids = _joined("index_topk", (q, k, w), scale, (limit, mask, segments_q, segments_k), topk, group)
        return local.index_topk(
            q, keys, w, topk, scale=scale, limit=limit, mask=mask, segments_q=segments_q, segments_k=ids
        )


def _joined(
    op: str, tensors: tuple[Tensor, ...], scale: float, visible: _Visible, topk: int | None, group: Any
) -> tuple[Tensor, Tensor | None]:
    """Checks the arguments on all ranks, and returns the keys of all and their segment ids; topk is None for scores."""
    ranks = members(op, group)
    agreed = agree(op, ranks, lambda: _facts(op, tensors, scale, visible, topk, ranks))
    total = sum(sizes[0] for sizes in agreed.sizes)
    # These two need the number of all keys, so that no rank can check its own before.
    for i, sizes in enumerate(agreed.sizes):
        if sizes[1] not in (1, total):
            raise ValueError(
                f"{op}: on rank {i} of the group: mask must broadcast to [B, S, T] with T = {total}, "
                f"the keys of all ranks, got a last size of {sizes[1]}"
            )
    if topk is not None and topk > total:
        raise ValueError(f"{op}: topk must be at most T = {total}, the number of keys of all ranks, got {topk}")
    k = tensors[1]
    (keys,) = gather((k,), 1, agreed.needs[1:2], agreed.anchor(k.device, 1), agreed, ranks)
    assert keys is not None
    return keys, gather_ids(visible[3], agreed, ranks)


def _facts(
    op: str, tensors: tuple[Tensor, ...], scale: float, visible: _Visible, topk: int | None, ranks: Members
) -> Facts:
    """Checks this rank's arguments, as far as they do not depend on the other ranks' keys."""
    q, k, w = tensors
    limit, mask, *ids = visible
    sized = isinstance(mask, Tensor) and mask.dim() > 0
    narrow = local.three_dims(mask[..., :1] if sized and mask is not None else mask)
    checks.check("index_scores", q, k, w, scale, limit, narrow, *ids, op=op)
    if topk is not None:
        # min: the local keys are not all; what is no int is left to the check.
        few = min(topk, k.shape[1]) if isinstance(topk, int) and not isinstance(topk, bool) else topk
        checks.check("index_topk", q, k, w, few, scale, limit, narrow, *ids)
    ranks.check_device(op, "q", q)
    same = {
        "q's dtype": q.dtype,
        "q's B, H, D": [q.shape[0], *q.shape[2:]],
        "scale": scale,
        "topk": topk,
        "whether there are segments": ids[0] is not None,
    }
    width = mask.shape[-1] if sized and mask is not None else 1
    return Facts(same, (k.shape[1], width), requires(q, k, w))
