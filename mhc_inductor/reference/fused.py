# SPDX-License-Identifier: Apache-2.0
"""The fused mHC ops in plain PyTorch: ``post``, and ``pre`` or ``head`` of its result. The specification.

They are composed of the formulas of ``mhc.py``. The forwards give the same bits as the two separate ops. The backwards
differ from those in one respect: the gradient of x_out is not rounded between the two halves.
"""

from __future__ import annotations

from torch import Tensor

from mhc_inductor.reference import mhc
from mhc_inductor.reference.mhc import (
    coefficients_backward,
    collapse_dots,
    head_logit_gradient,
    pre_logit_gradients,
)
from mhc_inductor.reference.precision import as_given


@as_given
def mhc_post_pre(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes :func:`mhc.mhc_post`, then :func:`mhc.mhc_pre` of its result, which is rounded to x's dtype first.

    Args:
        x: Residual streams ``[..., n, D]``.
        f_out: The sublayer's output ``[..., D]``.
        h_post: Weights ``[..., n]`` of the sublayer that computed f_out.
        h_res: Mixing matrix ``[..., n, n]`` of that sublayer, or None for the identity.
        transpose_res: Whether R is ``h_res.T`` instead of h_res.
        phi: Projection of the next sublayer, as for :func:`mhc.mhc_pre`; so are the remaining arguments.
        alpha: Scales of the next sublayer.
        bias: Biases of the next sublayer.
        gamma: Norm weight of the next sublayer, or None.
        norm_eps: See :func:`mhc.mhc_pre`.
        hc_eps: See :func:`mhc.mhc_pre`.
        post_mult: See :func:`mhc.mhc_pre`.
        post_eps: See :func:`mhc.mhc_pre`.
        sinkhorn_iters: See :func:`mhc.mhc_pre`.
        sinkhorn_eps: See :func:`mhc.mhc_pre`.
        sinkhorn_form: See :func:`mhc.mhc_pre`.
        norm_form: See :func:`mhc.mhc_pre`.

    Returns:
        ``(x_out, h_in, next_post, next_res, h_pre, h_mix, inv_rms)``: the output of :func:`mhc.mhc_post`, then the
        outputs of :func:`mhc.mhc_pre`.

    Source: arXiv 2512.24880, equations 3 and 14 to 19.
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_pre(
        x_out, phi, alpha, bias, gamma, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps,
        sinkhorn_form, norm_form,
    )  # fmt: skip


@as_given
def mhc_post_pre_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    dnext_post: Tensor | None,
    dnext_res: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    next_post: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    post_eps: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
    sinkhorn_form: str,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_post_pre`; a gradient of None counts as zero.

    ::

        g = dx_out + dx of mhc_pre_backward(x_out)         # [..., n, D], not rounded
        dx, df, dh_post, dh_res = mhc_post_backward(g)

    dx_out, dh_in, dnext_post and dnext_res are the gradients of the first four outputs; x_out, h_pre, next_post, h_mix
    and inv_rms are outputs of :func:`mhc_post_pre`; the rest are its arguments.

    Returns:
        ``(dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype. dh_res has
        shape [0] without h_res, dgamma without gamma.

    Source: derived from arXiv 2512.24880, equations 3 and 14 to 19.
    """
    d = pre_logit_gradients(
        collapse_dots(dh_in, x_out), dnext_post, dnext_res, phi, alpha, bias, h_pre, h_mix, inv_rms,
        norm_eps, post_mult, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, norm_form,
    )  # fmt: skip
    return _through_post(
        d, dx_out, dh_in, x, f_out, h_post, h_res, transpose_res, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms,
        norm_eps, norm_form,
    )  # fmt: skip


@as_given
def mhc_post_head(
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes :func:`mhc.mhc_post`, then :func:`mhc.mhc_head` of its result, which is rounded to x's dtype first.

    The arguments up to transpose_res are those of :func:`mhc.mhc_post`, the others those of :func:`mhc.mhc_head`.

    Returns:
        ``(x_out, h_in, h_pre, h_mix, inv_rms)``: the output of :func:`mhc.mhc_post`, then those of
        :func:`mhc.mhc_head`.

    Source: arXiv 2512.24880, equation 3, and the head as in :func:`mhc.mhc_head`.
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_head(x_out, phi, alpha, bias, gamma, norm_eps, hc_eps, norm_form)


@as_given
def mhc_post_head_backward(
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    norm_eps: float,
    hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`mhc_post_head`, by the formulas of :func:`mhc_post_pre_backward`.

    dx_out and dh_in, each of which may be None for zero, are the gradients of the first two outputs; x_out, h_pre,
    h_mix and inv_rms are outputs of :func:`mhc_post_head`; the rest are its arguments.

    Returns:
        ``(dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)``, each in its input's shape and dtype. dh_res has
        shape [0] without h_res, dgamma without gamma.
    """
    d = [head_logit_gradient(collapse_dots(dh_in, x_out), alpha, bias, h_mix, inv_rms, norm_eps, norm_form)]
    return _through_post(
        d, dx_out, dh_in, x, f_out, h_post, h_res, transpose_res, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms,
        norm_eps, norm_form,
    )  # fmt: skip


def _through_post(
    d: list[Tensor],
    dx_out: Tensor | None,
    dh_in: Tensor | None,
    x: Tensor,
    f_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transpose_res: bool,
    x_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    h_pre: Tensor,
    h_mix: Tensor,
    inv_rms: Tensor,
    norm_eps: float,
    norm_form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of all inputs from those of the second half's logits."""
    g, dphi, dalpha, dbias, dgamma = coefficients_backward(
        d, dh_in, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_out, norm_eps, norm_form
    )
    dx, df, dh_post, dh_res = mhc.mhc_post_backward(g, x, f_out, h_post, h_res, transpose_res)
    return dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma
