# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): the public functions.

Each token carries ``n`` residual streams of width ``D``. A sublayer f, which has its own set of parameters, is applied
like this::

    h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, sinkhorn_iters=20)
    x = mhc_post(x, f(h_in), h_post, h_res, transpose_res=False)

The functions accept any leading dimensions and any strides, and work with autograd, ``torch.compile``, ``torch.func``
and vmap. They run as Triton kernels on CUDA and as plain PyTorch elsewhere. Second derivatives raise RuntimeError,
forward-mode derivatives NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.ops import checks
from mhc_inductor.ops.mhc import call
from mhc_inductor.ops.registry import refuse_trace


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
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes each token's mixing coefficients and collapses its streams to the sublayer's input.

    ::

        v       = vec(x) ;  inv_rms = rsqrt(mean(v*v) + norm_eps)           # or 1 / (sqrt(mean(v*v)) + norm_eps)
        z       = (v * vec(gamma)) @ phi.T * inv_rms                        # split n | n | n*n
        h_pre   = sigmoid(alpha[0]*z_pre + b_pre) + hc_eps
        h_post  = post_mult * sigmoid(alpha[1]*z_post + b_post) + post_eps
        h_res   = alpha[2]*z_res + b_res                                    # [n, n], row-major
        h_in    = sum_i h_pre[i] * x[i]

    With ``sinkhorn_iters > 0``, h_res also goes through :func:`mhc_sinkhorn`, on CUDA in the same launch. All
    arithmetic is fp32 (fp64 if x is fp64). There are no kernels for fp64: it runs the formula in plain PyTorch.

    Args:
        x: Residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16, fp32 or fp64.
        phi: Projection ``[n*n + 2n, n*D]``, or ``[2n, n*D]`` for a layer without residual coefficients. phi, alpha,
            bias and gamma may each have another floating dtype than x (fp64 only if x is fp64).
        alpha: Scales ``[3]`` of the pre, post and residual logits, or ``[2]`` (pre, post) if phi has 2n rows.
        bias: Biases of the logits, ``[n*n + 2n]`` or ``[2n]``, one for each row of phi.
        gamma: Weight ``[n, D]`` of the RMS norm, or None for ones.
        norm_eps: Added to the mean of squares, or to its root; finite and at least 0.
        hc_eps: Added to h_pre; finite and at least 0.
        post_mult: Factor of h_post's sigmoid; finite and above 0.
        post_eps: Added to h_post; finite and at least 0.
        sinkhorn_iters: Number of Sinkhorn iterations on h_res; 0 returns the raw logits. It must be 0 if phi has 2n
            rows.
        sinkhorn_eps: In [0, 1); see :func:`mhc_sinkhorn`.
        sinkhorn_form: ``"softmax"`` (DeepSeek-V4), ``"exp"`` (Megatron) or ``"exp_eps"``; see :func:`mhc_sinkhorn`.
        norm_form: Where norm_eps is added: ``"inside"`` the root (DeepSeek-V4, Liger) or ``"outside"`` (Megatron:
            ``1 / (|v| / sqrt(n*D) + norm_eps)``). Outside, a token of zeros gets no gradient through the norm.

    Returns:
        ``(h_in, h_post, h_res)``: h_in ``[..., D]`` in x's dtype, h_post ``[..., n]`` and h_res ``[..., n, n]`` in fp32
        (fp64 if x is fp64). h_res is None if phi has 2n rows. Pass h_post and h_res on to :func:`mhc_post`.

    Raises:
        ValueError: A shape, device, number or form does not fit. The message names the argument.
        TypeError: An argument is not a tensor or not a number where it must be, or has a dtype that is not allowed.

    Source: arXiv 2512.24880, equations 14 to 18 (section 4.3.1) and 19 (Sinkhorn), as in DeepSeek-V4 and
    ``npu_mhc_pre``.
    """
    refuse_trace("mhc_pre")
    options = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, norm_form)
    if not torch.compiler.is_compiling():  # under torch.compile the op's fake checks
        checks.check("mhc_pre", x, phi, alpha, bias, gamma, *options)
    h_in, h_post, h_res, _, _, _ = call("mhc_pre", x, phi, alpha, bias, gamma, *options)
    return h_in, h_post, None if phi.shape[0] == 2 * x.shape[-2] else h_res


def mhc_sinkhorn(h_res: Tensor, iters: int = 20, eps: float = 1e-6, form: str = "softmax") -> Tensor:
    """Scales logits to a nearly doubly stochastic matrix by Sinkhorn-Knopp iterations.

    ::

        form "softmax" (DeepSeek-V4):
            c = softmax(h_res, -1) + eps ;  c = c / (c.sum(-2) + eps)
            iters-1 times:  c = c / (c.sum(-1) + eps) ;  c = c / (c.sum(-2) + eps)
        form "exp" (Megatron):
            c = exp(h_res - rowmax)
            iters times:  c = c / max(c.sum(-1), eps) ;  c = c / max(c.sum(-2), eps)
        form "exp_eps" (ports that add eps to the sums; large logits overflow, as they do there):
            c = exp(h_res)
            iters times:  c = c / (c.sum(-1) + eps) ;  c = c / (c.sum(-2) + eps)

    The gradient goes through every iteration.

    Args:
        h_res: Logits ``[..., n, n]``, n from 2 to 8; bf16, fp16, fp32 or fp64. The arithmetic is fp32 (fp64 if h_res is
            fp64).
        iters: Number of iterations, at least 0; 0 returns a copy of h_res.
        eps: In [0, 1).
        form: ``"softmax"``, ``"exp"`` or ``"exp_eps"``.

    Returns:
        The matrix ``[..., n, n]`` in h_res's dtype.

    Raises:
        ValueError: A shape, number or form does not fit. The message names the argument.
        TypeError: h_res is not a floating-point tensor, iters not an int, or eps not a number.

    Source: arXiv 2512.24880, equation 19.
    """
    refuse_trace("mhc_sinkhorn")
    if not torch.compiler.is_compiling():
        checks.check("mhc_sinkhorn", h_res, iters, eps, form)
    return call("mhc_sinkhorn", h_res, iters, eps, form)


def mhc_post(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, *, transpose_res: bool) -> Tensor:
    """Adds the sublayer's output to all streams and mixes the streams.

    ``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, computed in fp32 (fp64 if x is fp64) and rounded once.

    Args:
        x: Residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16, fp32 or fp64 (no kernels for
            fp64).
        f_out: The sublayer's output ``[..., D]``. f_out, h_post and h_res may each have another floating dtype than x
            (fp64 only if x is fp64).
        h_post: Weights ``[..., n]`` of f_out in each stream, from :func:`mhc_pre`.
        h_res: Mixing matrix ``[..., n, n]`` from :func:`mhc_pre` or :func:`mhc_sinkhorn`, or None for the identity.
        transpose_res: False for ``R = h_res`` (the paper, Liger), True for ``R = h_res.T`` (DeepSeek-V4 in
            transformers, TransformerEngine, TileKernels). There is no default, because a model with the wrong
            orientation still trains, only worse.

    Returns:
        The new streams ``[..., n, D]`` in x's dtype.

    Raises:
        ValueError: A shape or device does not fit. The message names the argument.
        TypeError: An argument is not a tensor or has a dtype that is not allowed, or transpose_res is not a bool.

    Source: arXiv 2512.24880, equation 3.
    """
    refuse_trace("mhc_post")
    if not torch.compiler.is_compiling():
        checks.check("mhc_post", x, f_out, h_post, h_res, transpose_res)
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
    norm_form: str = "inside",
) -> Tensor:
    """Collapses the streams before the LM head.

    It is :func:`mhc_pre` with the n coefficients of h_pre only::

        h_pre = sigmoid(alpha[0]*z + bias) + hc_eps ;  h_in = sum_i h_pre[i] * x[i]

    with z as in :func:`mhc_pre`.

    Args:
        x: Residual streams ``[..., n, D]``, n from 2 to 8, D at least 16; bf16, fp16, fp32 or fp64 (no kernels for
            fp64).
        phi: Projection ``[n, n*D]``. phi, alpha, bias and gamma may each have another floating dtype than x (fp64 only
            if x is fp64).
        alpha: Scale ``[1]`` of the logits.
        bias: Biases of the logits, ``[n]``.
        gamma: Weight ``[n, D]`` of the RMS norm, or None for ones.
        norm_eps: Added to the mean of squares, or to its root; finite and at least 0.
        hc_eps: Added to the coefficients; finite and at least 0.
        norm_form: Where norm_eps is added, ``"inside"`` or ``"outside"`` the root; see :func:`mhc_pre`.

    Returns:
        h_in ``[..., D]`` in x's dtype.

    Raises:
        ValueError: A shape, device, number or form does not fit. The message names the argument.
        TypeError: An argument is not a tensor or not a number where it must be, or has a dtype that is not allowed.

    Source: the pre mapping of arXiv 2512.24880, as DeepSeek-V4 uses it before its LM head.
    """
    refuse_trace("mhc_head")
    args = (x, phi, alpha, bias, gamma, norm_eps, hc_eps, norm_form)
    if not torch.compiler.is_compiling():
        checks.check("mhc_head", *args)
    return call("mhc_head", *args)[0]
