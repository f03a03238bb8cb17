# SPDX-License-Identifier: Apache-2.0
"""The E79 scan (coupled memory-modulation matrix recurrence): the public function.

It accepts tensors of any strides and works with autograd, ``torch.compile``, ``torch.func`` and vmap. Second
derivatives raise RuntimeError, forward-mode derivatives NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import checks
from mhc_inductor.ops.e79 import call, segment_length
from mhc_inductor.ops.registry import refuse_trace, typed


def e79_scan(
    kvqm: Tensor,
    b_s: Tensor | None = None,
    b_m: Tensor | None = None,
    S0: Tensor | None = None,
    M0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the E79 recurrence over all time steps, with two n x n states per sequence: S (content) and M (modulation).

    ::

        k^ = k / (|k| + 1e-6) ;  m^ = m / (|m| + 1e-6)                       # Euclidean norms
        r = sigmoid(M k^ + b_s) ;  c = sigmoid(M.T k^ + b_s) ;  delta = v - S k^
        S' = r[:, None] * S * c[None, :] + outer(delta, k^)
        p = sigmoid(S' m^ + b_m) ;  w = sigmoid(S'.T m^ + b_m) ;  g = delta - M m^
        M' = p[:, None] * M * w[None, :] + outer(g, m^)
        out = y * silu(y),  y = S' q

    Every input gets a gradient, from out and from the final states. Where gradients are needed, the forward keeps the
    states every :func:`~mhc_inductor.ops.e79.segment_length` steps, and the backward recomputes those in between.
    All arithmetic and the states are fp32 (fp64 if kvqm is fp64). CUDA kernels run for n up to 128 and for kvqm in
    bf16, fp16 or fp32; everything else runs the formula in plain PyTorch.

    Args:
        kvqm: Projected input ``[T, B, 4n]``, the concatenation of k, v, q and m in this order. T and n are at least 1;
            bf16, fp16, fp32 or fp64.
        b_s: Bias of r and c: None (zero), fixed ``[n]``, or input-dependent ``[T, B, n]``. Each bias and each initial
            state may have another floating dtype than kvqm (fp64 only if kvqm is fp64).
        b_m: Bias of p and w, with the same choices, independent of those for b_s.
        S0: Initial S ``[B, n, n]``, or None for zero.
        M0: Initial M ``[B, n, n]``, or None for zero.

    Returns:
        ``(out, S, M)``: out ``[T, B, n]`` in kvqm's dtype, and the final states S and M ``[B, n, n]`` in fp32 (fp64 if
        kvqm is fp64). Passing these states to the next call as S0 and M0 continues the sequence.

    Raises:
        ValueError: A shape or device does not fit, or T is 0. The message names the argument.
        TypeError: An argument is not a tensor, or has a dtype that is not allowed.

    Source: the E79 model's recurrence.
    """
    refuse_trace("e79_scan")
    if torch.compiler.is_compiling():  # the op's fake checks shapes and dtypes
        typed("e79_scan", kvqm, b_s, b_m, S0, M0)
    else:
        checks.check("e79_scan", kvqm, b_s, b_m, S0, M0)
    segment = 0
    if kvqm.dim() == 3 and _differentiable(kvqm, b_s, b_m, S0, M0):
        steps, batch, width = kvqm.shape
        segment = segment_length(width // 4, batch, steps)
    out, S, M, *_ = call("e79_scan", kvqm, b_s, b_m, S0, M0, segment)
    return out, S, M


def _differentiable(*tensors: Tensor | None) -> bool:
    """Returns whether a gradient can arrive: inside torch.func, requires_grad does not show those of outer levels."""
    if not torch.compiler.is_compiling() and compat.functorch_active():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
