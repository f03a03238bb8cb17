# SPDX-License-Identifier: Apache-2.0
"""Selection attention: the public functions.

They accept tensors of any strides and work with autograd, ``torch.compile``, ``torch.func`` and vmap. Second
derivatives raise RuntimeError, forward-mode derivatives NotImplementedError.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import checks
from mhc_inductor.ops.checks import strided
from mhc_inductor.ops.registry import refuse_trace
from mhc_inductor.ops.selection import call, given

# sink, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k
_Rest = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Options(TypedDict, total=False):
        """Keyword arguments that the function for one process and the one for a group of ranks have in common."""

        indices: Tensor | None
        scale: float | None
        sink: Tensor | None
        segments_q: Tensor | None
        segments_k: Tensor | None
        v_width: int | None

    class Packed(Options, total=False):
        """Those of one process, which may have packed sequences and a mask too."""

        mask: Tensor | None
        cu_seqlens_q: Tensor | None
        cu_seqlens_k: Tensor | None
        bias: Tensor | None
        repeats: bool


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Packed],
) -> Tensor: ...


@overload
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[Packed],
) -> tuple[Tensor, Tensor]: ...


def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
    v_width: int | None = None,
    return_lse: bool = False,
    bias: Tensor | None = None,
    repeats: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax attention of each query over the keys that it selects: by ranges, a list of positions or a mask.

    All heads of a group share the selection::

        sel = union of [start, end) in ranges[b, s, g], or the distinct positions in indices[b, s, g],
              or the keys that mask[b, s, g] shows; within [0, S_kv)
        o[b, s, g] = softmax(scale * q[b, s, g] @ k[b, g, sel].T) @ v[b, g, sel]

    Ranges may be empty, unsorted, overlapping, negative or past the end; positions may be unsorted, repeated or, as -1,
    out of range. A causal model selects causally. With segment ids, a key counts for a query only where their ids are
    equal or the key's id is :data:`mhc_inductor.ANY_SEGMENT` (documents, padding). A bias is added to the scaled score of
    its entry of the list, in fp32 (fp64 if q is fp64). A query that selects nothing gives o
    and gradients of exactly 0. NaN and inf in keys and values reach only the queries that
    select them. NaN in a query reaches its own rows of o and dq and the gradients of the keys and
    values that it selects, on CUDA also those of other keys in a tile of up to 64 keys that it selects in part; a dense
    softmax under a mask would spread it to the gradients of all keys.

    A mask of bools shows the keys that are True. One of floats is added to the scaled scores, in fp32, and hides the
    keys that are -inf; finite fills such as finfo.min hide as they do in a written-out softmax, so that a row of nothing
    else is the mean of all values. Alone, a mask stands for any pattern; with indices, a mask of bools says which of
    the listed keys count.

    The values of ranges, indices, masks, boundaries and segment ids are never read on the host. CUDA kernels run for bf16,
    fp16 and fp32, Dk up to 576, Dv up to 512 (lists: 576), h up to 128 and 4096 ranges or positions; everything else
    runs the formula in plain PyTorch. With ``v=k`` and ``indices``, each selected row is read once for both.

    Args:
        q: Queries ``[B, S, G, h, Dk]``, h heads in each of G groups; bf16, fp16, fp32 or fp64.
        k: Keys ``[B, G, S_kv, Dk]`` in q's dtype; any strides, for example a view of ``[B, S_kv, G, Dk]``.
        v: Values ``[B, G, S_kv, Dv]`` in q's dtype; any strides. May be k itself.
        ranges: ``[start, end)`` pairs of key positions, ``[B, S, G, r, 2]``, int32 or int64. :func:`blocks_to_ranges`
            makes them from blocks. None where indices are given.
        indices: Key positions ``[B, S, G, n]``, int32 or int64, in any order; -1 for none. None where ranges are given.
            :func:`index_topk` makes them.
        mask: ``[B or 1, S, G or 1, S_kv]``, bool or floating (fp64 only if q is fp64); any strides, also those of an
            expanded view. It gets no gradient. Alone, or of bools with indices.
        scale: Factor of the scores; finite. None for 1/sqrt(Dk).
        sink: One logit per head, ``[G, h]``, added to the softmax's denominator only; any floating dtype (fp64 only if
            q is fp64). None for no sink.
        cu_seqlens_q: Boundaries ``[N+1]`` of packed sequences in S, starting with 0, int32 or int64; B must then be 1.
            Ranges count from the start of the query's own sequence and are clipped to it. None for no packing.
        cu_seqlens_k: The same boundaries in S_kv; None for cu_seqlens_q.
        segments_q: Segment ids ``[B, S]`` of the queries, int32 or int64; segments_k must be given too. None for no
            segments. May be combined with cu_seqlens_q.
        segments_k: Segment ids ``[B, S_kv]`` of the keys, int32 or int64. A key with the id ``ANY_SEGMENT`` (-2**31)
            counts for the queries of every segment.
        v_width: Dv, where the values are the first v_width columns of v (multi-head latent attention: v=k, Dk 576,
            v_width 512). None for all.
        return_lse: Whether to return lse as well.
        bias: Biases ``[B, S, G, n]`` of the indices; any floating dtype (fp64 only if q is fp64). An entry with a bias of
            -inf selects nothing; NaN and inf give NaN. It has no gradient. Not with cu_seqlens or segments. None for none.
        repeats: With a bias, whether entries that repeat a key count each, with its own bias; else the first counts whose
            bias is not -inf.

    Returns:
        o ``[B, S, G, h, Dv]`` in q's dtype, or ``(o, lse)`` with return_lse. lse ``[B, S, G, h]`` in fp32 (fp64 if q is
        fp64) is the natural logarithm of the sum of exp(score) over the selected keys, without the sink, and -inf where
        nothing is selected. Both are differentiable.

    Raises:
        ValueError: A shape or device does not fit, scale is not finite, ranges and indices are both given, a mask with
            what it cannot be combined with, or one that requires a gradient, bias without indices or with cu_seqlens,
            segments or a mask, or repeats without bias. The message names the argument.
        TypeError: None of ranges, indices and mask is given, a dtype does not fit, an argument is not a tensor or not a
            number where it must be, or return_lse or repeats is not a bool.
        RuntimeError: bias requires a gradient.

    Source: the selected branch of native sparse attention, arXiv 2502.11089, section 3.3.2; DeepSeek sparse attention,
    arXiv 2512.02556, over lists.
    """
    refuse_trace("selection_attention")
    scale, values = prepared(q, v, ranges, indices, scale, v_width, return_lse, mask)
    rest = (sink, cu_seqlens_q, cu_seqlens_k, segments_q, segments_k)
    if mask is not None:
        _combined(mask, ranges, indices, *rest[1:])
    _check_bias(bias, repeats, indices, (mask, *rest[1:]))
    name, args = op_of(q, k, values, ranges, indices, rest, scale, mask, bias, repeats)
    if not torch.compiler.is_compiling():  # under torch.compile the op's fake checks
        checks.check(name, *args)
        if indices is not None and mask is not None:
            checks.mask_of_lists("selection_attention", q, k, mask)
    if ranges is None:
        listed = args[3] if indices is None or mask is None else _shown(mask, q, indices)
        args = (q, k, None if v is k or _reads_keys(k, values) else values, listed, *args[4:])
    o, lse = call(name, *args)
    return (o, lse) if return_lse else o


def prepared(
    q: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    indices: Tensor | None,
    scale: float | None,
    v_width: int | None,
    return_lse: bool,
    mask: Tensor | None = None,
) -> tuple[float, Tensor]:
    """Returns the scale, 1/sqrt(Dk) for None, and the v_width columns of v that are the values.

    Raises:
        TypeError: None of ranges, indices and mask is given, or v_width or return_lse has another type.
        ValueError: Ranges and indices are both given, or v_width is out of range.
    """
    if ranges is None and indices is None and mask is None:
        raise TypeError("selection_attention: ranges must be a tensor, got NoneType, and no indices in their place")
    if ranges is not None and indices is not None:
        raise ValueError("selection_attention: one of ranges and indices must be given, got both")
    if not isinstance(return_lse, bool):
        raise TypeError(f"selection_attention: return_lse must be a bool, got {type(return_lse).__name__}")
    if scale is None:
        # operator.index: a plain number even for dynamic sizes. If q is not a tensor, the checks report it.
        scale = 1 / math.sqrt(operator.index(q.shape[-1])) if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    return scale, _columns(v, v_width)


def _combined(mask: Tensor, ranges: Tensor | None, indices: Tensor | None, *packed: Tensor | None) -> None:
    """Raises ValueError if the mask is given with what it cannot be combined with."""
    names = ("ranges", "cu_seqlens_q", "cu_seqlens_k", "segments_q", "segments_k")
    given = [n for n, t in zip(names, (ranges, *packed), strict=True) if t is not None]
    wrong = given if indices is None else [n for n in given if not n.startswith("segments")]
    if wrong:
        raise ValueError(
            f"selection_attention: mask must be given alone, or with indices and segments, got {wrong[0]} too; "
            "clear the mask outside of them"
        )
    if indices is not None and isinstance(mask, Tensor) and mask.dtype is not torch.bool:
        raise ValueError(f"selection_attention: with indices, mask must be bool, got {mask.dtype}")


def _shown(mask: Tensor, q: Tensor, indices: Tensor) -> Tensor:
    """Returns the indices with -1 in place of keys that the mask hides."""
    s_kv = mask.shape[3]
    if not s_kv:
        return indices
    shown = mask.expand(*q.shape[:3], s_kv).gather(3, indices.clamp(0, s_kv - 1).to(torch.int64))
    return torch.where(shown, indices, -1)


def op_of(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    ranges: Tensor | None,
    indices: Tensor | None,
    rest: _Rest,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    repeats: bool = False,
) -> tuple[str, tuple[Any, ...]]:
    """Returns the op that computes a call, and its arguments; one of ranges, indices and mask is given."""
    width = values.shape[-1] if isinstance(values, Tensor) and values.dim() else 0
    if indices is not None and bias is not None:
        return "selection_entry_attention", (q, k, values, indices, bias, rest[0], scale, width, repeats)
    if indices is not None:
        return "selection_list_attention", (q, k, values, indices, *rest, scale, width)
    if mask is not None:
        return "selection_mask_attention", (q, k, values, mask, rest[0], scale, width)
    return "selection_attention", (q, k, values, ranges, *rest[:3], scale, *given(*rest[3:]))


def _check_bias(bias: Tensor | None, repeats: bool, indices: Tensor | None, rest: _Rest) -> None:
    """Raises ValueError or TypeError unless bias and repeats fit to the other ways of selecting keys."""
    if not isinstance(repeats, bool):
        raise TypeError(f"selection_attention: repeats must be a bool, got {type(repeats).__name__}")
    if bias is None:
        if repeats:
            raise ValueError("selection_attention: repeats must be False without bias: repeated positions count once")
        return
    if indices is None:
        raise ValueError("selection_attention: bias must be None with ranges; it belongs to the entries of indices")
    for name, t in zip(("mask", "cu_seqlens_q", "cu_seqlens_k", "segments_q", "segments_k"), rest, strict=True):
        if t is not None:
            raise ValueError(f"selection_attention: {name} must be None with bias; give keys of others a bias of -inf")


def _columns(v: Tensor, v_width: int | None) -> Tensor:
    """Returns the first ``v_width`` columns of v, or v for None."""
    if v_width is None or not isinstance(v, Tensor) or not v.dim():
        return v
    strided("selection_attention", "v", v)
    if isinstance(v_width, bool) or not isinstance(v_width, (int, torch.SymInt)):
        raise TypeError(f"selection_attention: v_width must be an int, got {type(v_width).__name__}")
    if not 1 <= v_width <= v.shape[-1]:
        raise ValueError(f"selection_attention: v_width must be from 1 to v's last size {v.shape[-1]}, got {v_width}")
    return v[..., :v_width]


def _reads_keys(k: Tensor, v: Tensor) -> bool:
    """Returns whether v is a view of k's first columns from which autograd needs nothing of its own."""
    if torch.compiler.is_compiling() or compat.functorch_active() or not (type(k) is type(v) is Tensor):
        return False
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        return False
    return k.data_ptr() == v.data_ptr() != 0 and k.stride() == v.stride() and k.shape[:-1] == v.shape[:-1]


def blocks_to_ranges(
    block_indices: Tensor,
    block_size: int,
    S_kv: int,
    *,
    causal: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Converts selected blocks of keys to the ranges of :func:`selection_attention`.

    Block i holds the keys ``[i * block_size, (i + 1) * block_size)``. :func:`selection_attention` attends to the union
    of the ranges, so a block that is named twice counts once. The queries are the last S of the S_kv positions.

    Args:
        block_indices: Selected blocks ``[B, S, G, k]``, int32 or int64. A negative index, such as -1, means no block.
        block_size: Keys per block, at least 1.
        S_kv: Number of keys, at least 0 and below 2**31.
        causal: Whether to clip each range after its query's own position.
        cu_seqlens_q: Boundaries ``[N+1]`` of packed sequences, int32 or int64, as for :func:`selection_attention`.
            Blocks then count from the start of the query's own sequence, whose queries are the last of its keys. None
            for no packing.
        cu_seqlens_k: The same boundaries of the keys; None for cu_seqlens_q.

    Returns:
        Ranges ``[B, S, G, k, 2]``, int32.

    Raises:
        ValueError: A shape or device does not fit, or block_size or S_kv is out of range. The message names the
            argument.
        TypeError: A tensor is not int32 or int64, or another argument has the wrong Python type.

    Source: the selected blocks of native sparse attention, arXiv 2502.11089, section 3.3.2.
    """
    _check_blocks(block_indices, block_size, S_kv, cu_seqlens_q, cu_seqlens_k)
    if not isinstance(causal, bool):
        raise TypeError(f"blocks_to_ranges: causal must be a bool, got {type(causal).__name__}")
    if block_size > 2**31:  # larger than any S_kv: products with it would overflow
        block_size = 2**31
    s = block_indices.shape[1]
    blocks = (S_kv + block_size - 1) // block_size
    # Clip before the product, which could overflow.
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
    # An empty range is [start, start).
    return torch.stack((start.clamp(max=S_kv), torch.maximum(end, start).clamp(max=S_kv)), -1).to(torch.int32)


def _check_blocks(
    block_indices: Tensor, block_size: int, S_kv: int, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> None:
    """Raises ValueError or TypeError unless the arguments of :func:`blocks_to_ranges` fit together.

    With plain comparisons: Dynamo traces this function and cannot build a message about a symbolic size.
    """
    op = "blocks_to_ranges"
    checks.integers(op, "block_indices", block_indices)
    if block_indices.dim() != 4:
        raise ValueError(f"{op}: block_indices must have shape [B, S, G, k], got {checks.text(block_indices.shape)}")
    for name, value, least in (("block_size", block_size, 1), ("S_kv", S_kv, 0)):
        checks.integer(op, name, value)
        if value < least:
            raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if S_kv >= 2**31:
        raise ValueError(f"{op}: S_kv must be below 2**31, got {S_kv}")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError(
            f"{op}: cu_seqlens_k must be None where cu_seqlens_q is, got {checks.text(cu_seqlens_k.shape)}"
        )
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t is not None:
            checks.integers(op, name, t, block_indices, "block_indices")
            if t.dim() != 1 or t.shape[0] < 1:
                raise ValueError(f"{op}: {name} must have shape [N+1], got {checks.text(t.shape)}")
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        want, got = checks.text(cu_seqlens_q.shape), checks.text(cu_seqlens_k.shape)
        raise ValueError(f"{op}: cu_seqlens_k must have cu_seqlens_q's shape {want}, got {got}")


def _offsets(query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """Returns, for each query, the shift from its position in S to its position in its own sequence of keys."""
    ends_q = cu_seqlens_q.to(torch.int64)
    ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.to(torch.int64)
    # The last query of a sequence is at its last key. One more entry is for queries after all sequences.
    shift = torch.cat(((ends_k[1:] - ends_k[:-1]) - ends_q[1:], ends_q.new_zeros(1)))
    return shift[torch.searchsorted(ends_q[1:], query, right=True)]
