# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the fused mHC ops.

Where it can run, one Gluon kernel computes post and the projection of its result (``gluon.py``). Elsewhere the kernels
of post and of pre run, and share what two separate ops could not. One kernel for both gradients
of x_out was measured and is slower (docs/tuning.md).
"""

from __future__ import annotations

from typing import Any

from .blocks import mhc_blocks_collapse
from .config import BLOCKS_MAXNREG, few, pow2
from .gluon import PostProjectConfig, post_project
from .plan import (
    collapse_dots,
    empty_grads,
    launch_collapse,
    logit_grads,
    param_grads,
    plan_mhc_post,
    plan_pre,
    post_grads,
    pre_dx,
    unsupported,
    zero_grads,
)
from .sizes import Dims, contiguous, dims, pre_outputs
from .slices import mhc_slices_collapse

__all__ = ["unsupported"]


def runs_gluon(b: Any, x: Any, f_out: Any) -> bool:
    """Returns whether the forward of the fused ops runs its Gluon kernel with this builder."""
    return post_project(b, x, f_out) is not None


def _slices(
    b: Any, kernels: Any, c: PostProjectConfig, post: tuple[Any, ...], transpose_res: bool, params: tuple[Any, ...],
    floats: tuple[Any, ...], iters: int, form: str, has_post: bool, norm_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches the fused kernel, then coefficients and collapse.

    The fused kernel projects slices of columns; each slice writes its part of every token's sums.
    """
    s = dims(b, post[0], params[0])
    x_out = b.empty(b.shape(post[0]), b.bf16)
    out = pre_outputs(b, s, b.bf16, has_post)
    if b.is_static(s.T) and s.T == 0:
        return x_out, *out
    x, f_out, h_post, h_res, phi, alpha, bias, gamma = contiguous(b, *post, *params)
    part = launch_post_project(
        b, kernels, c, s, (x, f_out, h_post, h_res, None), transpose_res, phi, gamma, x_out, None
    )
    S = c.slices(s.D)
    if few(b, s.T):
        kernel, constexprs, tokens = mhc_blocks_collapse, dict(NB=c.NB, maxnreg=BLOCKS_MAXNREG), 1
    else:
        kernel, constexprs, tokens = mhc_slices_collapse, {}, 0
    launch_collapse(
        b, kernel, s, c.BC, c.BD, x_out, part, alpha, bias, out, floats, iters, form, {},
        dict(S=S, SP=pow2(S), **constexprs), 1, norm_form, tokens,
    )  # fmt: skip
    return x_out, *out


def launch_post_project(
    b: Any, kernels: Any, c: PostProjectConfig, s: Dims, site: tuple[Any, ...], transpose_res: bool, phi: Any, gamma: Any,
    x_out: Any, h_in: Any,
) -> Any:  # fmt: skip
    """Launches the fused kernel on contiguous tensors, which writes x_out; returns the parts of the sums.

    A part is a slice of columns, or with few tokens a block. site: (x, f_out, h_post, h_res, h_pre). With weights h_pre
    it also writes what they collapse x_out to, to ``h_in``.
    """
    x, f_out, h_post, h_res, h_pre = site
    args = dict(h_post_ptr=h_post, h_res_ptr=h_res, h_pre_ptr=h_pre, phi_ptr=phi, gamma_ptr=gamma, out_ptr=x_out)
    constexprs = dict(
        D=s.D, M=s.M, MP=s.MP, HAS_RES=h_res is not None, TRANSPOSE=transpose_res, COLLAPSE=h_pre is not None,
        HAS_GAMMA=gamma is not None,
    )  # fmt: skip
    x, f_out = b.aligned(x), b.aligned(f_out)
    if few(b, s.T):
        kernel, grid, warps = kernels[1], (s.D // 32, b.cdiv(s.T, 64)), 4
    else:
        S = c.slices(s.D)
        groups = b.min(b.cdiv(s.T, c.NW * 16), max(1, b.device_props().sm_count // S))
        kernel, grid, warps = kernels[0], (S, groups), c.NW
        constexprs.update(NB=c.NB, SL=c.SL, NW=c.NW)
    part = b.empty((grid[0], s.T, s.MP), b.f32)
    b.launch(
        kernel,
        (*grid, 1),
        dict(x_ptr=x, f_ptr=f_out, **args, h_in_ptr=h_in, part_ptr=part, T=s.T),
        constexprs,
        warps,
        1,
    )
    return part


def _forward(
    b: Any, post: tuple[Any, ...], transpose_res: bool, params: tuple[Any, ...], floats: tuple[Any, ...], iters: int,
    form: str, has_post: bool, norm_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches the forward of a fused op. post: (x, f_out, h_post, h_res); params: (phi, alpha, bias, gamma)."""
    x, f_out, h_post, h_res = post
    phi, alpha, bias, gamma = params
    found = post_project(b, x, f_out)
    if found is not None:
        return _slices(b, *found, post, transpose_res, params, floats, iters, form, has_post, norm_form)
    x_out = plan_mhc_post(b, x, f_out, h_post, h_res, transpose_res)
    return (x_out, *plan_pre(b, x_out, phi, alpha, bias, gamma, floats, iters, form, has_post, norm_form))


def plan_mhc_post_pre(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    norm_eps: float, hc_eps: float, post_mult: float, post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float,
    sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_pre``; returns (x_out, h_in, next_post, next_res, h_pre, h_mix, inv_rms)."""
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    post, params = (x, f_out, h_post, h_res), (phi, alpha, bias, gamma)
    return _forward(b, post, transpose_res, params, floats, sinkhorn_iters, sinkhorn_form, True, norm_form)


def plan_mhc_post_head(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    norm_eps: float, hc_eps: float, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_head``; returns (x_out, h_in, h_pre, h_mix, inv_rms)."""
    floats = (norm_eps, hc_eps, 0.0, 0.0, 0.0)
    post, params = (x, f_out, h_post, h_res), (phi, alpha, bias, gamma)
    x_out, h_in, _, _, h_pre, h_mix, inv_rms = _forward(
        b, post, transpose_res, params, floats, 0, "softmax", False, norm_form
    )
    return x_out, h_in, h_pre, h_mix, inv_rms


def _backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_post: Any, dnext_res: Any, post: tuple[Any, ...], transpose_res: bool,
    x_out: Any, params: tuple[Any, ...], h_pre: Any, h_mix: Any, inv_rms: Any, post_mult: float, iters: int,
    sinkhorn_eps: float, form: str, has_post: bool, norm_eps: float, norm_form: str,
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
    dots = collapse_dots(b, s, dh_in, x_out)
    d = logit_grads(
        b, s, dots, dnext_post, dnext_res, x_out, alpha, bias, h_mix, inv_rms, post_mult, iters, sinkhorn_eps, form,
        has_post, norm_eps, norm_form,
    )  # fmt: skip
    # The whole gradient of x_out: dx_out is added in fp32, and the sum is rounded once.
    g = b.empty(b.shape(x_out), b.dtype(x_out))
    pre_dx(b, s, d, dh_in, x_out, phi, gamma, h_pre, dx_out, g)
    post_grads(b, g, x, f_out, h_post, h_res, transpose_res, (dx, df, dh_post, dh_res))
    param_grads(b, s, d, x_out, phi, gamma, tuple(dparams))
    return grads


def plan_mhc_post_pre_backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_post: Any, dnext_res: Any, x: Any, f_out: Any, h_post: Any, h_res: Any,
    transpose_res: bool, x_out: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, next_post: Any, h_mix: Any,
    inv_rms: Any, norm_eps: float, hc_eps: float, post_mult: float, post_eps: float, sinkhorn_iters: int,
    sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_pre_backward``; returns (dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)."""
    return _backward(
        b, dx_out, dh_in, dnext_post, dnext_res, (x, f_out, h_post, h_res), transpose_res, x_out,
        (phi, alpha, bias, gamma), h_pre, h_mix, inv_rms, post_mult, sinkhorn_iters, sinkhorn_eps, sinkhorn_form, True,
        norm_eps, norm_form,
    )  # fmt: skip


def plan_mhc_post_head_backward(
    b: Any, dx_out: Any, dh_in: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, x_out: Any,
    phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any, norm_eps: float, hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_head_backward``; returns (dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)."""
    return _backward(
        b, dx_out, dh_in, None, None, (x, f_out, h_post, h_res), transpose_res, x_out, (phi, alpha, bias, gamma),
        h_pre, h_mix, inv_rms, 0.0, 0, 0.0, "softmax", False, norm_eps, norm_form,
    )  # fmt: skip
