# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask that is data, in plain PyTorch: the specification.

:func:`selection_mask_attention` and :func:`selection_mask_attention_backward` have the name, the arguments and the
outputs of the op ``torch.ops.mhc_inductor.<name>``. The chunks and the formulas of a chunk are those of
:mod:`mhc_inductor.reference.selection`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.selection import (
    Rows,
    Slices,
    attend,
    attend_backward,
    backward_rows,
    chunks,
    rows,
    unrows,
)
from mhc_inductor.reference.selection_lists import values_of


def visible(q: Tensor, mask: Tensor, at: Slices) -> tuple[Tensor, Tensor | None]:
    """Returns which keys the chunk ``at`` sees, and what the mask adds to the scores: ``[b, g, s, S_kv]`` each."""
    in_b, in_g, in_s = at
    part = mask.expand(*q.shape[:3], mask.shape[3])[in_b, in_s, in_g].transpose(1, 2)
    return (part, None) if mask.dtype is torch.bool else (part != -torch.inf, part.to(acc_dtype(q.dtype)))


@as_given
def selection_mask_attention(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, sink: Tensor | None, scale: float, v_width: int,
    *, odd: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes softmax attention of each query over the keys that its row of the mask lets it see.

    ::

        t   = scale * q[b, s, g] @ k[b, g].T                            # [h, S_kv]
        t   = t where mask[b, s, g] is True, else -inf                  # a mask of bools
        t   = t + mask[b, s, g]                                         # a mask of floats; -inf hides a key
        lse = log(sum exp(t)) ;  o = exp(t - lse_total) @ v[b, g]
        lse_total = lse, or logaddexp(lse, sink[g]) with a sink

    Finite values are added as eager code in the arithmetic's dtype adds them: finfo.min hides a key where another one
    of the row is above it; a row of nothing else is the mean of the values.

    Args:
        q: Queries ``[B, S, G, h, Dk]``.
        k: Keys ``[B, G, S_kv, Dk]``.
        v: Values ``[B, G, S_kv, Dv]``, or None for ``k[..., :v_width]``.
        mask: ``[B or 1, S, G or 1, S_kv]``, which all heads of a group share: bool, True for visible keys, or floating.
        sink: Logits ``[G, h]``, or None.
        scale: Factor of the scores.
        v_width: Dv.
        odd: Whether values may hold NaN or inf, which reach only the queries that see them.

    Returns:
        ``(o, lse)``: o ``[B, S, G, h, Dv]`` in q's dtype, exactly 0 where no key is visible; lse ``[B, S, G, h]`` in
        the arithmetic's dtype, -inf there.

    Source: Vaswani et al., arXiv 1706.03762, equation 1, with an additive mask.
    """
    acc, h = acc_dtype(q.dtype), q.shape[3]
    o, lse = q.new_zeros((*q.shape[:4], v_width)), q.new_full(q.shape[:4], -torch.inf, dtype=acc)
    if o.numel() == 0 or k.shape[2] == 0:
        return o, lse
    for in_b, in_g, queries in chunks(q, k):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, values_of(k, v, v_width)))
        for in_s in queries:
            at = (in_b, in_g, in_s)
            seen, bias = visible(q, mask, at)
            logit = None if sink is None else sink[in_g].repeat(1, seen.shape[2])
            part = attend(rows(q, at), keys, values, seen, logit, scale, odd, bias)
            o[in_b, in_s, in_g], lse[in_b, in_s, in_g] = (unrows(t, h) for t in part)
    return o, lse


@as_given
def selection_mask_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor,
    sink: Tensor | None, o: Tensor, lse: Tensor, scale: float, v_width: int, *, odd: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of :func:`selection_mask_attention`; a gradient of None counts as zero.

    With t the scores under the mask::

        p = exp(t - lse_total) ;  delta = <dout, o> = sum p * (dout @ v.T)
        dv = p.T @ dout ;  dt = p * (dout @ v.T - delta) + dlse * exp(t - lse)
        dq = scale * dt @ k ;  dk = scale * dt.T @ q ;  dsink = -sum exp(sink - lse_total) * delta

    Under a mask of floats, exp(t - lse) is divided by its sum over the row: an lse of -1e9 has lost log(sum exp(t)).

    Args:
        dout: Gradient ``[B, S, G, h, Dv]`` of o, or None.
        dlse: Gradient ``[B, S, G, h]`` of lse, or None.
        q: As for :func:`selection_mask_attention`.
        k: As for :func:`selection_mask_attention`.
        v: As for :func:`selection_mask_attention`.
        mask: As for :func:`selection_mask_attention`.
        sink: As for :func:`selection_mask_attention`.
        o: Output of :func:`selection_mask_attention`.
        lse: Output of :func:`selection_mask_attention`.
        scale: As for :func:`selection_mask_attention`.
        v_width: Dv.
        odd: Whether any input may hold NaN or inf.

    Returns:
        ``(dq, dk, dv, dsink)``, each in its input's shape and dtype; dv has shape [0] with v None, dsink without a sink.

    Source: derived from arXiv 1706.03762, equation 1.
    """
    acc, h, values = acc_dtype(q.dtype), q.shape[3], values_of(k, v, v_width)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, values))
    row, dsink = backward_rows(dout, dlse, sink, o, lse)
    if q.numel() and k.shape[2]:
        for in_b, in_g, queries in chunks(q, k):
            keys, mine = (t[in_b, in_g].to(acc) for t in (k, values))
            grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(mine)
            for in_s in queries:
                at = (in_b, in_g, in_s)
                seen, bias = visible(q, mask, at)
                part = Rows(*(rows(t, at) for t in row))
                grad_q, more_k, more_v = attend_backward(part, rows(q, at), keys, mine, seen, scale, odd, bias)
                dq[in_b, in_s, in_g] = unrows(grad_q, h).to(q.dtype)
                grad_k += more_k
                grad_v += more_v
            if v is None:
                grad_k += F.pad(grad_v, (0, k.shape[3] - v_width))
            dk[in_b, in_g], dv[in_b, in_g] = grad_k.to(k.dtype), grad_v.to(k.dtype)
    return dq, dk, k.new_empty((0,)) if v is None else dv, dsink
