"""Launch plans of the fused mHC ops: the kernels of post and of pre, sharing what the two ops apart could not.

One kernel for post and projection, and one for both gradients of x_out, were measured and are slower (docs/tuning.md).
"""

from __future__ import annotations

from typing import Any

from .plan import (
    contiguous,
    dims,
    empty_grads,
    logit_grads,
    param_grads,
    plan_mhc_post,
    plan_pre,
    post_grads,
    pre_dx,
    unsupported,
    zero_grads,
)

__all__ = ["unsupported"]


def _forward(
    b: Any, post: tuple[Any, ...], transpose_res: bool, params: tuple[Any, ...], floats: tuple[Any, ...], iters: int,
    form: str, has_post: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """post: x, f_out, h_post, h_res; params: phi, alpha, bias, gamma."""
    x, f_out, h_post, h_res = post
    phi, alpha, bias, gamma = params
    x_out = plan_mhc_post(b, x, f_out, h_post, h_res, transpose_res)
    return (x_out, *plan_pre(b, x_out, phi, alpha, bias, gamma, floats, iters, form, has_post))


def plan_mhc_post_pre(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    norm_eps: float, hc_eps: float, post_mult: float, post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float,
    sinkhorn_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    post, params = (x, f_out, h_post, h_res), (phi, alpha, bias, gamma)
    return _forward(b, post, transpose_res, params, floats, sinkhorn_iters, sinkhorn_form, True)


def plan_mhc_post_head(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    norm_eps: float, hc_eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    floats = (norm_eps, hc_eps, 0.0, 0.0, 0.0)
    post, params = (x, f_out, h_post, h_res), (phi, alpha, bias, gamma)
    x_out, h_in, _, _, h_pre, h_mix, inv_rms = _forward(b, post, transpose_res, params, floats, 0, "softmax", False)
    return x_out, h_in, h_pre, h_mix, inv_rms


def _backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_post: Any, dnext_res: Any, post: tuple[Any, ...], transpose_res: bool,
    x_out: Any, params: tuple[Any, ...], h_pre: Any, h_mix: Any, inv_rms: Any, post_mult: float, iters: int,
    sinkhorn_eps: float, form: str, has_post: bool,
) -> tuple[Any, ...]:  # fmt: skip
    s = dims(b, post[0], params[0])
    if b.is_static(s.T) and s.T == 0:
        return zero_grads(b, x_out, *post, *params)
    grads = empty_grads(b, x_out, *post, *params)
    dx, df, dh_post, dh_res, *dparams = grads
    x, f_out, h_post, h_res, phi, alpha, bias, gamma = contiguous(b, *post, *params)
    x_out, h_pre, h_mix, inv_rms, dx_out, dh_in, dnext_post, dnext_res = contiguous(
        b, x_out, h_pre, h_mix, inv_rms, dx_out, dh_in, dnext_post, dnext_res
    )
    d = logit_grads(
        b, s, dh_in, dnext_post, dnext_res, x_out, alpha, bias, h_mix, inv_rms, post_mult, iters, sinkhorn_eps, form,
        has_post,
    )  # fmt: skip
    # The whole gradient of x_out, dx_out added in fp32 and rounded once.
    g = b.empty(b.shape(x_out), b.dtype(x_out))
    pre_dx(b, s, d, dh_in, x_out, phi, gamma, h_pre, dx_out, g)
    post_grads(b, g, x, f_out, h_post, h_res, transpose_res, (dx, df, dh_post, dh_res))
    param_grads(b, s, d, x_out, phi, gamma, tuple(dparams))
    return grads


def plan_mhc_post_pre_backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_post: Any, dnext_res: Any, x: Any, f_out: Any, h_post: Any, h_res: Any,
    transpose_res: bool, x_out: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, next_post: Any, h_mix: Any,
    inv_rms: Any, norm_eps: float, hc_eps: float, post_mult: float, post_eps: float, sinkhorn_iters: int,
    sinkhorn_eps: float, sinkhorn_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    return _backward(
        b, dx_out, dh_in, dnext_post, dnext_res, (x, f_out, h_post, h_res), transpose_res, x_out,
        (phi, alpha, bias, gamma), h_pre, h_mix, inv_rms, post_mult, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, True,
    )  # fmt: skip


def plan_mhc_post_head_backward(
    b: Any, dx_out: Any, dh_in: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, x_out: Any,
    phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any, norm_eps: float, hc_eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    return _backward(
        b, dx_out, dh_in, None, None, (x, f_out, h_post, h_res), transpose_res, x_out, (phi, alpha, bias, gamma),
        h_pre, h_mix, inv_rms, 0.0, 0, 0.0, "softmax", False,
    )  # fmt: skip
