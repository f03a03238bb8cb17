"""mHC's ``post`` followed by ``pre`` or ``head`` of its result, as one op each, in plain PyTorch: the specification.

Composed of the formulas of ``mhc.py``: the forwards give the bits of the two ops apart; the backwards differ from them
in one thing, that the gradient of x_out is not rounded between the two halves.
"""

from __future__ import annotations

from torch import Tensor

from mhc_inductor.reference import mhc
from mhc_inductor.reference.mhc import as_given, coefficients_backward, head_logit_gradient, pre_logit_gradients


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`mhc.mhc_post`, and :func:`mhc.mhc_pre` of its result, which is rounded to x's dtype first.

    ``h_post`` and ``h_res`` belong to the sublayer that made f_out; phi, alpha, bias and gamma to the next one.
    Returns (x_out, h_in, next_post, next_res, h_pre, h_mix, inv_rms).
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_pre(
        x_out, phi, alpha, bias, gamma, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps,
        sinkhorn_form,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`mhc_post_pre`; a gradient of None counts as zero.

    ::

        g = dx_out + dx of mhc_pre_backward(x_out)         # [..., n, D], not rounded
        dx, df, dh_post, dh_res = mhc_post_backward(g)

    Returns (dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma), each in its input's shape and dtype; dh_res
    has shape [0] without h_res, dgamma without gamma.
    """
    d = pre_logit_gradients(
        dh_in, dnext_post, dnext_res, x_out, phi, alpha, bias, h_pre, next_post, h_mix, inv_rms,
        hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps, sinkhorn_form,
    )  # fmt: skip
    return _through_post(
        d, dx_out, dh_in, x, f_out, h_post, h_res, transpose_res, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms
    )


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`mhc.mhc_post`, and :func:`mhc.mhc_head` of its result, which is rounded to x's dtype first.

    Returns (x_out, h_in, h_pre, h_mix, inv_rms).
    """
    x_out = mhc.mhc_post(x, f_out, h_post, h_res, transpose_res)
    return x_out, *mhc.mhc_head(x_out, phi, alpha, bias, gamma, norm_eps, hc_eps)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`mhc_post_head`, by the formulas of :func:`mhc_post_pre_backward`."""
    d = [head_logit_gradient(dh_in, x_out, h_pre, hc_eps)]
    return _through_post(
        d, dx_out, dh_in, x, f_out, h_post, h_res, transpose_res, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms
    )


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradients at the logits of the second half to those of all inputs."""
    g, dphi, dalpha, dbias, dgamma = coefficients_backward(
        d, dh_in, x_out, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_out
    )
    dx, df, dh_post, dh_res = mhc.mhc_post_backward(g, x, f_out, h_post, h_res, transpose_res)
    return dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma
