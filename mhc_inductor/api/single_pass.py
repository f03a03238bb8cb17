# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC (DeepSeek-V4.1): the public functions.

A sublayer's streams are collapsed with the weights that the sublayer before it predicted::

    h_in = mhc_collapse(x, h_pre)                       # h_pre of the sublayer before; at first 1, 0, ..., 0
    h_pre, h_post, h_res = mhc_coefficients(x, phi, alpha, bias, sinkhorn_iters=20)
    x = mhc_post(x, f(h_in), h_post, h_res, transpose_res=True)

After the last sublayer, ``mhc_collapse(x, h_pre)`` is the output. A compiled model computes everything between two
sublayers in one op, so that the streams are read and written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops import checks
from mhc_inductor.ops.registry import call, refuse_trace


def mhc_coefficients(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    post_eps: float = 0.0,
    sinkhorn_iters: int = 0,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_form: str = "softmax",
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes each token's mixing coefficients without collapsing its streams.

    The formulas, the arguments and the errors are those of :func:`mhc_inductor.mhc_pre`, whose h_pre is returned in
    place of h_in.

    Args:
        x: Residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16, fp32 or fp64 (no kernels for
            fp64).
        phi: Projection ``[n*n + 2n, n*D]``, or ``[2n, n*D]`` for a layer without residual coefficients. phi, alpha,
            bias and gamma may each have another floating dtype than x (fp64 only if x is fp64).
        alpha: Scales ``[3]`` of the pre, post and residual logits, or ``[2]`` (pre, post) if phi has 2n rows.
        bias: Biases of the logits, one for each row of phi.
        gamma: Weight ``[n, D]`` of the RMS norm, or None for ones.
        norm_eps: Added to the mean of squares, or to its root; finite and at least 0.
        hc_eps: Added to h_pre; finite and at least 0.
        post_mult: Factor of h_post's sigmoid; finite and above 0.
        post_eps: Added to h_post; finite and at least 0.
        sinkhorn_iters: Number of Sinkhorn iterations on h_res; 0 returns the raw logits. It must be 0 if phi has 2n
            rows.
        sinkhorn_eps: In [0, 1); see :func:`mhc_inductor.mhc_sinkhorn`.
        sinkhorn_form: ``"softmax"``, ``"exp"`` or ``"exp_eps"``; see :func:`mhc_inductor.mhc_sinkhorn`.
        norm_form: Where norm_eps is added, ``"inside"`` or ``"outside"`` the root; see :func:`mhc_inductor.mhc_pre`.

    Returns:
        ``(h_pre, h_post, h_res)``: h_pre and h_post ``[..., n]`` and h_res ``[..., n, n]``, in fp32 (fp64 if x is
        fp64). h_res is None if phi has 2n rows.

    Raises:
        ValueError: A shape, device, number or form does not fit. The message names the argument.
        TypeError: An argument is not a tensor or not a number where it must be, or has a dtype that is not allowed.

    Source: arXiv 2512.24880, equations 14 to 19.
    """
    refuse_trace("mhc_coefficients")
    options = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, norm_form)
    if not torch.compiler.is_compiling():  # under torch.compile the op's fake checks
        checks.check("mhc_coefficients", x, phi, alpha, bias, gamma, *options)
    h_pre, h_post, h_res, _, _ = call("mhc_coefficients", x, phi, alpha, bias, gamma, *options)
    return h_pre, h_post, None if phi.shape[0] == 2 * x.shape[-2] else h_res


def mhc_collapse(x: Tensor, h_pre: Tensor) -> Tensor:
    """Collapses the streams with given weights: ``h_in = sum_i h_pre[i] * x[i]``, rounded once.

    Args:
        x: Residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16, fp32 or fp64 (no kernels for
            fp64).
        h_pre: Weights ``[..., n]``, in any floating dtype (fp64 only if x is fp64).

    Returns:
        h_in ``[..., D]`` in x's dtype.

    Raises:
        ValueError: A shape or device does not fit. The message names the argument.
        TypeError: An argument is not a tensor or has a dtype that is not allowed.

    Source: arXiv 2512.24880, equation 3.
    """
    refuse_trace("mhc_collapse")
    if not torch.compiler.is_compiling():
        checks.check("mhc_collapse", x, h_pre)
    return call("mhc_collapse", x, h_pre)
