# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask that is data, in plain PyTorch: the specification.

:func:`selection_mask_attention` and :func:`selection_mask_attention_backward` have the name, the arguments and the
outputs of the op ``torch.ops.mhc_inductor.<name>``. The chunks and the formulas of a chunk are those of
:mod:`mhc_inductor.reference.selection`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.reference import selection
from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.selection_lists import values_of


def visible(q: Tensor, mask: Tensor, at: selection.Slices) -> tuple[Tensor, Tensor | None]:
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
        ``(o, lse)``, as :func:`mhc_inductor.reference.selection.selection_attention`.

    Source: Vaswani et al., arXiv 1706.03762, equation 1, with an additive mask.
    """
    return selection.attention(q, k, values_of(k, v, v_width), sink, scale, functools.partial(visible, q, mask), odd)


@as_given
def selection_mask_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor, *rest: Any,
    odd: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of :func:`selection_mask_attention`; a gradient of None counts as zero.

    With t the scores under the mask::

        p = exp(t - lse_total) ;  delta = <dout, o> = sum p * (dout @ v.T)
        dv = p.T @ dout ;  dt = p * (dout @ v.T - delta) + dlse * exp(t - lse)
        dq = scale * dt @ k ;  dk = scale * dt.T @ q ;  dsink = -sum exp(sink - lse_total) * delta

    Under a mask of floats, exp(t - lse) is divided by its sum over the row: an lse of -1e9 has lost log(sum exp(t)).

    dout ``[B, S, G, h, Dv]`` and dlse ``[B, S, G, h]`` are the gradients of o and lse, ``odd`` says whether any input may
    hold NaN or inf. The others are the arguments of :func:`selection_mask_attention`, with its outputs o and lse before
    the scale.

    Returns:
        ``(dq, dk, dv, dsink)``, each in its input's shape and dtype; dv has shape [0] with v None, dsink without a sink.

    Source: derived from arXiv 1706.03762, equation 1.
    """
    sink, o, lse, scale, _ = rest
    return selection.attention_backward(
        dout, dlse, q, k, v, sink, o, lse, scale, functools.partial(visible, q, mask), odd
    )
