# SPDX-License-Identifier: Apache-2.0
"""The blocks of keys that queries select in native sparse attention (arXiv 2502.11089, section 3.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype, as_given

CHUNK = 2**24
"""Scores (queries x heads x compressed keys) held at once, unless a single query has more."""


@as_given
def selection_blocks(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, length: int, stride: int, block: int, count: int, s_kv: int
) -> Tensor:
    """Returns the blocks that each query selects, by the probabilities of attention over compressed keys.

    Compressed key i stands for the keys ``[i * stride, i * stride + length)``. A query sees the compressed keys that
    are complete at its position. With the ``lse`` of that attention::

        p[i]     = sum_h exp(scale * q[h] @ k[i] - lse[h])
        score[j] = sum_i p[i] * (number of strides that compressed key i and block j share)

    Block 0, the query's own block and the one before it are always selected. The others are the ``count - 3`` blocks of
    the highest score among those before the query's own block; ties go to the lower index. The queries are the last S
    of the ``s_kv`` positions.

    Args:
        q: Queries ``[B, S, G, h, D]``.
        k: Compressed keys ``[B, G, N, D]``.
        lse: Log-sum-exp ``[B, S, G, h]`` of the attention over the compressed keys.
        scale: Factor of the scores.
        length: Keys per compressed key, a multiple of stride.
        stride: Keys from the start of one compressed key to the start of the next.
        block: Keys per block, a multiple of stride.
        count: Number of blocks to select, at least 3.
        s_kv: Number of keys.

    Returns:
        Block indices ``[B, S, G, count]``, int32, in no particular order; -1 where there are fewer blocks.

    Source: arXiv 2502.11089, equations 8 to 10.
    """
    b, s, g, h, _ = q.shape
    n = -(-s_kv // block)
    blocks = torch.full((b, s, g, count), -1, dtype=torch.int32, device=q.device)
    step = max(1, CHUNK // max(1, b * g * h * k.shape[2]))
    for first in range(0, s, step):
        at = slice(first, min(first + step, s))
        position = torch.arange(s_kv - s + at.start, s_kv - s + at.stop, device=q.device).view(-1, 1)
        # Number of compressed keys that the chunk's last query sees.
        seen = max(0, min(k.shape[2], (s_kv - s + at.stop - length) // stride + 1))
        complete = torch.arange(seen, device=q.device) * stride + length <= position + 1
        query = q[:, at].permute(0, 2, 1, 3, 4).flatten(2, 3)
        t = torch.matmul(query, k[:, :, :seen].mT).unflatten(2, (-1, h)).to(acc_dtype(q.dtype))
        p = torch.exp(scale * t - lse[:, at].transpose(1, 2).unsqueeze(-1))
        p = torch.where(complete[:, None], p, 0.0).sum(3)  # [b, g, s, seen]
        score = _block_scores(p, length // stride, block // stride, n)
        j, own = torch.arange(n, device=q.device), position // block
        score = torch.where((j == 0) | (j == own) | (j == own - 1), torch.inf, score)
        # The bits of non-negative floats sort like the floats. The index below them breaks ties for the lower index.
        key = (score.to(torch.float32).view(torch.int32).to(torch.int64) << 32) + (2**31 - 1 - j)
        best, index = torch.where(j > own, -1, key).topk(min(count, n), -1)
        index = torch.where(best < 0, -1, index)
        blocks[:, at, :, : index.shape[-1]] = index.transpose(1, 2).to(torch.int32)
    return blocks


def _block_scores(p: Tensor, length: int, block: int, n: int) -> Tensor:
    """Returns the scores of ``n`` blocks of ``block`` strides each, ``[..., n]``.

    ``p[..., N]`` are the probabilities of the compressed keys, of ``length`` strides each.
    """
    strides = p.new_zeros((*p.shape[:-1], n * block))
    for k in range(length):
        part = strides[..., k : k + p.shape[-1]]
        part += p[..., : part.shape[-1]]
    return strides.unflatten(-1, (n, block)).sum(-1)
