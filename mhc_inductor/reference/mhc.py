# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880) in plain PyTorch: the specification.

The functions ``mhc_*`` have the name, the arguments and the outputs of the op ``torch.ops.mhc_inductor.<name>``.
Tensors: ``x[..., n, D]`` are residual streams with any leading dimensions; m is the number of rows of ``phi``. The
arithmetic is fp32 (fp64 if x is fp64), and only results in an input's dtype are rounded, once. Nothing here uses
autograd: the backward functions are closed forms, so Inductor can trace and fuse the whole file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype as acc_dtype
from mhc_inductor.reference.precision import as_given as as_given


def _norms(x: Tensor, norm_eps: float, norm_form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``v = vec(x)`` [..., n*D] in the arithmetic's dtype, the factor of z [...], and what backward saves of it.

    That is the factor itself, or ``rms`` for the form "outside": ``1 / factor - eps`` would lose the digits of a small rms.
    """
    v = x.flatten(-2).to(acc_dtype(x.dtype))
    mean = (v * v).mean(-1)
    inv_rms = torch.rsqrt(mean + norm_eps) if norm_form == "inside" else torch.sqrt(mean)
    return v, _norm_factor(inv_rms, norm_eps, norm_form), inv_rms


def _norm_factor(inv_rms: Tensor, norm_eps: float, norm_form: str) -> Tensor:
    """Returns the factor of z from the output ``inv_rms`` of a forward."""
    return inv_rms if norm_form == "inside" else 1 / (inv_rms + norm_eps)


def _norm_slope(dinv: Tensor, factor: Tensor, inv_rms: Tensor, norm_form: str) -> Tensor:
    """Returns c [...] of ``dv = -c / (n*D) * v``, the gradient through the factor of z; 0 where all of v is 0."""
    if norm_form == "inside":
        return dinv * factor**3
    return torch.where(inv_rms > 0, dinv * factor * (factor / inv_rms), 0.0)


def _logits(
    h_mix: Tensor, factor: Tensor, alpha: Tensor, bias: Tensor, part: int, first: int, last: int | None
) -> Tensor:
    """Returns ``alpha[part] * z + bias`` for the rows ``first`` to ``last`` of phi, where the forward's logits are."""
    z = h_mix[..., first:last] * factor.unsqueeze(-1)
    return alpha[part].to(z.dtype) * z + bias[first:last].to(z.dtype)


def _project(v: Tensor, phi: Tensor, gamma: Tensor | None) -> Tensor:
    """Returns ``h_mix = (v * vec(gamma)) @ phi.T`` [..., m]."""
    weighted = v if gamma is None else v * gamma.flatten().to(v.dtype)
    return torch.matmul(weighted, phi.to(v.dtype).t())


def collapse(x: Tensor, h_pre: Tensor) -> Tensor:
    """Returns ``h_in = sum_i h_pre[i] * x[i]`` [..., D] in x's dtype."""
    acc = acc_dtype(x.dtype)
    return output((h_pre.to(acc).unsqueeze(-1) * x.to(acc)).sum(-2), x.dtype)


def output(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``t`` in an output's dtype and contiguous; elementwise operations alone would keep x's strides."""
    return t.to(dtype).contiguous()


def coefficients(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns h_pre, h_post, h_res, h_mix and inv_rms of :func:`mhc_pre`."""
    n = x.shape[-2]
    v, factor, inv_rms = _norms(x, norm_eps, norm_form)
    h_mix = _project(v, phi, gamma)
    h_pre = torch.sigmoid(_logits(h_mix, factor, alpha, bias, 0, 0, n)) + hc_eps
    h_post = post_mult * torch.sigmoid(_logits(h_mix, factor, alpha, bias, 1, n, 2 * n)) + post_eps
    if phi.shape[0] == 2 * n:
        h_res = h_mix.new_empty((*x.shape[:-2], 0, 0))
    else:
        logits = _logits(h_mix, factor, alpha, bias, 2, 2 * n, None).unflatten(-1, (n, n))
        h_res = _sinkhorn(logits, sinkhorn_iters, sinkhorn_eps, sinkhorn_form)
    return h_pre, h_post, h_res, h_mix, inv_rms


@as_given
def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the coefficients and collapses the streams.

    ::

        v       = vec(x)                                  # [..., n*D]
        h_mix   = (v * vec(gamma)) @ phi.T                # [..., m]; gamma = 1 when absent
        inv_rms = rsqrt(mean(v*v) + norm_eps)             # [...]; norm_form "outside": 1 / (sqrt(mean(v*v)) + norm_eps)
        z       = h_mix * inv_rms                         # split n | n | n*n
        h_pre   = sigmoid(alpha[0]*z_pre + b_pre) + hc_eps
        h_post  = post_mult * sigmoid(alpha[1]*z_post + b_post) + post_eps
        h_res   = sinkhorn(alpha[2]*z_res + b_res)        # raw logits for 0 iterations
        h_in    = sum_i h_pre[i] * x[i]

    Args:
        x: Residual streams ``[..., n, D]``.
        phi: Projection ``[n*n + 2n, n*D]``, or ``[2n, n*D]`` for no residual coefficients.
        alpha: Scales ``[3]``, or ``[2]`` if phi has 2n rows.
        bias: ``[m]``, m the number of rows of phi.
        gamma: Norm weight ``[n, D]``, or None for ones.
        norm_eps: Added to the mean of squares, or to its root.
        hc_eps: Added to h_pre.
        post_mult: Factor of h_post's sigmoid.
        post_eps: Added to h_post.
        sinkhorn_iters: Number of iterations, see :func:`mhc_sinkhorn`; 0 for the raw logits.
        sinkhorn_eps: See :func:`mhc_sinkhorn`.
        sinkhorn_form: See :func:`mhc_sinkhorn`.
        norm_form: ``"inside"`` adds norm_eps under the root, ``"outside"`` to the root.

    Returns:
        ``(h_in, h_post, h_res, h_pre, h_mix, inv_rms)``: h_in ``[..., D]`` in x's dtype; h_post and h_pre ``[..., n]``,
        h_res ``[..., n, n]`` (``[..., 0, 0]`` if phi has 2n rows), h_mix ``[..., m]`` and inv_rms ``[...]`` in the
        arithmetic's dtype. The backward needs the last three. With ``norm_form="outside"`` the last is the root
        ``rms = sqrt(mean(v*v))``, from which 1 / (rms + norm_eps) and its gradient follow without a loss of digits.

    Source: arXiv 2512.24880, equations 14 to 19.
    """
    h_pre, h_post, h_res, h_mix, inv_rms = coefficients(
        x, phi, alpha, bias, gamma, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps, sinkhorn_form,
        norm_form,
    )  # fmt: skip
    return collapse(x, h_pre), h_post, h_res, h_pre, h_mix, inv_rms


@as_given
def mhc_pre_backward(
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_pre`; a gradient of None counts as zero.

    ::

        dh_pre[i] = <dh_in, x[i]>                          # over D
        l = alpha[0]*z_pre + b_pre ; d_pre = dh_pre * sigmoid(l)*sigmoid(-l)
        l = alpha[1]*z_post + b_post ; d_post = dh_post * post_mult * sigmoid(l)*sigmoid(-l)
        d_res = dh_res through the sinkhorn iterations, back to the logits
        dbias = sum_t d ; dalpha[k] = sum_t <d_k, z_k> ; dz = alpha (x) d ; dh_mix = dz * inv_rms
        dinv  = <dz, h_mix>
        dv    = vec(gamma) * (dh_mix @ phi) + vec(h_pre (x) dh_in) - dinv * inv_rms**3 / (n*D) * v
        G     = sum_t dh_mix_t (x) v_t                     # [m, n*D]: one reduction over tokens
        dphi  = G * vec(gamma) ;  dgamma = sum_j phi[j] * G[j]

    sigmoid(-l) is ``1 - sigmoid(l)`` with all digits: a gate at 1, hc_eps added and subtracted again, would have a gradient.

    With ``norm_form="outside"``, inv_rms**3 in dv is ``inv_rms**2 / rms`` instead, and that term is 0 where all of v is 0,
    as the gradient of a vector norm is.

    dh_in, dh_post and dh_res are the gradients of the first three outputs of :func:`mhc_pre`, each of which may be
    None; h_pre, h_post, h_mix and inv_rms are its outputs; dx_acc (x's shape, or None) is added to dx before its one
    rounding; the rest are the arguments of :func:`mhc_pre`.

    Returns:
        ``(dx, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype; dgamma has shape [0] without gamma.

    Source: derived from arXiv 2512.24880, equations 14 to 19.
    """
    d = pre_logit_gradients(
        collapse_dots(dh_in, x), dh_post, dh_res, phi, alpha, bias, h_pre, h_mix, inv_rms,
        norm_eps, post_mult, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, norm_form,
    )  # fmt: skip
    dx, *dparams = coefficients_backward(
        d, dh_in, x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_acc, norm_eps, norm_form
    )
    return output(dx, x.dtype), dparams[0], dparams[1], dparams[2], dparams[3]


def pre_logit_gradients(
    dh_pre: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    norm_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str,
) -> list[Tensor]:
    """Returns ``d_pre, d_post, d_res`` of :func:`mhc_pre_backward`, the last only if phi has n*n + 2n rows."""
    n, acc = h_pre.shape[-1], h_pre.dtype
    factor = _norm_factor(inv_rms, norm_eps, norm_form)
    d = [
        _gate_gradient(dh_pre, _logits(h_mix, factor, alpha, bias, 0, 0, n), 1.0),
        _gate_gradient(dh_post, _logits(h_mix, factor, alpha, bias, 1, n, 2 * n), post_mult),
    ]
    if phi.shape[0] != 2 * n:
        logits = _logits(h_mix, factor, alpha, bias, 2, 2 * n, None).unflatten(-1, (n, n))
        if dh_res is None:
            d_res = torch.zeros_like(logits)
        else:
            d_res = _sinkhorn_backward(dh_res.to(acc), logits, sinkhorn_iters, sinkhorn_eps, sinkhorn_form)
        d.append(d_res.flatten(-2))
    return d


def collapse_dots(dh_in: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns ``dh_pre[i] = <dh_in, x[i]>`` [..., n] in the arithmetic's dtype, or None without ``dh_in``."""
    if dh_in is None:
        return None
    acc = acc_dtype(x.dtype)
    return (dh_in.to(acc).unsqueeze(-2) * x.to(acc)).sum(-1)


def head_logit_gradient(
    dh_pre: Tensor | None,
    alpha: Tensor,
    bias: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    norm_eps: float,
    norm_form: str,
) -> Tensor:
    """Returns the gradient at the argument of a head's sigmoid, [..., n], from that of h_pre."""
    factor = _norm_factor(inv_rms, norm_eps, norm_form)
    return _gate_gradient(dh_pre, _logits(h_mix, factor, alpha, bias, 0, 0, None), 1.0)


def _gate_gradient(grad: Tensor | None, logits: Tensor, scale: float) -> Tensor:
    """Returns the gradient at the logits from that of ``scale * sigmoid(logits)`` plus a constant."""
    if grad is None:
        return torch.zeros_like(logits)
    return grad.to(logits.dtype) * (scale * torch.sigmoid(logits) * torch.sigmoid(-logits))


def coefficients_backward(
    d: list[Tensor],
    dh_in: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    norm_eps: float,
    norm_form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, phi, alpha, bias and gamma from those at the logits; dx is not rounded yet.

    ``d`` has one tensor for each element of alpha.
    """
    acc, m, width = h_pre.dtype, phi.shape[0], phi.shape[1]
    phi_, scale = phi.to(acc), alpha.to(acc)
    flat = torch.cat(d, -1)
    factor = _norm_factor(inv_rms, norm_eps, norm_form)
    z = h_mix * factor.unsqueeze(-1)
    dbias = flat.reshape(-1, m).sum(0)
    dalpha = torch.stack([part.sum() for part in (flat * z).split([p.shape[-1] for p in d], -1)])
    dz = torch.cat([scale[k] * part for k, part in enumerate(d)], -1)
    dh_mix = dz * factor.unsqueeze(-1)
    dinv = (dz * h_mix).sum(-1)

    v = x.flatten(-2).to(acc)
    dv = torch.matmul(dh_mix, phi_)
    if gamma is not None:
        dv = gamma.flatten().to(acc) * dv
    dv = dv - (_norm_slope(dinv, factor, inv_rms, norm_form) / width).unsqueeze(-1) * v
    dx = dv.unflatten(-1, x.shape[-2:])
    if dh_in is not None:
        dx = dx + h_pre.unsqueeze(-1) * dh_in.to(acc).unsqueeze(-2)
    if dx_acc is not None:
        dx = dx + dx_acc.to(acc)

    g = torch.matmul(dh_mix.reshape(-1, m).t(), v.reshape(-1, width))
    if gamma is None:
        dphi, dgamma = g, x.new_empty((0,))
    else:
        dphi = g * gamma.flatten().to(acc)
        dgamma = (phi_ * g).sum(0).reshape(gamma.shape).to(gamma.dtype)
    dparams = dphi.to(phi.dtype), dalpha.to(alpha.dtype), dbias.to(bias.dtype), dgamma
    return dx, *dparams


def _scale(c: Tensor, dim: int, eps: float, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Divides ``c`` by its sums over ``dim``; returns (result, divisor, raw sums)."""
    sums = c.sum(dim, keepdim=True)
    divisor = sums.clamp(min=eps) if form == "exp" else sums + eps
    return c / divisor, divisor, sums


def _first(logits: Tensor, eps: float, form: str) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the positive matrix before any scaling, without and with eps, and the axes of the first iteration."""
    if form == "softmax":
        p = torch.softmax(logits, -1)
        return p, p + eps, [-2]
    c = torch.exp(logits - logits.amax(-1, keepdim=True)) if form == "exp" else torch.exp(logits)
    return c, c, [-1, -2]


def _sinkhorn(logits: Tensor, iters: int, eps: float, form: str) -> Tensor:
    if iters == 0:
        return logits
    _, c, axes = _first(logits, eps, form)
    for dim in axes + [-1, -2] * (iters - 1):
        c = _scale(c, dim, eps, form)[0]
    return c


def _sinkhorn_backward(grad: Tensor, logits: Tensor, iters: int, eps: float, form: str) -> Tensor:
    if iters == 0:
        return grad
    p, c, axes = _first(logits, eps, form)
    axes = axes + [-1, -2] * (iters - 1)
    steps = []
    for dim in axes:
        c, divisor, sums = _scale(c, dim, eps, form)
        steps.append((c, divisor, sums))
    g = grad
    for dim, (c, divisor, sums) in zip(reversed(axes), reversed(steps), strict=True):
        through_sum = (g * c).sum(dim, keepdim=True)
        if form == "exp":  # a clamped sum has no gradient
            through_sum = torch.where(sums >= eps, through_sum, 0.0)
        g = (g - through_sum) / divisor
    if form != "softmax":  # the row maximum of "exp" cancels in the first division: it has no gradient
        return g * p
    return p * (g - (g * p).sum(-1, keepdim=True))


@as_given
def mhc_sinkhorn(h_res: Tensor, iters: int, eps: float, form: str) -> Tensor:
    """Scales logits to a nearly doubly stochastic matrix.

    ::

        form "softmax" (DeepSeek-V4):
            c = softmax(h_res, -1) + eps ;  c = c / (c.sum(-2) + eps)
            repeat iters-1 times:  c = c / (c.sum(-1) + eps) ;  c = c / (c.sum(-2) + eps)
        form "exp" (Megatron):
            c = exp(h_res - rowmax)
            repeat iters times:  c = c / max(c.sum(-1), eps) ;  c = c / max(c.sum(-2), eps)
        form "exp_eps":
            c = exp(h_res)
            repeat iters times:  c = c / (c.sum(-1) + eps) ;  c = c / (c.sum(-2) + eps)

    Args:
        h_res: Logits ``[..., n, n]``.
        iters: Number of iterations; 0 returns a copy of h_res.
        eps: Added to the sums, or their lower bound.
        form: ``"softmax"``, ``"exp"`` or ``"exp_eps"``.

    Returns:
        The matrix ``[..., n, n]`` in h_res's dtype.

    Source: arXiv 2512.24880, equation 19.
    """
    if iters == 0:
        return h_res.clone(memory_format=torch.contiguous_format)
    return output(_sinkhorn(h_res.to(acc_dtype(h_res.dtype)), iters, eps, form), h_res.dtype)


@as_given
def mhc_sinkhorn_backward(grad: Tensor, h_res: Tensor, iters: int, eps: float, form: str) -> Tensor:
    """Computes the gradient of :func:`mhc_sinkhorn` through every iteration.

    The gradient of ``y = c / s(c)``, s(c) the sums, is ``(g - <g, y>) / s``.

    Args:
        grad: Gradient ``[..., n, n]`` of the result.
        h_res: As for :func:`mhc_sinkhorn`.
        iters: As for :func:`mhc_sinkhorn`.
        eps: As for :func:`mhc_sinkhorn`.
        form: As for :func:`mhc_sinkhorn`.

    Returns:
        The gradient of h_res, in its shape and dtype.

    Source: derived from arXiv 2512.24880, equation 19.
    """
    if iters == 0:
        return grad.to(h_res.dtype).clone(memory_format=torch.contiguous_format)
    acc = acc_dtype(h_res.dtype)
    return output(_sinkhorn_backward(grad.to(acc), h_res.to(acc), iters, eps, form), h_res.dtype)


@as_given
def mhc_post(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool) -> Tensor:
    """Adds the sublayer's output to all streams and mixes the streams.

    ``x_out[o] = h_post[o] * f_out + sum_i R[o, i] * x[i]``, with ``R = h_res``, or ``h_res.T`` with transpose_res, or
    the identity if h_res is None.

    Args:
        x: Residual streams ``[..., n, D]``.
        f_out: The sublayer's output ``[..., D]``.
        h_post: Weights ``[..., n]`` of f_out.
        h_res: Mixing matrix ``[..., n, n]``, or None.
        transpose_res: Whether R is ``h_res.T``.

    Returns:
        The new streams ``[..., n, D]`` in x's dtype.

    Source: arXiv 2512.24880, equation 3.
    """
    acc = acc_dtype(x.dtype)
    mixed = x.to(acc)
    if h_res is not None:
        r = h_res.to(acc)
        r = r.transpose(-1, -2) if transpose_res else r
        mixed = _mix(r, mixed)
    return output(h_post.to(acc).unsqueeze(-1) * f_out.to(acc).unsqueeze(-2) + mixed, x.dtype)


def _mix(r: Tensor, x: Tensor) -> Tensor:
    """Returns ``out[o] = sum_i r[o, i] * x[i]`` by n multiply-adds per stream; an n x n matmul per token is slower."""
    n = x.shape[-2]
    out = r[..., :, 0:1] * x[..., 0:1, :]
    for i in range(1, n):
        out = out + r[..., :, i : i + 1] * x[..., i : i + 1, :]
    return out


@as_given
def mhc_post_backward(
    g: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor | None, transpose_res: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_post`.

    ::

        df = sum_o h_post[o] g[o] ; dh_post[o] = <g[o], f_out>
        dR[o, i] = <g[o], x[i]> ; dx[i] = sum_o R[o, i] g[o]

    Args:
        g: Gradient ``[..., n, D]`` of the new streams.
        x: As for :func:`mhc_post`.
        f_out: As for :func:`mhc_post`.
        h_post: As for :func:`mhc_post`.
        h_res: As for :func:`mhc_post`.
        transpose_res: As for :func:`mhc_post`.

    Returns:
        ``(dx, df, dh_post, dh_res)``, each in its input's shape and dtype. dh_res is dR, transposed if R is; it has
        shape [0] if h_res is None.

    Source: derived from arXiv 2512.24880, equation 3.
    """
    acc = acc_dtype(x.dtype)
    g_ = g.to(acc)
    df = output((h_post.to(acc).unsqueeze(-1) * g_).sum(-2), f_out.dtype)
    dh_post = output((g_ * f_out.to(acc).unsqueeze(-2)).sum(-1), h_post.dtype)
    if h_res is None:
        return g.to(x.dtype).clone(memory_format=torch.contiguous_format), df, dh_post, x.new_empty((0,))
    r = h_res.to(acc)
    dx = output(_mix(r if transpose_res else r.transpose(-1, -2), g_), x.dtype)
    left, right = (x.to(acc), g_) if transpose_res else (g_, x.to(acc))
    dh_res = output(torch.matmul(left, right.transpose(-1, -2)), h_res.dtype)
    return dx, df, dh_post, dh_res


@as_given
def mhc_head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collapses the streams with n coefficients only, before the LM head.

    ``h_pre = sigmoid(alpha[0]*z + bias) + hc_eps`` and ``h_in = sum_i h_pre[i] * x[i]``, with z as in :func:`mhc_pre`.

    Args:
        x: Residual streams ``[..., n, D]``.
        phi: Projection ``[n, n*D]``.
        alpha: Scale ``[1]``.
        bias: ``[n]``.
        gamma: Norm weight ``[n, D]``, or None for ones.
        norm_eps: Added to the mean of squares, or to its root.
        hc_eps: Added to h_pre.
        norm_form: See :func:`mhc_pre`.

    Returns:
        ``(h_in, h_pre, h_mix, inv_rms)``: h_in ``[..., D]`` in x's dtype; h_pre and h_mix ``[..., n]`` and inv_rms
        ``[...]`` in the arithmetic's dtype (see :func:`mhc_pre`). The backward needs the last three.

    Source: the pre mapping of arXiv 2512.24880, as DeepSeek-V4 uses it before its LM head.
    """
    v, factor, inv_rms = _norms(x, norm_eps, norm_form)
    h_mix = _project(v, phi, gamma)
    h_pre = torch.sigmoid(_logits(h_mix, factor, alpha, bias, 0, 0, None)) + hc_eps
    return collapse(x, h_pre), h_pre, h_mix, inv_rms


@as_given
def mhc_head_backward(
    dh_in: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    dx_acc: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_head`, by the formulas of :func:`mhc_pre_backward`.

    dh_in is the gradient of h_in, or None for zero; h_pre, h_mix and inv_rms are outputs of :func:`mhc_head`; dx_acc
    (x's shape, or None) is added to dx before its one rounding; the rest are the arguments of :func:`mhc_head`.

    Returns:
        ``(dx, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype; dgamma has shape [0] without gamma.
    """
    d = [head_logit_gradient(collapse_dots(dh_in, x), alpha, bias, h_mix, inv_rms, norm_eps, norm_form)]
    dx, *dparams = coefficients_backward(
        d, dh_in, x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_acc, norm_eps, norm_form
    )
    return output(dx, x.dtype), dparams[0], dparams[1], dparams[2], dparams[3]
