# SPDX-License-Identifier: Apache-2.0
"""The calls that rows measure, made with this package: direct op calls, and a compiled training step."""

from __future__ import annotations

from collections.abc import Callable

import torch

import mhc_inductor

from .fused import PostPre
from .peers import HC_EPS, NORM_EPS, POST_EPS, POST_MULT, SINKHORN_EPS, Inputs

FORM = "softmax"
Named = dict[str, torch.Tensor]
_ops = torch.ops.mhc_inductor


def ops_pre(i: Inputs) -> Named:
    tail = (NORM_EPS, HC_EPS, POST_MULT, POST_EPS, i.iters, SINKHORN_EPS, FORM)
    outs = _ops.mhc_pre(i.x, i.phi, i.alpha, i.bias, i.gamma, *tail)
    return dict(zip(("h_in", "h_post", "h_res", "h_pre", "h_mix", "inv_rms"), outs, strict=True))


def ops_post(i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Named:
    return {"x_out": _ops.mhc_post(i.x, i.f_out, h_post, h_res, i.transpose_res)}


def ops_fb(i: Inputs) -> Named:
    """Runs forward and backward as a compiled graph does: the backward of pre adds the dx of post."""
    out = ops_pre(i)
    dx_acc, dh_post, dh_res = None, i.dh_post, i.dh_res
    if i.dx_out is not None:
        out.update(ops_post(i, out["h_post"], out["h_res"]))
        dx_acc, out["df"], dh_post, dh_res = _ops.mhc_post_backward(
            i.dx_out, i.x, i.f_out, out["h_post"], out["h_res"], i.transpose_res
        )
    grads = _ops.mhc_pre_backward(
        i.dh_in,
        dh_post,
        dh_res,
        i.x,
        i.phi,
        i.alpha,
        i.bias,
        i.gamma,
        *(out[k] for k in ("h_pre", "h_post", "h_mix", "inv_rms")),
        dx_acc,
        *(NORM_EPS, HC_EPS, POST_MULT, POST_EPS, i.iters, SINKHORN_EPS, FORM),
    )
    out.update(zip(("dx", "dphi", "dalpha", "dbias", "dgamma"), grads, strict=True))
    if i.gamma is None:
        del out["dgamma"]
    return out


_OPTIONS = (NORM_EPS, HC_EPS, POST_MULT, POST_EPS)
_AFTER = ("h_in", "next_post", "next_res", "h_pre", "h_mix", "inv_rms")
_POST_GRADS = ("dx", "df", "dh_post", "dh_res")


def ops_post_pre(p: PostPre, fused: bool = True) -> Named:
    """Runs post and the next pre, by the fused op or by the two ops."""
    i = p.inputs
    post, params = (i.x, i.f_out, p.h_post, p.h_res, i.transpose_res), (i.phi, i.alpha, i.bias, i.gamma)
    tail = (*_OPTIONS, i.iters, SINKHORN_EPS, FORM)
    if fused:
        return dict(zip(("x_out", *_AFTER), _ops.mhc_post_pre(*post, *params, *tail), strict=True))
    x_out = _ops.mhc_post(*post)
    return {"x_out": x_out, **dict(zip(_AFTER, _ops.mhc_pre(x_out, *params, *tail), strict=True))}


def ops_post_pre_fb(p: PostPre, fused: bool = True) -> Named:
    """Runs post and the next pre with all gradients: the fused op, or the two ops as a compiled graph calls them."""
    out, i = ops_post_pre(p, fused), p.inputs
    post, params = (i.x, i.f_out, p.h_post, p.h_res, i.transpose_res), (i.phi, i.alpha, i.bias, i.gamma)
    ups, tail = (i.dh_in, p.dnext_post, p.dnext_res), (*_OPTIONS, i.iters, SINKHORN_EPS, FORM)
    saved = [out[k] for k in ("h_pre", "next_post", "h_mix", "inv_rms")]
    if fused:
        grads = _ops.mhc_post_pre_backward(i.dx_out, *ups, *post, out["x_out"], *params, *saved, *tail)
    else:
        g, *dparams = _ops.mhc_pre_backward(*ups, out["x_out"], *params, *saved, i.dx_out, *tail)
        grads = (*_ops.mhc_post_backward(g, *post), *dparams)
    out.update(zip((*_POST_GRADS, "dphi", "dalpha", "dbias"), grads[:7], strict=True))
    return out


_COEFFICIENTS = ("next_pre", "next_post", "next_res", "h_mix", "inv_rms")


def ops_single_pass(p: PostPre, fused: bool = True) -> Named:
    """Runs everything between two sublayers of single-pass mHC, by one op or by its parts."""
    i = p.inputs
    params, tail = (i.phi, i.alpha, i.bias, i.gamma), (*_OPTIONS, i.iters, SINKHORN_EPS, FORM)
    if fused:
        out = _ops.mhc_single_pass(i.x, i.f_out, p.h_post, p.h_res, p.h_pre, i.transpose_res, *params, *tail)
        return dict(zip(("x_out", "h_in", *_COEFFICIENTS), out, strict=True))
    x_out = _ops.mhc_post(i.x, i.f_out, p.h_post, p.h_res, i.transpose_res)
    rest = dict(zip(_COEFFICIENTS, _ops.mhc_coefficients(x_out, *params, *tail), strict=True))
    return {"x_out": x_out, "h_in": _ops.mhc_collapse(x_out, p.h_pre), **rest}


def ops_single_pass_fb(p: PostPre, fused: bool = True) -> Named:
    """Runs the same with all gradients; the parts as a compiled graph calls them."""
    out, i = ops_single_pass(p, fused), p.inputs
    params, tail = (i.phi, i.alpha, i.bias, i.gamma), (*_OPTIONS, i.iters, SINKHORN_EPS, FORM)
    ups = (p.dnext_pre, p.dnext_post, p.dnext_res)
    saved = [out[k] for k in ("next_pre", "next_post", "h_mix", "inv_rms")]
    if fused:
        site = (i.x, i.f_out, p.h_post, p.h_res, p.h_pre, i.transpose_res)
        grads = _ops.mhc_single_pass_backward(
            i.dx_out, i.dh_in, *ups, *site, out["x_out"], *params, *saved, *tail
        )  # fmt: skip
    else:
        dx, dh_pre = _ops.mhc_collapse_backward(i.dh_in, out["x_out"], p.h_pre)
        g, *dparams = _ops.mhc_coefficients_backward(*ups, out["x_out"], *params, *saved, dx + i.dx_out, *tail)
        dpost = _ops.mhc_post_backward(g, i.x, i.f_out, p.h_post, p.h_res, i.transpose_res)
        grads = (*dpost, dh_pre, *dparams)
    out.update(zip((*_POST_GRADS, "dh_pre", "dphi", "dalpha", "dbias"), grads[:8], strict=True))
    return out


def _forward(x, phi, alpha, bias, gamma, f_out, iters, transpose_res, with_post):  # type: ignore[no-untyped-def]
    h_in, h_post, h_res = mhc_inductor.mhc_pre(
        x, phi, alpha, bias, gamma, sinkhorn_iters=iters, sinkhorn_form=FORM, norm_eps=NORM_EPS, hc_eps=HC_EPS
    )
    if not with_post:
        return h_in, h_post, h_res
    return h_in, mhc_inductor.mhc_post(x, f_out, h_post, h_res, transpose_res=transpose_res)


def autograd_fb(compiled: bool) -> Callable[[Inputs], Named]:
    """Returns forward and backward through the public functions, compiled by the package's backend or eager."""
    forward = torch.compile(_forward, backend="mhc_inductor", dynamic=False, fullgraph=True) if compiled else _forward

    def fb(i: Inputs) -> Named:
        outs = forward(i.x, i.phi, i.alpha, i.bias, i.gamma, i.f_out, i.iters, i.transpose_res, i.with_post)
        losses = (i.dh_in, i.dx_out) if i.with_post else (i.dh_in, i.dh_post, i.dh_res)
        grads = torch.autograd.grad(outs, i.leaves(), losses)
        names = ("h_in", "x_out") if i.with_post else ("h_in", "h_post", "h_res")
        named = dict(zip(names, (t.detach() for t in outs), strict=True))
        last = "df" if i.with_post else "dgamma"
        named.update(zip(("dx", "dphi", "dalpha", "dbias", last), grads, strict=True))
        return named

    return fb
