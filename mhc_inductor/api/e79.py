"""The E79 scan (coupled memory-modulation matrix recurrence): the public function.

It takes any strides, and works with autograd, ``torch.compile``, ``torch.func`` and vmap. Second derivatives raise
RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.ops import checks_e79
from mhc_inductor.ops.e79 import call, segment_length
from mhc_inductor.ops.registry import typed


def e79_scan(
    kvqm: Tensor,
    b_s: Tensor | None = None,
    b_m: Tensor | None = None,
    S0: Tensor | None = None,
    M0: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the E79 recurrence over all time steps: two n x n states a sequence, S (content) and M (modulation).

    ::

        k^ = k / (|k| + 1e-6) ;  m^ = m / (|m| + 1e-6)                       # Euclidean norms
        r = sigmoid(M k^ + b_s) ;  c = sigmoid(M.T k^ + b_s) ;  delta = v - S k^
        S' = r[:, None] * S * c[None, :] + outer(delta, k^)
        p = sigmoid(S' m^ + b_m) ;  w = sigmoid(S'.T m^ + b_m) ;  g = delta - M m^
        M' = p[:, None] * M * w[None, :] + outer(g, m^)
        out = y * silu(y),  y = S' q

    Gradients reach every input, from out and from the final states. Where they are needed, the states are kept
    every :func:`~mhc_inductor.ops.e79.segment_length` steps and computed again in between.

    Args:
        kvqm: the projected input ``[T, B, 4n]``, k, v, q, m in this order, T and n at least 1; bf16, fp16 or fp32
            (fp64 without kernels). All arithmetic and the states are fp32 (fp64 for fp64).
        b_s: bias of r and c: None (zero), fixed ``[n]`` or input-dependent ``[T, B, n]``.
        b_m: bias of p and w, likewise, independently.
        S0: initial S ``[B, n, n]``; None for zero.
        M0: initial M, likewise.

    The biases and initial states may each be fp32, bf16 or fp16.

    Returns:
        ``(out, S, M)``: out ``[T, B, n]`` in kvqm's dtype, the final S and M ``[B, n, n]`` in fp32. Given to the next
        call as S0 and M0 they continue the sequence.

    Raises:
        ValueError: a shape or device that does not fit, or no time step; the message names it.
        TypeError: something that is no floating-point tensor.
    """
    if torch.compiler.is_compiling():  # the op's fake checks the rest
        typed("e79_scan", kvqm, b_s, b_m, S0, M0)
    else:
        checks_e79.e79_inputs(kvqm, b_s, b_m, S0, M0)
    segment = 0
    if kvqm.dim() == 3 and _differentiable(kvqm, b_s, b_m, S0, M0):
        steps, batch, width = kvqm.shape
        segment = segment_length(width // 4, batch, steps)
    out, S, M, *_ = call("e79_scan", kvqm, b_s, b_m, S0, M0, segment)
    return out, S, M


def _differentiable(*tensors: Tensor | None) -> bool:
    """Whether a gradient can arrive: inside torch.func a tensor does not show the gradients of outer levels."""
    if not torch.compiler.is_compiling() and compat.functorch_active():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
