# SPDX-License-Identifier: Apache-2.0
"""The implementations that mHC rows measure: this package's ops and compiled steps, and the plain formula."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mhc_inductor
from mhc_inductor.ops.dims import results
from mhc_inductor.ops.registry import argument_names

from .mhc_cases import (
    HC_EPS,
    NORM_EPS,
    POST_EPS,
    POST_MULT,
    SINKHORN_EPS,
    Inputs,
    Named,
    PostPre,
    plain_post,
    plain_pre,
)

FORM = "softmax"
_OPTIONS = {"norm_eps": NORM_EPS, "hc_eps": HC_EPS, "post_mult": POST_MULT, "post_eps": POST_EPS}
_OPTIONS |= {"sinkhorn_eps": SINKHORN_EPS, "sinkhorn_form": FORM, "dx_acc": None}


def _op(name: str, of: Inputs | PostPre, **known: Any) -> Named:
    """Returns the results of an op by the names of its schema; its arguments are ``known``, of the case, or options."""
    given = {**_OPTIONS, **vars(of)}
    if isinstance(of, PostPre):
        given |= vars(of.inputs) | {"h_post": of.h_post, "h_res": of.h_res}
    given |= {"sinkhorn_iters": given["iters"], **known}
    made = getattr(torch.ops.mhc_inductor, name)(*(given[a] for a in argument_names(name) if a in given))
    named = zip(results(name), (made,) if isinstance(made, Tensor) else made, strict=True)
    return {k: t for k, t in named if k != "dgamma" or given["gamma"] is not None}


def ops_pre(i: Inputs) -> Named:
    return _op("mhc_pre", i)


def ops_post(i: Inputs, h_post: Tensor, h_res: Tensor) -> Named:
    return _op("mhc_post", i, h_post=h_post, h_res=h_res)


def ops_fb(i: Inputs) -> Named:
    """Runs forward and backward as a compiled graph does: the backward of pre adds the dx of post."""
    out, ups = ops_pre(i), dict[str, Tensor]()
    if i.with_post:
        site = {"h_post": out["h_post"], "h_res": out["h_res"]}
        out |= ops_post(i, *site.values())
        ups = _op("mhc_post_backward", i, **site, g=i.dx_out)
        out["df"], ups["dx_acc"] = ups["df"], ups["dx"]
    return out | _op("mhc_pre_backward", i, **{**out, **ups})


def ops_boundary(name: str, p: PostPre, fused: bool = True, gradients: bool = False) -> Named:
    """Runs what is between two sublayers: post and the next pre, or all of single-pass mHC.

    By the fused op ``name``, or by its parts as a compiled graph calls them.
    """
    if fused:
        out = _op(name, p)
        return out | _op(f"{name}_backward", p, **out) if gradients else out
    single, (x_out,) = name == "mhc_single_pass", _op("mhc_post", p).values()
    pre = "mhc_coefficients" if single else "mhc_pre"
    after = _op(pre, p, x=x_out)
    named = {"h_post": "next_post", "h_res": "next_res"} | ({"h_pre": "next_pre"} if single else {})
    out = {"x_out": x_out, **{named.get(k, k): t for k, t in after.items()}}
    out |= _op("mhc_collapse", p, x=x_out) if single else {}
    if not gradients:
        return out
    back = _op("mhc_collapse_backward", p, x=x_out) if single else {}
    ups = {"dh_pre": p.dnext_pre, "dh_post": p.dnext_post, "dh_res": p.dnext_res}
    dx_acc = back["dx"] + p.inputs.dx_out if single else p.inputs.dx_out
    grads = _op(f"{pre}_backward", p, **{**after, **ups, "x": x_out, "dx_acc": dx_acc})
    return out | back | grads | _op("mhc_post_backward", p, g=grads["dx"])


ops_post_pre = functools.partial(ops_boundary, "mhc_post_pre")
ops_single_pass = functools.partial(ops_boundary, "mhc_single_pass")


# ---- formulas through autograd


def _ours(x, phi, alpha, bias, gamma, f_out, iters, transpose_res, with_post):  # type: ignore[no-untyped-def]
    h_in, h_post, h_res = mhc_inductor.mhc_pre(
        x, phi, alpha, bias, gamma, sinkhorn_iters=iters, sinkhorn_form=FORM, norm_eps=NORM_EPS, hc_eps=HC_EPS
    )
    if not with_post:
        return h_in, h_post, h_res
    return h_in, mhc_inductor.mhc_post(x, f_out, h_post, h_res, transpose_res=transpose_res)


def _plain(x, phi, alpha, bias, gamma, f_out, iters, transpose_res, with_post):  # type: ignore[no-untyped-def]
    h_in, h_post, h_res = plain_pre(x, phi, alpha, bias, gamma, iters)
    return (h_in, plain_post(x, f_out, h_post, h_res, transpose_res)) if with_post else (h_in, h_post, h_res)


def _compiled(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(fn, backend=backend, dynamic=False, fullgraph=True) if backend else fn


def autograd_fb(backend: str = "", forward: Callable[..., Any] = _ours) -> Callable[[Inputs], Named]:
    """Returns forward and backward through the public functions, or the plain formula; eager, or compiled by a backend."""
    call = _compiled(forward, backend)

    def fb(i: Inputs) -> Named:
        outs = call(i.x, i.phi, i.alpha, i.bias, i.gamma, i.f_out, i.iters, i.transpose_res, i.with_post)
        losses = (i.dh_in, i.dx_out) if i.with_post else (i.dh_in, i.dh_post, i.dh_res)
        grads = torch.autograd.grad(outs, i.leaves(), losses)
        made = zip(("h_in", "x_out") if i.with_post else ("h_in", "h_post", "h_res"), outs, strict=True)
        names = ("dx", "dphi", "dalpha", "dbias", "df" if i.with_post else "dgamma")
        return {k: t.detach() for k, t in made} | dict(zip(names, grads, strict=True))

    return fb


def plain_calls(
    i: Inputs, h_post: Tensor, h_res: Tensor, backend: str = ""
) -> dict[str, tuple[Callable[[Inputs], Any], bool]]:
    """Returns the calls of a case with the plain formula, eager or compiled, and which of them have gradients."""
    pre, post = (_compiled(fn, backend) for fn in (plain_pre, plain_post))
    calls = {"pre": (lambda of: pre(of.x, of.phi, of.alpha, of.bias, of.gamma, of.iters), False)}
    if i.with_post:
        calls["post"] = (lambda of: post(of.x, of.f_out, h_post, h_res, of.transpose_res), False)
    return calls | {"fb": (autograd_fb(backend, _plain), True)}
