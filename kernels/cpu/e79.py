# SPDX-License-Identifier: Apache-2.0
"""The E79 scan on a CPU: the reference's formulas with few calls per step and preallocated buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.reference.e79 import biases, initial, vectors
from mhc_inductor.reference.precision import acc_dtype, as_given


@as_given
def e79_scan(
    kvqm: Tensor, b_s: Tensor | None, b_m: Tensor | None, S0: Tensor | None, M0: Tensor | None, segment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes :func:`mhc_inductor.reference.e79.e79_scan` with 15 calls per step.

    S and M are the two halves of one buffer and are updated in place. The biases and v are the addends of the batched
    matrix products.
    """
    steps, batch, width = kvqm.shape
    n, acc = width // 4, acc_dtype(kvqm.dtype)
    k, v, q, m = vectors(kvqm)
    bias_s, bias_m = biases(kvqm, b_s), biases(kvqm, b_m)
    zero = torch.zeros_like(v)

    states = torch.stack((initial(kvqm, S0), initial(kvqm, M0)), 1)  # [B, 2, n, n]
    both, (S, M) = states.flatten(1, 2), states.unbind(1)
    saved, gates = torch.empty((0,), dtype=acc), torch.empty((0,), dtype=acc)
    if segment > 0:
        gates = torch.empty((steps, batch, 7, n), dtype=acc)
        saved = torch.empty((2 * -(-steps // segment), batch, n, n), dtype=acc)

    # On a CPU, vectors times a transposed matrix are several times faster than the matrix times the vectors.
    # [k; m] [S; M].T + [[-v, b_s], [0, 0]] = [[-delta, M k + b_s], [S m, M m]] ; [m; q] S'.T + [b_m; 0]
    first = torch.empty((batch, 2, 2, n), dtype=acc)
    second = torch.empty((steps, batch, 2, n), dtype=acc)
    rows, columns = torch.empty((batch, n), dtype=acc), torch.empty((batch, 1, n), dtype=acc)
    scale = rows.unsqueeze(2)
    logits, minus_delta, m_product = first[:, 0, 1], first[:, 0, 0].unsqueeze(2), first[:, 1, 1].unsqueeze(2)
    first, both_t, S_t = first.flatten(2), both.mT, S.mT
    inputs = zip(
        torch.stack((torch.cat((-v, bias_s), -1), torch.cat((zero, zero), -1)), 2),
        torch.stack((k, m), 2),
        k.unsqueeze(2),
        bias_s.unsqueeze(2),
        torch.stack((bias_m, zero), 2),
        torch.stack((m, q), 2),
        m.unsqueeze(2),
        bias_m.unsqueeze(2),
        second,
        second[:, :, 0],
        strict=True,
    )
    for t, (addend, km, k_t, b_st, addend_2, mq, m_t, b_mt, result, logits_2) in enumerate(inputs):
        if segment > 0 and t % segment == 0:
            saved.unflatten(0, (-1, 2))[t // segment].copy_(states.transpose(0, 1))
        torch.baddbmm(addend, km, both_t, out=first)
        torch.baddbmm(b_st, k_t, M, out=columns)
        torch.sigmoid(logits, out=rows)
        S.mul_(scale).mul_(columns.sigmoid_()).addcmul_(minus_delta, k_t, value=-1)
        if segment > 0:
            torch.stack((rows, columns[:, 0]), 1, out=gates[t, :, 0::5])
        torch.baddbmm(addend_2, mq, S_t, out=result)
        torch.baddbmm(b_mt, m_t, S, out=columns)
        torch.sigmoid(logits_2, out=rows)
        m_product.add_(minus_delta)  # -g
        M.mul_(scale).mul_(columns.sigmoid_()).addcmul_(m_product, m_t, value=-1)
        if segment > 0:
            torch.stack((rows, columns[:, 0]), 1, out=gates[t, :, 1::5])
            torch.stack((minus_delta[..., 0], m_product[..., 0]), 1, out=gates[t, :, 2:4])
    y = second[:, :, 1]
    out = (y * y * torch.sigmoid(y)).to(kvqm.dtype).contiguous()
    if segment > 0:
        gates[:, :, 2:4].neg_()
        gates[:, :, 4] = y
    # With one sequence the halves are already contiguous, so clone: outputs must not share memory.
    S, M = (t.clone(memory_format=torch.contiguous_format) for t in (S, M))
    return out, S, M, saved, gates
