# SPDX-License-Identifier: Apache-2.0
"""Launch plans of single-pass mHC: coefficients, collapse with given weights, and all between two sublayers in one op.

The weights of a collapse are known before its streams are computed, so no pass waits for a projection. Where it can
run, one Gluon kernel computes post, the collapse and the projection (``gluon.py``); elsewhere post and collapse share
a kernel. In the backward, the logits' gradients come from the op's inputs, and <dh_in, x_out> shares post's pass.
"""

from __future__ import annotations

from typing import Any

from .blocks import mhc_blocks_coefficients
from .config import BLOCKS_MAXNREG, GROUP, GROUPS, coefficients_config, dots_config, few, post_config, pow2, pre_config
from .fused_plan import launch_post_project
from .gluon import post_project
from .plan import (
    empty_grads,
    logit_grads,
    param_grads,
    post,
    post_grads,
    pre_dx,
    project,
    unsupported,
    zero_grads,
)
from .single_pass import mhc_coefficients, mhc_collapse, mhc_collapse_backward
from .sizes import FORMS, OUTSIDE, Dims, contiguous, dims, numel

__all__ = ["unsupported"]

Floats = tuple[float, float, float, float, float]
"""norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps"""


def _outputs(b: Any, s: Dims) -> tuple[Any, ...]:
    """Allocates h_pre, h_post, h_res, h_mix and inv_rms."""
    res = (s.n, s.n) if s.has_res else (0, 0)
    per_token = ((s.n,), (s.n,), res, (s.M,), ())
    return tuple(b.empty((*s.lead, *sizes), b.f32) for sizes in per_token)


def _coefficients(
    b: Any, s: Dims, kernel: Any, programs: Any, part: Any, alpha: Any, bias: Any, out: tuple[Any, ...], floats: Floats,
    iters: int, form: str, norm_form: str, args: dict[str, Any], constexprs: dict[str, Any],
) -> None:  # fmt: skip
    """Launches a kernel that computes the coefficients ``out`` from the projection's parts.

    ``args`` and ``constexprs`` are those that only this kernel takes.
    """
    h_pre, h_post, h_res, h_mix, inv_rms = out
    r = coefficients_config(s.n)
    names = ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_eps")
    b.launch(
        kernel,
        (programs, 1, 1),
        dict(
            part_ptr=part, alpha_ptr=alpha, bias_ptr=bias, h_pre_ptr=h_pre, h_post_ptr=h_post,
            h_res_ptr=h_res if s.has_res else None, h_mix_ptr=h_mix, inv_ptr=inv_rms, T=s.T, **args,
            **dict(zip(names, floats, strict=True)),
        ),
        dict(
            M=s.M, MP=s.MP, **constexprs, BC=r.BC, HAS_RES=s.has_res, ITERS=iters if s.has_res else 0, FORM=FORMS[form],
            OUTSIDE=OUTSIDE[norm_form],
        ),
        r.num_warps, 1,
    )  # fmt: skip


def _of_parts(
    b: Any, s: Dims, part: Any, RUN: Any, groups: int, group: int, alpha: Any, bias: Any, out: tuple[Any, ...],
    floats: Floats, iters: int, form: str, norm_form: str,
) -> None:  # fmt: skip
    """Launches the coefficients ``out`` from ``groups`` groups of parts."""
    _coefficients(
        b, s, mhc_coefficients, b.cdiv(s.T, coefficients_config(s.n).BC), part, alpha, bias, out, floats, iters, form,
        norm_form, dict(RUN=RUN), dict(K=s.K, N=s.n, NP=s.NP, GROUPS=groups, GROUP=group),
    )  # fmt: skip


def _of_streams(
    b: Any, s: Dims, x: Any, params: tuple[Any, ...], out: tuple[Any, ...], floats: Floats, iters: int, form: str,
    norm_form: str,
) -> None:  # fmt: skip
    """Launches the projection of contiguous streams, and the coefficients ``out`` that follow from it."""
    phi, alpha, bias, gamma = params
    c = pre_config(b.device_props(), s.K, s.D, s.MP, b.dtype(x) == b.bf16)
    part, RUN = project(b, s, c, x, phi, gamma)
    _of_parts(b, s, part, RUN, GROUPS, GROUP, alpha, bias, out, floats, iters, form, norm_form)


def plan_mhc_coefficients(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_coefficients``; returns (h_pre, h_post, h_res, h_mix, inv_rms)."""
    s = dims(b, x, phi)
    out = _outputs(b, s)
    if b.is_static(s.T) and s.T == 0:
        return out
    x, *params = contiguous(b, x, phi, alpha, bias, gamma)
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    _of_streams(b, s, x, tuple(params), out, floats, sinkhorn_iters, sinkhorn_form, norm_form)
    return out


def plan_mhc_coefficients_backward(
    b: Any, dh_pre: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_post: Any, h_mix: Any, inv_rms: Any, dx_acc: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_coefficients_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    s = dims(b, x, phi)
    params = (phi, alpha, bias, gamma)
    if b.is_static(s.T) and s.T == 0:
        return zero_grads(b, x, x, *params)
    dx, *dparams = empty_grads(b, x, x, *params)
    x, phi, alpha, bias, gamma, h_mix, inv_rms, dh_pre, dh_post, dh_res, dx_acc = contiguous(
        b, x, *params, h_mix, inv_rms, dh_pre, dh_post, dh_res, dx_acc
    )
    d = logit_grads(
        b, s, dh_pre, dh_post, dh_res, x, alpha, bias, h_mix, inv_rms, post_mult, sinkhorn_iters, sinkhorn_eps,
        sinkhorn_form, True, norm_eps, norm_form,
    )  # fmt: skip
    pre_dx(b, s, d, None, x, phi, gamma, None, dx_acc, dx)
    param_grads(b, s, d, x, phi, gamma, tuple(dparams))
    return dx, *dparams


def plan_mhc_collapse(b: Any, x: Any, h_pre: Any) -> Any:
    """Launches ``mhc_collapse``; returns h_in."""
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    T = numel(lead)
    h_in = b.empty((*lead, D), b.dtype(x))
    if b.is_static(T) and T == 0:
        return h_in
    x, h_pre = contiguous(b, x, h_pre)
    c = post_config(D, n)
    b.launch(
        mhc_collapse, (T * (-(-D // c.BD)), 1, 1), dict(x_ptr=x, h_pre_ptr=h_pre, h_in_ptr=h_in, T=T),
        dict(D=D, N=n, BD=c.BD), c.num_warps, 1,
    )  # fmt: skip
    return h_in


def plan_mhc_collapse_backward(b: Any, dh_in: Any, x: Any, h_pre: Any) -> tuple[Any, ...]:
    """Launches ``mhc_collapse_backward``; returns (dx, dh_pre)."""
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    T = numel(lead)
    dx, dh_pre = empty_grads(b, x, x, h_pre)
    if b.is_static(T) and T == 0:
        return dx, dh_pre
    dh_in, x, h_pre = contiguous(b, dh_in, x, h_pre)
    c = dots_config(D, n)
    b.launch(
        mhc_collapse_backward, (T, 1, 1),
        dict(dh_in_ptr=dh_in, x_ptr=x, h_pre_ptr=h_pre, dx_ptr=dx, dh_pre_ptr=dh_pre),
        dict(D=D, N=n, BD=c.BD), c.num_warps, 1,
    )  # fmt: skip
    return dx, dh_pre


def plan_mhc_single_pass(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, h_pre: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any,
    gamma: Any, norm_eps: float, hc_eps: float, post_mult: float, post_eps: float, sinkhorn_iters: int,
    sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_single_pass``; returns (x_out, h_in, next_pre, next_post, next_res, h_mix, inv_rms)."""
    s = dims(b, x, phi)
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    out = _outputs(b, s)
    found = post_project(b, x, f_out, collapse=True)
    if found is None:
        x_out, h_in = post(b, x, f_out, h_post, h_res, h_pre, transpose_res)
        if not (b.is_static(s.T) and s.T == 0):
            params = contiguous(b, phi, alpha, bias, gamma)
            _of_streams(b, s, x_out, params, out, floats, sinkhorn_iters, sinkhorn_form, norm_form)
        return x_out, h_in, *out
    x_out, h_in = b.empty(b.shape(x), b.bf16), b.empty((*s.lead, s.D), b.bf16)
    if not (b.is_static(s.T) and s.T == 0):
        site = contiguous(b, x, f_out, h_post, h_res, h_pre)
        phi, alpha, bias, gamma = contiguous(b, phi, alpha, bias, gamma)
        part = launch_post_project(b, *found, s, site, transpose_res, phi, gamma, x_out, h_in)
        S = found[1].slices(s.D)
        how = alpha, bias, out, floats, sinkhorn_iters, sinkhorn_form, norm_form
        if few(b, s.T):
            _coefficients(
                b, s, mhc_blocks_coefficients, s.T, part, *how, {},
                dict(D=s.D, NB=found[1].NB, S=S, SP=pow2(S), maxnreg=BLOCKS_MAXNREG),
            )  # fmt: skip
        else:
            _of_parts(b, s, part, S, S, S, *how)
    return x_out, h_in, *out


def plan_mhc_single_pass_backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_pre: Any, dnext_post: Any, dnext_res: Any, x: Any, f_out: Any, h_post: Any,
    h_res: Any, h_pre: Any, transpose_res: bool, x_out: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, next_pre: Any,
    next_post: Any, h_mix: Any, inv_rms: Any, norm_eps: float, hc_eps: float, post_mult: float, post_eps: float,
    sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_single_pass_backward``.

    Returns (dx, df, dh_post, dh_res, dh_pre, dphi, dalpha, dbias, dgamma).
    """
    s = dims(b, x, phi)
    inputs = (x, f_out, h_post, h_res, h_pre, phi, alpha, bias, gamma)
    if b.is_static(s.T) and s.T == 0:
        return zero_grads(b, x, *inputs)
    grads = empty_grads(b, x, *inputs)
    dx, df, dh_post, dh_res, dh_pre, *dparams = grads
    if dh_in is None:
        dh_pre = b.zeros(b.shape(h_pre), b.dtype(h_pre))
    x, f_out, h_post, h_res, h_pre, phi, alpha, bias, gamma = contiguous(b, *inputs)
    x_out, h_mix, inv_rms, dx_out, dh_in, dnext_pre, dnext_post, dnext_res = contiguous(
        b, x_out, h_mix, inv_rms, dx_out, dh_in, dnext_pre, dnext_post, dnext_res
    )
    d = logit_grads(
        b, s, dnext_pre, dnext_post, dnext_res, x_out, alpha, bias, h_mix, inv_rms, post_mult, sinkhorn_iters,
        sinkhorn_eps, sinkhorn_form, True, norm_eps, norm_form,
    )  # fmt: skip
    # The whole gradient of x_out, rounded once.
    g = b.empty(b.shape(x_out), b.dtype(x_out))
    pre_dx(b, s, d, dh_in, x_out, phi, gamma, h_pre, dx_out, g)
    post_grads(b, g, x, f_out, h_post, h_res, transpose_res, (dx, df, dh_post, dh_res), dh_in, dh_pre)
    param_grads(b, s, d, x_out, phi, gamma, tuple(dparams))
    return dx, df, dh_post, dh_res, dh_pre, *dparams
