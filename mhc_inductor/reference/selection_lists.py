# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of single keys in plain PyTorch: the specification.

:func:`selection_list_attention` and :func:`selection_list_attention_backward` have the name, the arguments and the
outputs of the op ``torch.ops.mhc_inductor.<name>``. An entry of a list is the range of one key, so the formulas are
those of :mod:`mhc_inductor.reference.selection`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference import selection
from mhc_inductor.reference.precision import as_given
from mhc_inductor.reference.segments import ANY_SEGMENT


def absolute_keys(q: Tensor, k: Tensor, indices: Tensor, *visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns positions in k, int64 ``[B, S, G, n]``, and whether the query sees them; 0 where it does not.

    ``visible`` are cu_seqlens_q, cu_seqlens_k, segments_q and segments_k.
    """
    cu_seqlens_q, cu_seqlens_k, segments_q, segments_k = visible
    lo, hi = (bound.view(1, -1, 1, 1) for bound in selection.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k))
    index = indices.to(torch.int64)
    seen = (index >= 0) & (index < hi - lo)
    keys = torch.where(seen, index, 0) + lo
    if segments_q is not None and segments_k is not None and k.shape[2]:
        keys = torch.where(seen, keys, 0)
        ids = segments_k.gather(1, keys.flatten(1)).view_as(keys)
        seen = seen & ((ids == segments_q[:, :, None, None]) | (ids == ANY_SEGMENT))
    return torch.where(seen, keys, 0), seen


def values_of(k: Tensor, v: Tensor | None, v_width: int) -> Tensor:
    """Returns v, or the first ``v_width`` columns of k if v is None."""
    return k[..., :v_width] if v is None else v


@as_given
def selection_list_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, sink: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention of each query over the distinct keys in its list.

    ::

        sel = {i in indices[b, s, g] : 0 <= i < S_kv, segments_k[b, i] in (segments_q[b, s], ANY_SEGMENT)}
        t   = scale * q[b, s, g] @ k[b, g, sel].T                       # [h, keys]
        lse = log(sum exp(t)) ;  o = exp(t - lse_total) @ v[b, g, sel]
        lse_total = lse, or logaddexp(lse, sink[g]) with a sink

    Args:
        q: Queries ``[B, S, G, h, Dk]``.
        k: Keys ``[B, G, S_kv, Dk]``.
        v: Values ``[B, G, S_kv, Dv]``, or None for ``k[..., :v_width]``.
        indices: Key positions ``[B, S, G, n]``; others than 0 to S_kv - 1 select nothing, repeated ones count once.
        sink: Logits ``[G, h]``, or None.
        *rest: cu_seqlens_q, cu_seqlens_k, segments_q, segments_k and scale, as for
            :func:`mhc_inductor.reference.selection.selection_attention`, and v_width, which is Dv. With boundaries,
            positions count from the start of the query's own sequence of keys.

    Returns:
        ``(o, lse)``, as :func:`mhc_inductor.reference.selection.selection_attention`.

    Source: DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556), over the list that the indexer chose.
    """
    return over_ranges(selection.selection_attention, q, k, v, indices, sink, *rest)


@as_given
def selection_list_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_list_attention`; a gradient of None counts as zero.

    The formulas are those of :func:`mhc_inductor.reference.selection.selection_attention_backward`. With v None, dk
    holds the gradients of k as keys and as values, summed in the arithmetic's dtype and rounded once.

    dout ``[B, S, G, h, Dv]`` and dlse ``[B, S, G, h]`` are the gradients of o and lse. The others are the arguments of
    :func:`selection_list_attention`, with its outputs o and lse before the scale.

    Returns:
        ``(dq, dk, dv, dsink)``, each in its input's shape and dtype; dv has shape [0] with v None, dsink without a sink.

    Source: derived from arXiv 2512.02556.
    """
    return gradients(selection.selection_attention_backward, dout, dlse, *rest)


def _ranges(q: Tensor, k: Tensor, indices: Tensor, *visible: Tensor | None) -> Tensor:
    """Returns the lists as absolute ranges of one or no key each, int32 ``[B, S, G, n, 2]``."""
    keys, seen = absolute_keys(q, k, indices, *visible)
    return torch.stack((keys, keys + seen), -1).to(torch.int32)


def over_ranges(attention: Callable[..., tuple[Tensor, Tensor]], *args: Any) -> tuple[Tensor, Tensor]:
    """Returns what ``attention`` over ranges gives for the arguments of :func:`selection_list_attention`."""
    q, k, v, indices, sink, *visible, scale, v_width = args
    ranges = _ranges(q, k, indices, *visible)
    return attention(q, k, values_of(k, v, v_width), ranges, sink, None, None, scale)


def gradients(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what ``backward`` over ranges gives for the arguments of :func:`selection_list_attention_backward`.

    If v is None, dv is added to dk.
    """
    dout, dlse, q, k, v, indices, sink, *visible, o, lse, scale, v_width = args
    ranges = _ranges(q, k, indices, *visible)
    if v is not None:
        return backward(dout, dlse, q, k, v, ranges, sink, None, None, o, lse, scale)
    # In the arithmetic's dtype, so that the sum is rounded once.
    keys = k.to(lse.dtype)
    dq, dk, dv, dsink = backward(
        dout, dlse, q.to(lse.dtype), keys, keys[..., :v_width], ranges, sink, None, None, o, lse, scale
    )
    dk = dk + F.pad(dv, (0, k.shape[3] - v_width))
    return dq.to(q.dtype), dk.to(k.dtype), k.new_empty((0,)), dsink
