"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): the public functions.

A token carries ``n`` residual streams of width ``D``. Around a sublayer f, with one set of parameters a
sublayer::

    h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, sinkhorn_iters=20)
    x = mhc_post(x, f(h_in), h_post, h_res, transpose_res=False)

Each takes any leading dimensions, any strides, and works with autograd, ``torch.compile``, ``torch.func`` and
vmap. On CUDA they run on Triton kernels, elsewhere as plain PyTorch. Second derivatives raise RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops import checks
from mhc_inductor.ops.mhc import call


def mhc_pre(
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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the mixing coefficients of each token and collapse its streams to the sublayer's input.

    Equations 14 to 18 of arXiv 2512.24880 (section 4.3.1; with the iterations of equation 19 in the same
    launch), as in DeepSeek-V4 and ``npu_mhc_pre``::

        v       = vec(x) ;  inv_rms = rsqrt(mean(v*v) + norm_eps)
        z       = (v * vec(gamma)) @ phi.T * inv_rms                        # split n | n | n*n
        h_pre   = sigmoid(alpha[0]*z_pre + b_pre) + hc_eps
        h_post  = post_mult * sigmoid(alpha[1]*z_post + b_post) + post_eps
        h_res   = alpha[2]*z_res + b_res                                    # [n, n], row-major
        h_in    = sum_i h_pre[i] * x[i]

    Args:
        x: residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16 or fp32 (fp64 without
            kernels).
        phi: projection ``[n*n + 2n, n*D]``, or ``[2n, n*D]`` for a layer without residual coefficients.
        alpha: scales ``[3]`` (pre, post, res), or ``[2]`` with 2n rows in phi.
        bias: ``[rows of phi]``.
        gamma: weight ``[n, D]`` of the RMS norm; None for ones.
        norm_eps: added to the mean of squares; finite, at least 0. So are hc_eps and post_eps.
        hc_eps: added to h_pre.
        post_mult: the upper end of h_post's range, above 0.
        post_eps: added to h_post.
        sinkhorn_iters: 0 returns the raw logits, k > 0 the matrix after k iterations (:func:`mhc_sinkhorn`).
        sinkhorn_eps: in [0, 1), see :func:`mhc_sinkhorn`.
        sinkhorn_form: ``"softmax"`` (DeepSeek-V4) or ``"exp"`` (Megatron).

    phi, alpha, bias and gamma may each be fp32, bf16 or fp16, and are used as fp32 (all arithmetic is fp32).

    Returns:
        ``(h_in, h_post, h_res)``: h_in ``[..., D]`` in x's dtype, h_post ``[..., n]`` in fp32, h_res ``[...,
        n, n]`` in fp32, or None when phi has 2n rows. Pass all three on to :func:`mhc_post`.

    Raises:
        ValueError: a shape, device, number or form that does not fit; the message names it.
        TypeError: something that is no floating-point tensor, or no number.
    """
    options = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps, sinkhorn_form)
    if not torch.compiler.is_compiling():  # compiled, the op's fake checks
        checks.mhc_pre(x, phi, alpha, bias, gamma, *options)
    h_in, h_post, h_res, _, _, _ = call("mhc_pre", x, phi, alpha, bias, gamma, *options)
    return h_in, h_post, None if phi.shape[0] == 2 * x.shape[-2] else h_res


def mhc_sinkhorn(h_res: Tensor, iters: int = 20, eps: float = 1e-6, form: str = "softmax") -> Tensor:
    """Scale logits to a nearly doubly stochastic matrix (Sinkhorn-Knopp, equation 19 of arXiv 2512.24880).

    ::

        form "softmax" (DeepSeek-V4):
            c = softmax(h_res, -1) + eps ;  c = c / (c.sum(-2) + eps)
            iters-1 times:  c = c / (c.sum(-1) + eps) ;  c = c / (c.sum(-2) + eps)
        form "exp" (Megatron):
            c = exp(h_res - rowmax)
            iters times:  c = c / max(c.sum(-1), eps) ;  c = c / max(c.sum(-2), eps)

    The gradient goes through every iteration.

    Args:
        h_res: logits ``[..., n, n]``, n from 2 to 8; bf16, fp16, fp32 or fp64. The arithmetic is fp32 (fp64
            for fp64).
        iters: number of iterations; 0 returns a copy of h_res.
        eps: in [0, 1).
        form: ``"softmax"`` or ``"exp"``.

    Returns:
        The matrix, in h_res's shape and dtype.

    Raises:
        ValueError: a shape, number or form that does not fit; the message names it.
        TypeError: something that is no floating-point tensor, or no number.
    """
    if not torch.compiler.is_compiling():
        checks.mhc_sinkhorn(h_res, iters, eps, form)
    return call("mhc_sinkhorn", h_res, iters, eps, form)


def mhc_post(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, *, transpose_res: bool) -> Tensor:
    """Expand the sublayer's output to all streams, and mix the streams (equation 3 of arXiv 2512.24880).

    ``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, with fp32 arithmetic and one rounding.

    Args:
        x: residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16 or fp32 (fp64 without
            kernels).
        f_out: the sublayer's output ``[..., D]``. f_out, h_post and h_res may each have another floating
            dtype than x.
        h_post: ``[..., n]``, from :func:`mhc_pre`.
        h_res: ``[..., n, n]``, from :func:`mhc_pre` or :func:`mhc_sinkhorn`; None mixes nothing (R is the
            identity).
        transpose_res: False for ``R = h_res`` (the paper, Liger), True for ``R = h_res.T`` (DeepSeek-V4 in
            transformers, TransformerEngine, TileKernels). It has no default: the wrong one trains, badly.

    Returns:
        The new streams, in x's shape and dtype.

    Raises:
        ValueError: a shape or device that does not fit; the message names it.
        TypeError: something that is no floating-point tensor, or a transpose_res that is no bool.
    """
    if not torch.compiler.is_compiling():
        checks.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return call("mhc_post", x, f_out, h_post, h_res, transpose_res)


def mhc_head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> Tensor:
    """Collapse the streams before the LM head: :func:`mhc_pre` with the n coefficients of h_pre only.

    Args:
        x: residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16 or fp32 (fp64 without
            kernels).
        phi: projection ``[n, n*D]``.
        alpha: scale ``[1]``.
        bias: ``[n]``.
        gamma: weight ``[n, D]`` of the RMS norm; None for ones.
        norm_eps: added to the mean of squares; finite, at least 0. So is hc_eps.
        hc_eps: added to the coefficients.

    Returns:
        ``h_in[..., D]`` in x's dtype.

    Raises:
        ValueError: a shape, device or number that does not fit; the message names it.
        TypeError: something that is no floating-point tensor, or no number.
    """
    args = (x, phi, alpha, bias, gamma, norm_eps, hc_eps)
    if not torch.compiler.is_compiling():
        checks.mhc_head(*args)
    return call("mhc_head", *args)[0]
