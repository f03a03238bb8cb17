# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880) in plain PyTorch: the specification.

The functions ``mhc_*`` have the name, the arguments and the outputs of the op ``torch.ops.mhc_inductor.<name>``.
Tensors: ``x[..., n, D]`` are residual streams with any leading dimensions; m is the number of rows of ``phi``. The
arithmetic is fp32 (fp64 if x is fp64), and only results in an input's dtype are rounded, once. Nothing here uses
autograd: the backward functions are closed forms, so Inductor can trace and fuse the whole file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype as acc_dtype
from mhc_inductor.reference.precision import as_given as as_given


class Site(NamedTuple):
    """The parameters of a sublayer's coefficients, of which there are m a token."""

    phi: Tensor
    """Projection ``[m, n*D]``, m = n*n + 2n, or 2n for no residual coefficients, or n for a head."""
    alpha: Tensor
    """A scale for each kind of coefficient: ``[3]``, ``[2]`` or ``[1]``."""
    bias: Tensor
    """``[m]``."""
    gamma: Tensor | None
    """Norm weight ``[n, D]``, or None for ones."""


class Options(NamedTuple):
    """The numbers and forms of a sublayer's coefficients, in the order of the ops' arguments."""

    norm_eps: float
    """Added to the mean of squares, or to its root."""
    hc_eps: float
    """Added to h_pre."""
    post_mult: float = 2.0
    """Factor of h_post's sigmoid."""
    post_eps: float = 0.0
    """Added to h_post."""
    sinkhorn_iters: int = 0
    """Number of iterations, see :func:`mhc_sinkhorn`; 0 for the raw logits."""
    sinkhorn_eps: float = 1e-6
    """See :func:`mhc_sinkhorn`."""
    sinkhorn_form: str = "softmax"
    """See :func:`mhc_sinkhorn`."""
    norm_form: str = "inside"
    """``"inside"`` adds norm_eps under the root, ``"outside"`` to the root."""


class Saved(NamedTuple):
    """What a backward needs of the forward, in the arithmetic's dtype."""

    h_pre: Tensor
    """The weights ``[..., n]`` with which the streams were collapsed."""
    h_mix: Tensor
    """``[..., m]``."""
    inv_rms: Tensor
    """``[...]``, see :func:`mhc_pre`."""


def _norms(x: Tensor, o: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``v = vec(x)`` [..., n*D] in the arithmetic's dtype, the factor of z [...], and what backward saves of it.

    That is the factor itself, or ``rms`` for the form "outside": ``1 / factor - eps`` would lose the digits of a small rms.
    """
    v = x.flatten(-2).to(acc_dtype(x.dtype))
    mean = (v * v).mean(-1)
    inv_rms = torch.rsqrt(mean + o.norm_eps) if o.norm_form == "inside" else torch.sqrt(mean)
    return v, _norm_factor(inv_rms, o), inv_rms


def _norm_factor(inv_rms: Tensor, o: Options) -> Tensor:
    """Returns the factor of z from the output ``inv_rms`` of a forward."""
    return inv_rms if o.norm_form == "inside" else 1 / (inv_rms + o.norm_eps)


def _norm_slope(dinv: Tensor, factor: Tensor, inv_rms: Tensor, norm_form: str) -> Tensor:
    """Returns c [...] of ``dv = -c / (n*D) * v``, the gradient through the factor of z; 0 where all of v is 0."""
    if norm_form == "inside":
        return dinv * factor**3
    return torch.where(inv_rms > 0, dinv * factor * (factor / inv_rms), 0.0)


def _logits(h_mix: Tensor, factor: Tensor, site: Site, part: int, first: int, last: int | None) -> Tensor:
    """Returns ``alpha[part] * z + bias`` for the rows ``first`` to ``last`` of phi, where the forward's logits are."""
    z = h_mix[..., first:last] * factor.unsqueeze(-1)
    return site.alpha[part].to(z.dtype) * z + site.bias[first:last].to(z.dtype)


def _project(v: Tensor, site: Site) -> Tensor:
    """Returns ``h_mix = (v * vec(gamma)) @ phi.T`` [..., m]."""
    weighted = v if site.gamma is None else v * site.gamma.flatten().to(v.dtype)
    return torch.matmul(weighted, site.phi.to(v.dtype).t())


def collapse(x: Tensor, h_pre: Tensor) -> Tensor:
    """Returns ``h_in = sum_i h_pre[i] * x[i]`` [..., D] in x's dtype."""
    acc = acc_dtype(x.dtype)
    return output((h_pre.to(acc).unsqueeze(-1) * x.to(acc)).sum(-2), x.dtype)


def output(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``t`` in an output's dtype and contiguous; elementwise operations alone would keep x's strides."""
    return t.to(dtype).contiguous()


def coefficients(x: Tensor, site: Site, o: Options) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns h_pre, h_post, h_res, h_mix and inv_rms of :func:`mhc_pre`."""
    n = x.shape[-2]
    v, factor, inv_rms = _norms(x, o)
    h_mix = _project(v, site)
    h_pre = torch.sigmoid(_logits(h_mix, factor, site, 0, 0, n)) + o.hc_eps
    h_post = o.post_mult * torch.sigmoid(_logits(h_mix, factor, site, 1, n, 2 * n)) + o.post_eps
    if site.phi.shape[0] == 2 * n:
        h_res = h_mix.new_empty((*x.shape[:-2], 0, 0))
    else:
        logits = _logits(h_mix, factor, site, 2, 2 * n, None).unflatten(-1, (n, n))
        h_res = _sinkhorn(logits, *o[4:7])
    return h_pre, h_post, h_res, h_mix, inv_rms


@as_given
def mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *options: Any
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
        *options: The fields of :class:`Options`.

    Returns:
        ``(h_in, h_post, h_res, h_pre, h_mix, inv_rms)``: h_in ``[..., D]`` in x's dtype; h_post and h_pre ``[..., n]``,
        h_res ``[..., n, n]`` (``[..., 0, 0]`` if phi has 2n rows), h_mix ``[..., m]`` and inv_rms ``[...]`` in the
        arithmetic's dtype. The backward needs the last three. With ``norm_form="outside"`` the last is the root
        ``rms = sqrt(mean(v*v))``, from which 1 / (rms + norm_eps) and its gradient follow without a loss of digits.

    Source: arXiv 2512.24880, equations 14 to 19.
    """
    site, o = Site(phi, alpha, bias, gamma), Options(*options)
    h_pre, h_post, h_res, h_mix, inv_rms = coefficients(x, site, o)
    return collapse(x, h_pre), h_post, h_res, h_pre, h_mix, inv_rms


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""dx, dphi, dalpha, dbias and dgamma."""


@as_given
def mhc_pre_backward(
    dh_in: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None, x: Tensor, *rest: Any
) -> Gradients:
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

    dh_in, dh_post and dh_res are the gradients of the first three outputs of :func:`mhc_pre`, each of which may be None.
    The other arguments: phi, alpha, bias and gamma; h_pre, h_post, h_mix and inv_rms, outputs of :func:`mhc_pre`; dx_acc
    (x's shape, or None), which is added to dx before its one rounding; and the options.

    Returns:
        ``(dx, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype; dgamma has shape [0] without gamma.

    Source: derived from arXiv 2512.24880, equations 14 to 19.
    """
    h_pre, _, *others, dx_acc = rest[4:9]
    dh, saved = (collapse_dots(dh_in, x), dh_post, dh_res), Saved(h_pre, *others)
    return rounded(x, backward(dh, dh_in, x, Site(*rest[:4]), saved, dx_acc, Options(*rest[9:])))


def rounded(x: Tensor, grads: Gradients) -> Gradients:
    """Returns the results of :func:`backward` with dx in the dtype of x."""
    return output(grads[0], x.dtype), *grads[1:]


def _logit_gradients(
    dh: Sequence[Tensor | None], site: Site, n: int, h_mix: Tensor, factor: Tensor, o: Options
) -> list[Tensor]:
    """Returns ``d_pre, d_post, d_res`` of :func:`mhc_pre_backward`, as many as alpha has elements."""
    m = site.phi.shape[0]
    d = [_gate_gradient(dh[0], _logits(h_mix, factor, site, 0, 0, n), 1.0)]
    if m != n:
        d.append(_gate_gradient(dh[1], _logits(h_mix, factor, site, 1, n, 2 * n), o.post_mult))
    if m not in (n, 2 * n):
        logits = _logits(h_mix, factor, site, 2, 2 * n, None).unflatten(-1, (n, n))
        grad = dh[2]
        d_res = torch.zeros_like(logits) if grad is None else _sinkhorn_backward(grad.to(logits.dtype), logits, *o[4:7])
        d.append(d_res.flatten(-2))
    return d


def collapse_dots(dh_in: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns ``dh_pre[i] = <dh_in, x[i]>`` [..., n] in the arithmetic's dtype, or None without ``dh_in``."""
    if dh_in is None:
        return None
    acc = acc_dtype(x.dtype)
    return (dh_in.to(acc).unsqueeze(-2) * x.to(acc)).sum(-1)


def _gate_gradient(grad: Tensor | None, logits: Tensor, scale: float) -> Tensor:
    """Returns the gradient at the logits from that of ``scale * sigmoid(logits)`` plus a constant."""
    if grad is None:
        return torch.zeros_like(logits)
    return grad.to(logits.dtype) * (scale * torch.sigmoid(logits) * torch.sigmoid(-logits))


def backward(
    dh: Sequence[Tensor | None], dh_in: Tensor | None, x: Tensor, site: Site, saved: Saved, dx_acc: Any, o: Options
) -> Gradients:
    """Returns the gradients of :func:`mhc_pre_backward`; dx is not rounded yet.

    ``dh`` are the gradients of h_pre, h_post and h_res, of h_pre alone for a head; dh_in is that of the streams, collapsed
    with the saved h_pre. None counts as zero.
    """
    h_pre, h_mix, inv_rms = saved
    (phi, alpha, bias, gamma), acc = site, h_pre.dtype
    m, width = phi.shape[0], phi.shape[1]
    factor = _norm_factor(inv_rms, o)
    d = _logit_gradients(dh, site, h_pre.shape[-1], h_mix, factor, o)
    phi_, scale = phi.to(acc), alpha.to(acc)
    flat = torch.cat(d, -1)
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
    dv = dv - (_norm_slope(dinv, factor, inv_rms, o.norm_form) / width).unsqueeze(-1) * v
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

    grad ``[..., n, n]`` is the gradient of the result; the rest are the arguments of :func:`mhc_sinkhorn`.

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

    g ``[..., n, D]`` is the gradient of the new streams; the rest are the arguments of :func:`mhc_post`.

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


def head_options(norm_eps: float, hc_eps: float, norm_form: str = "inside") -> Options:
    """Returns the options of a head, which has no others."""
    return Options(norm_eps, hc_eps, norm_form=norm_form)


@as_given
def mhc_head(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Collapses the streams with n coefficients only, before the LM head.

    ``h_pre = sigmoid(alpha[0]*z + bias) + hc_eps`` and ``h_in = sum_i h_pre[i] * x[i]``, with z as in :func:`mhc_pre`.

    Args:
        x: Residual streams ``[..., n, D]``.
        phi: Projection ``[n, n*D]``.
        alpha: Scale ``[1]``.
        bias: ``[n]``.
        gamma: Norm weight ``[n, D]``, or None for ones.
        *options: norm_eps, hc_eps and norm_form of :class:`Options`.

    Returns:
        ``(h_in, h_pre, h_mix, inv_rms)``: h_in ``[..., D]`` in x's dtype; h_pre and h_mix ``[..., n]`` and inv_rms
        ``[...]`` in the arithmetic's dtype (see :func:`mhc_pre`). The backward needs the last three.

    Source: the pre mapping of arXiv 2512.24880, as DeepSeek-V4 uses it before its LM head.
    """
    site, o = Site(phi, alpha, bias, gamma), head_options(*options)
    v, factor, inv_rms = _norms(x, o)
    h_mix = _project(v, site)
    h_pre = torch.sigmoid(_logits(h_mix, factor, site, 0, 0, None)) + o.hc_eps
    return collapse(x, h_pre), h_pre, h_mix, inv_rms


@as_given
def mhc_head_backward(dh_in: Tensor | None, x: Tensor, *rest: Any) -> Gradients:
    """Computes the gradients of :func:`mhc_head`, by the formulas of :func:`mhc_pre_backward`.

    dh_in is the gradient of h_in, or None for zero. The other arguments: phi, alpha, bias and gamma; h_pre, h_mix and
    inv_rms, outputs of :func:`mhc_head`; dx_acc (x's shape, or None), which is added to dx before its one rounding; and
    the options.

    Returns:
        ``(dx, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype; dgamma has shape [0] without gamma.
    """
    site, saved, o = Site(*rest[:4]), Saved(*rest[4:7]), head_options(*rest[8:])
    return rounded(x, backward([collapse_dots(dh_in, x)], dh_in, x, site, saved, rest[7], o))
