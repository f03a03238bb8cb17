# SPDX-License-Identifier: Apache-2.0
"""The implementations that mHC rows measure: this package's ops and compiled steps, the plain formula, and Liger's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import mhc_inductor

from .mhc_cases import (
    HC_EPS,
    NORM_EPS,
    POST_EPS,
    POST_MULT,
    SINKHORN_EPS,
    THROUGH,
    Inputs,
    Named,
    PostPre,
    plain_post,
    plain_pre,
)

FORM = "softmax"
_ops = torch.ops.mhc_inductor
_PRE = ("h_in", "h_post", "h_res", "h_pre", "h_mix", "inv_rms")
_AFTER = ("h_in", "next_post", "next_res", "h_pre", "h_mix", "inv_rms")
_COEFFICIENTS = ("next_pre", "next_post", "next_res", "h_mix", "inv_rms")
_PARAMETERS = ("dphi", "dalpha", "dbias", "dgamma")


def _named(names: tuple[str, ...], tensors: Any) -> Named:
    return dict(zip(names, tensors, strict=True))


def _parameters(i: Inputs) -> tuple[Any, ...]:
    return i.phi, i.alpha, i.bias, i.gamma


def _options(i: Inputs) -> tuple[Any, ...]:
    return NORM_EPS, HC_EPS, POST_MULT, POST_EPS, i.iters, SINKHORN_EPS, FORM


def _post(p: PostPre) -> tuple[Any, ...]:
    return p.inputs.x, p.inputs.f_out, p.h_post, p.h_res, p.inputs.transpose_res


def ops_pre(i: Inputs) -> Named:
    return _named(_PRE, _ops.mhc_pre(i.x, *_parameters(i), *_options(i)))


def ops_post(i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Named:
    return {"x_out": _ops.mhc_post(i.x, i.f_out, h_post, h_res, i.transpose_res)}


def ops_fb(i: Inputs) -> Named:
    """Runs forward and backward as a compiled graph does: the backward of pre adds the dx of post."""
    out = ops_pre(i)
    dx_acc, dh_post, dh_res = None, i.dh_post, i.dh_res
    if i.dx_out is not None:
        out.update(ops_post(i, out["h_post"], out["h_res"]))
        site = (i.x, i.f_out, out["h_post"], out["h_res"], i.transpose_res)
        dx_acc, out["df"], dh_post, dh_res = _ops.mhc_post_backward(i.dx_out, *site)
    saved = [out[k] for k in ("h_pre", "h_post", "h_mix", "inv_rms")]
    ups = (i.dh_in, dh_post, dh_res)
    grads = _ops.mhc_pre_backward(*ups, i.x, *_parameters(i), *saved, dx_acc, *_options(i))
    out.update(_named(("dx", *_PARAMETERS), grads))
    if i.gamma is None:
        del out["dgamma"]
    return out


def ops_post_pre(p: PostPre, fused: bool = True) -> Named:
    """Runs post and the next pre, by the fused op or by the two ops."""
    i = p.inputs
    if fused:
        return _named(("x_out", *_AFTER), _ops.mhc_post_pre(*_post(p), *_parameters(i), *_options(i)))
    x_out = _ops.mhc_post(*_post(p))
    return {"x_out": x_out, **_named(_AFTER, _ops.mhc_pre(x_out, *_parameters(i), *_options(i)))}


def ops_post_pre_fb(p: PostPre, fused: bool = True) -> Named:
    """Runs post and the next pre with all gradients: the fused op, or the two ops as a compiled graph calls them."""
    out, i = ops_post_pre(p, fused), p.inputs
    ups = (i.dh_in, p.dnext_post, p.dnext_res)
    saved = [out[k] for k in ("h_pre", "next_post", "h_mix", "inv_rms")]
    pre = (out["x_out"], *_parameters(i), *saved)
    if fused:
        grads = _ops.mhc_post_pre_backward(i.dx_out, *ups, *_post(p), *pre, *_options(i))
    else:
        g, *dparams = _ops.mhc_pre_backward(*ups, *pre, i.dx_out, *_options(i))
        grads = (*_ops.mhc_post_backward(g, *_post(p)), *dparams)
    return out | _named((*THROUGH, *_PARAMETERS[:3]), grads[:7])


def ops_single_pass(p: PostPre, fused: bool = True) -> Named:
    """Runs everything between two sublayers of single-pass mHC, by one op or by its parts."""
    i, (*site, transpose_res) = p.inputs, _post(p)
    if fused:
        out = _ops.mhc_single_pass(*site, p.h_pre, transpose_res, *_parameters(i), *_options(i))
        return _named(("x_out", "h_in", *_COEFFICIENTS), out)
    x_out = _ops.mhc_post(*_post(p))
    rest = _named(_COEFFICIENTS, _ops.mhc_coefficients(x_out, *_parameters(i), *_options(i)))
    return {"x_out": x_out, "h_in": _ops.mhc_collapse(x_out, p.h_pre), **rest}


def ops_single_pass_fb(p: PostPre, fused: bool = True) -> Named:
    """Runs the same with all gradients; the parts as a compiled graph calls them."""
    out, i, (*site, transpose_res) = ops_single_pass(p, fused), p.inputs, _post(p)
    ups = (p.dnext_pre, p.dnext_post, p.dnext_res)
    saved = [out[k] for k in ("next_pre", "next_post", "h_mix", "inv_rms")]
    pre = (out["x_out"], *_parameters(i), *saved)
    if fused:
        given = (i.dx_out, i.dh_in, *ups, *site, p.h_pre, transpose_res)
        grads = _ops.mhc_single_pass_backward(*given, *pre, *_options(i))
    else:
        dx, dh_pre = _ops.mhc_collapse_backward(i.dh_in, out["x_out"], p.h_pre)
        g, *dparams = _ops.mhc_coefficients_backward(*ups, *pre, dx + i.dx_out, *_options(i))
        grads = (*_ops.mhc_post_backward(g, *_post(p)), dh_pre, *dparams)
    return out | _named((*THROUGH, "dh_pre", *_PARAMETERS[:3]), grads[:8])


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
        outs = forward(i.x, *_parameters(i), i.f_out, i.iters, i.transpose_res, i.with_post)
        losses = (i.dh_in, i.dx_out) if i.with_post else (i.dh_in, i.dh_post, i.dh_res)
        grads = torch.autograd.grad(outs, i.leaves(), losses)
        named = _named(("h_in", "x_out") if i.with_post else _PRE[:3], [t.detach() for t in outs])
        return named | _named(("dx", *_PARAMETERS[:3], "df" if i.with_post else "dgamma"), grads)

    return fb


# ---- other implementations


class Plain:
    """The three calls that rows measure, made with the plain formula, eager or compiled."""

    def __init__(self, compiled: bool) -> None:
        wrap = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if compiled else (lambda f: f)
        self._pre, self._post, self._both = wrap(plain_pre), wrap(plain_post), wrap(self._forward)

    @staticmethod
    def _forward(x, phi, alpha, bias, gamma, f_out, iters, transpose_res):  # type: ignore[no-untyped-def]
        h_in, h_post, h_res = plain_pre(x, phi, alpha, bias, gamma, iters)
        return h_in, plain_post(x, f_out, h_post, h_res, transpose_res)

    def pre(self, i: Inputs) -> Any:
        return self._pre(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)

    def post(self, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Any:
        return self._post(i.x, i.f_out, h_post, h_res, i.transpose_res)

    def fb(self, i: Inputs) -> Any:
        if not i.with_post:
            outs = self.pre(i)
            return outs, torch.autograd.grad(outs, i.leaves(), (i.dh_in, i.dh_post, i.dh_res))
        outs = self._both(i.x, i.phi, i.alpha, i.bias, i.gamma, i.f_out, i.iters, i.transpose_res)
        return outs, torch.autograd.grad(outs, i.leaves(), (i.dh_in, i.dx_out))


class Liger:
    """The three calls by liger-kernel's mHC functions: phi in bf16 and transposed, three scalar alphas, no gamma."""

    def __init__(self) -> None:
        from liger_kernel.transformers import functional

        self._f = functional
        self._params: dict[int, list[torch.Tensor]] = {}

    def _prepared(self, i: Inputs) -> list[torch.Tensor]:
        key = i.phi.data_ptr()
        if key not in self._params:
            phi = i.phi.detach().t().contiguous().to(torch.bfloat16)
            params = [phi, i.bias.detach().clone(), *(a.clone() for a in i.alpha.detach().unbind())]
            self._params[key] = [p.requires_grad_(i.phi.requires_grad) for p in params]
        return self._params[key]

    def pre(self, i: Inputs) -> Any:
        phi, bias, *alphas = self._prepared(i)
        h_pre, h_post, h_res = self._f.liger_mhc_coeffs(
            i.x, phi, bias, *alphas, tmax=i.iters, rms_eps=NORM_EPS, pre_eps=HC_EPS, sinkhorn_eps=SINKHORN_EPS
        )
        return self._f.liger_mhc_pre(i.x, h_pre), h_post, h_res

    def post(self, i: Inputs, h_post: torch.Tensor, h_res: torch.Tensor) -> Any:
        return self._f.liger_mhc_post_res(i.x, i.f_out, h_post, h_res)

    def fb(self, i: Inputs) -> Any:
        h_in, h_post, h_res = self.pre(i)
        x_out = self.post(i, h_post, h_res)
        leaves = [i.x, *self._prepared(i), i.f_out]
        return (h_in, x_out), torch.autograd.grad((h_in, x_out), leaves, (i.dh_in, i.dx_out))


def liger_missing() -> str | None:
    """Returns why Liger cannot be measured on this machine, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    try:
        from liger_kernel.transformers import functional
    except Exception as e:  # its import may raise anything
        return f"liger-kernel cannot be imported: {e}"
    return None if hasattr(functional, "liger_mhc_coeffs") else "this liger-kernel has no mHC functions"
