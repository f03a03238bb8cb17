"""Selection attention: the public functions.

They take any strides, and work with autograd, ``torch.compile``, ``torch.func`` and vmap. Second derivatives raise
RuntimeError.
"""

from __future__ import annotations

import math
import operator
from typing import Literal, overload

import torch
from torch import Tensor

from mhc_inductor.ops import checks_selection
from mhc_inductor.ops.selection import call


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    *,
    scale: float | None = ...,
    sink: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    *,
    scale: float | None = ...,
    sink: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each query to the union of its ranges of keys, which all heads of a group share.

    The selected branch of native sparse attention (arXiv 2502.11089, section 3.3.2)::

        sel = union of [start, end) in ranges[b, s, g], clipped to [0, S_kv)
        o[b, s, g] = softmax(scale * q[b, s, g] @ k[b, g, sel].T) @ v[b, g, sel]

    Ranges may be empty, unsorted, overlapping, negative or past the end; nothing else masks, so a causal model gives
    causal ranges. Where nothing is selected o is exactly 0, and so are the gradients. NaN and inf in keys and values
    that a query does not select do not reach it. NaN in a query reaches its row of o and dq, and the gradients of the
    keys and values that it selects; a dense softmax under a mask would spread it to those of all keys.

    Args:
        q: ``[B, S, G, h, Dk]``, h query heads in each of G groups; bf16, fp16 or fp32 (fp64 without kernels).
        k: ``[B, G, S_kv, Dk]`` in q's dtype; any strides, such as a view of ``[B, S_kv, G, Dk]``.
        v: ``[B, G, S_kv, Dv]`` likewise.
        ranges: ``[B, S, G, r, 2]`` of ``[start, end)``, int32 or int64; :func:`blocks_to_ranges` makes them of blocks.
        scale: of the scores; None for 1/sqrt(Dk).
        sink: a logit ``[G, h]`` a head that joins the softmax's denominator only, any floating dtype.
        cu_seqlens_q: ``[N+1]`` int32 or int64, from 0 on: where packed sequences begin and end in S; B is then 1. Ranges
            count from the start of the query's own sequence and are clipped to it.
        cu_seqlens_k: likewise in S_kv; None for cu_seqlens_q.
        return_lse: also return lse.

    Returns:
        o ``[B, S, G, h, Dv]`` in q's dtype, or (o, lse) with lse ``[B, S, G, h]`` in fp32, the natural logarithm of the
        sum of exp over the selected keys (without the sink), -inf where there are none. Both are differentiable.

    Raises:
        ValueError: a shape or device that does not fit, or a scale that is not finite; the message names it.
        TypeError: a dtype that does not fit, something that is no tensor, or a return_lse that is no bool.
    """
    if scale is None:
        # index: one number even where sizes are dynamic. Something else than q is for the check to say.
        scale = 1 / math.sqrt(operator.index(q.shape[-1])) if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    if not torch.compiler.is_compiling():  # compiled, the op's fake checks
        checks_selection.selection_attention(q, k, v, ranges, sink, cu_seqlens_q, cu_seqlens_k, scale)
    if not isinstance(return_lse, bool):
        raise TypeError(f"selection_attention: return_lse must be a bool, got {type(return_lse).__name__}")
    o, lse = call("selection_attention", q, k, v, ranges, sink, cu_seqlens_q, cu_seqlens_k, scale)
    return (o, lse) if return_lse else o


def blocks_to_ranges(
    block_indices: Tensor,
    block_size: int,
    S_kv: int,
    *,
    causal: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Turn selected blocks of keys into the ranges of :func:`selection_attention`.

    Block i holds the keys ``[i * block_size, (i + 1) * block_size)``; a block named twice counts once. The queries are the
    last S of the S_kv positions.

    Args:
        block_indices: ``[B, S, G, k]`` int32 or int64; a negative index, such as -1, is no block.
        block_size: keys a block, at least 1.
        S_kv: number of keys, below 2**31.
        causal: clip each range at its query's own position, which it keeps.
        cu_seqlens_q: boundaries ``[N+1]`` of packed sequences, int32 or int64, as for :func:`selection_attention`. Blocks
            count from the start of the query's own sequence, whose queries are the last of its keys.
        cu_seqlens_k: likewise of the keys; None for cu_seqlens_q.

    Returns:
        ranges ``[B, S, G, k, 2]``, int32.

    Raises:
        ValueError: another shape, a block_size below 1 or an S_kv out of its range.
        TypeError: another dtype, or another Python type.
    """
    checks_selection.blocks_to_ranges(block_indices, block_size, S_kv, cu_seqlens_q, cu_seqlens_k)
    if not isinstance(causal, bool):
        raise TypeError(f"blocks_to_ranges: causal must be a bool, got {type(causal).__name__}")
    if block_size > 2**31:  # more keys than there can be: products of it would overflow
        block_size = 2**31
    s = block_indices.shape[1]
    blocks = (S_kv + block_size - 1) // block_size
    # Clipped before the product, which could overflow.
    first = block_indices.to(torch.int64).clamp(-1, blocks)
    start = first.clamp(min=0) * block_size
    end = torch.where(first < 0, start, (start + block_size).clamp(max=S_kv))
    if causal:
        position = torch.arange(s, device=block_indices.device)
        if cu_seqlens_q is None:
            position = position + (S_kv - s)
        else:
            position = position + _offsets(position, cu_seqlens_q, cu_seqlens_k)
        end = torch.minimum(end, (position + 1).view(1, s, 1, 1))
    # Nothing selected is [start, start).
    return torch.stack((start.clamp(max=S_kv), torch.maximum(end, start).clamp(max=S_kv)), -1).to(torch.int32)


def _offsets(query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """From where a query stands in S to its position in its own sequence of keys."""
    ends_q = cu_seqlens_q.to(torch.int64)
    ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.to(torch.int64)
    # The last query of a sequence stands at the last of its keys; one more entry for queries beyond all sequences.
    shift = torch.cat(((ends_k[1:] - ends_k[:-1]) - ends_q[1:], ends_q.new_zeros(1)))
    return shift[torch.searchsorted(ends_q[1:], query, right=True)]
