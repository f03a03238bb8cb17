# SPDX-License-Identifier: Apache-2.0
"""Index scores of keys, the keys of the largest scores, and the loss that trains an index: the public functions.

They accept tensors of any strides and work with ``torch.compile``, ``torch.func`` and vmap. All but ``index_topk`` work
with autograd; second derivatives raise RuntimeError, forward-mode derivatives NotImplementedError.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mhc_inductor.ops.checks import check, number, strided
from mhc_inductor.ops.index import call
from mhc_inductor.ops.registry import refuse_trace

chooser: Callable[..., Tensor] | None = None
"""What an eager :func:`index_topk` calls with its op while keys are recorded or replayed; set by :mod:`mhc_inductor.replay`."""


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
) -> Tensor:
    """Computes the scores by which an indexer chooses keys.

    ::

        scores[b, s, t] = sum_h w[b, s, h] * relu(scale * <q[b, s, h], k[b, t]>)   where t is visible to s, else -inf

    Key t is visible to query s where all of these hold: ``t < limit[b, s]``; ``mask[b, s, t]``; ``segments_k[b, t]``
    equals ``segments_q[b, s]`` or is -2**31, which every query sees. What is None hides nothing. Products of bf16 and
    fp16 inputs are exact and summed in fp32.

    The result has B * S * T numbers: :func:`index_topk` does not. Gradients reach q, k and w; the gradient of a score
    at an invisible key counts as zero. CUDA kernels run for bf16, fp16 and fp32, D up to 256 and H up to 128; everything
    else runs the formula in plain PyTorch.

    Args:
        q: Queries ``[B, S, H, D]``; bf16, fp16, fp32 or fp64.
        k: Keys ``[B, T, D]`` in q's dtype.
        w: Weights ``[B, S, H]`` of the heads; any floating dtype (fp64 only if q is fp64).
        scale: Factor inside the relu, finite and at least 0. A negative factor outside the relu belongs into w.
        limit: How many of the first keys a query sees, ``[B, S]``, int32 or int64; below 0 is 0, above T is T. A causal
            model passes ``s + 1 + T - S``. None for T.
        mask: Which keys a query sees, bool, broadcastable to ``[B, S, T]``; never expanded in memory. None for all.
        segments_q: Segment ids ``[B, S]`` of the queries, int32 or int64; given together with segments_k.
        segments_k: Segment ids ``[B, T]`` of the keys.

    Returns:
        Scores ``[B, S, T]`` in fp32, in fp64 if q is fp64.

    Raises:
        ValueError: A shape or device does not fit, or scale is negative or not finite. The message names the argument.
        TypeError: A dtype does not fit, or an argument is not a tensor or not a number where it must be.

    Source: the lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, equation 1).
    """
    refuse_trace("index_scores")
    mask = three_dims(mask)
    if not torch.compiler.is_compiling():  # under torch.compile the op's fake checks
        check("index_scores", q, k, w, scale, limit, mask, segments_q, segments_k)
    return call("index_scores", q, k, w, scale, limit, mask, segments_q, segments_k)


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
) -> Tensor:
    """Returns, for each query, the visible keys of the ``topk`` largest :func:`index_scores`.

    Exactly ``min(topk, visible keys)`` keys are chosen. Equal scores go to the lower index; NaN counts as the largest
    score, as in ``torch.topk``; a visible key with a score of -inf comes before any invisible one.

    Scores are held for a part of the queries at a time: up to 256 MiB, or those of 128 queries if these are more. Nothing
    is read on the host. The indices have no gradient. CUDA kernels run for topk up to 4096 and what
    :func:`index_scores` says; everything else runs the formula in plain PyTorch, in chunks of queries.

    Args:
        q: Queries ``[B, S, H, D]``; bf16, fp16, fp32 or fp64.
        k: Keys ``[B, T, D]`` in q's dtype.
        w: Weights ``[B, S, H]`` of the heads; any floating dtype (fp64 only if q is fp64).
        topk: Number of keys, 0 to T; a model whose T may be smaller passes ``min(topk, T)``.
        scale: As for :func:`index_scores`.
        limit: As for :func:`index_scores`.
        mask: As for :func:`index_scores`.
        segments_q: As for :func:`index_scores`.
        segments_k: As for :func:`index_scores`.

    Returns:
        Key indices ``[B, S, topk]``, int32, increasing; then -1 where fewer than topk keys are visible.

    Raises:
        ValueError: A shape or device does not fit, topk is negative or above T, or scale is negative or not finite. The
            message names the argument.
        TypeError: A dtype does not fit, or an argument is not a tensor or not a number where it must be.

    Source: DeepSeek-V3.2, arXiv 2512.02556, the token selection after equation 1.
    """
    refuse_trace("index_topk")
    mask = three_dims(mask)
    if not torch.compiler.is_compiling():  # under torch.compile the op's fake checks
        check("index_topk", q, k, w, topk, scale, limit, mask, segments_q, segments_k)
        if chooser is not None:
            op = functools.partial(call, "index_topk")
            return chooser(op, q, k, w, topk, scale, limit, mask, segments_q, segments_k)
    return call("index_topk", q, k, w, topk, scale, limit, mask, segments_q, segments_k)


def index_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    *,
    lse: Tensor | None = None,
    scale: float | None = None,
    attention_scale: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Computes how far the index scores are from the attention's own distribution over the listed keys.

    For each query::

        p = the attention's probabilities of the listed keys, summed over all heads, divided by their sum
        r = softmax of the index scores over the listed keys
        loss = KL(p || r) = sum of p * (log p - log r)

    With all visible keys listed this is the loss of a dense warm-up. Gradients reach q, k and w. None reach the
    attention, which is the target. To keep the index's loss from the rest of the model, pass q, k and w that are made of
    a detached input.

    Memory is B * S * n numbers, for n listed keys, and a bounded chunk of the rows of k's gradient; never S * T. CUDA
    kernels run for bf16, fp16 and fp32, n up to 4096, D up to 256, Dk up to 576, H and h up to 128; everything else runs
    the formula in plain PyTorch, in chunks of queries. Bits are equal in two runs.

    Args:
        q: Queries of the index ``[B, S, H, D]``; bf16, fp16, fp32 or fp64.
        k: Keys of the index ``[B, T, D]`` in q's dtype.
        w: Weights ``[B, S, H]`` of the heads; any floating dtype (fp64 only if q is fp64).
        indices: The listed keys ``[B, S, n]``, int32 or int64, as :func:`index_topk` returns them. In any order; a
            repeated position counts once, one out of range, such as -1, not at all.
        attention_q: Queries of the attention ``[B, S, G, h, Dk]``; any floating dtype.
        attention_k: Keys of the attention ``[B, G, T, Dk]`` in the dtype of its queries.
        lse: Natural logarithm ``[B, S, G, h]`` of the sum of the attention's exponentials, where that sum has more
            terms than the listed keys: ``selection_attention(..., return_lse=True)`` with other keys, or
            ``torch.logaddexp(lse, sink)``. None for the sum over the listed keys.
        scale: Factor of the products inside the relu, finite; None for 1/sqrt(D).
        attention_scale: Factor of the attention's scores; None for 1/sqrt(Dk).
        reduction: "mean" over the queries that list a key (0 if there are none), "sum", or "none".

    Returns:
        The loss, a scalar or ``[B, S]``, in fp32, in fp64 if q is fp64. It is 0 for a query that lists no key.

    Raises:
        ValueError: A shape or device does not fit, a scale is not finite, or reduction is none of the three.
        TypeError: A dtype or type does not fit.
        RuntimeError: In a second derivative.

    Source: DeepSeek-V3.2, arXiv 2512.02556, the losses of dense warm-up and of sparse training.
    """
    refuse_trace("index_loss")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"index_loss: reduction must be mean, sum or none, got {reduction!r}")
    tensors = {"q": q, "k": k, "w": w, "indices": indices, "attention_q": attention_q, "attention_k": attention_k}
    for name, t in (tensors if lse is None else {**tensors, "lse": lse}).items():
        strided("index_loss", name, t)
    scales = _factor("scale", scale, q), _factor("attention_scale", attention_scale, attention_q)
    attention = (attention_q.detach(), attention_k.detach(), None if lse is None else lse.detach())
    loss, _ = call("index_loss", q, k, w, indices, *attention, *scales)
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / ((indices >= 0) & (indices < k.shape[1])).any(-1).sum().clamp(min=1)


def _factor(name: str, factor: float | None, t: Tensor) -> float:
    """Returns the factor of products of rows of ``t``, by default 1 over the root of their width."""
    if factor is not None:
        number("index_loss", name, factor, read=False)
        return factor
    # operator.index: a plain number even for dynamic sizes. The op refuses a width of 0 and tensors without a width.
    return 1 / math.sqrt(operator.index(t.shape[-1]) or 1) if t.dim() else 1.0


def three_dims(mask: Any) -> Any:
    """Returns the mask with leading dimensions of 1 up to three; anything but a tensor is left to the checks."""
    while isinstance(mask, Tensor) and mask.dim() < 3:
        mask = mask.unsqueeze(0)
    return mask
