# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the fused mHC ops.

Where it can run, one Gluon kernel computes post and the projection of its result (``gluon.py``). Elsewhere the kernels
of post and of pre run, and share what two separate ops could not. One kernel for both gradients
of x_out was measured and is slower (docs/tuning.md).
"""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import contiguous, power_of_two
from .blocks import mhc_blocks_collapse
from .config import BLOCKS_MAXNREG, few
from .gluon import PostProjectConfig, post_project
from .plan import backward, launch_collapse, plan_mhc_post, plan_pre, unsupported
from .sizes import Dims, Options, dims, nothing, of_tokens, outputs
from .slices import mhc_slices_collapse

__all__ = ["unsupported"]


def runs_gluon(b: Any, x: Any, f_out: Any) -> bool:
    """Returns whether the forward of the fused ops runs its Gluon kernel with this builder."""
    return post_project(b, x, f_out) is not None


def _slices(
    b: Any, kernels: Any, c: PostProjectConfig, post: tuple[Any, ...], transpose_res: bool, params: tuple[Any, ...],
    o: Options, has_post: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches the fused kernel, then coefficients and collapse.

    The fused kernel projects slices of columns; each slice writes its part of every token's sums.
    """
    s = dims(b, post[0], params[0])
    x_out = b.empty(b.shape(post[0]), b.bf16)
    out = outputs(b, s, b.bf16, has_post)
    if not nothing(b, s.T):
        post, params = contiguous(b, *post), contiguous(b, *params)
        part = launch_post_project(b, kernels, c, s, (*post, None), transpose_res, params[0], params[3], x_out, None)
        S, one = c.slices(s.D), few(b, s.T)
        values = dict(of_tokens(s, out, params, o), x=x_out, part=part, S=S, SP=power_of_two(S))
        if one:
            values.update(NB=c.NB, maxnreg=BLOCKS_MAXNREG)
        launch_collapse(b, mhc_blocks_collapse if one else mhc_slices_collapse, s, c, 1, values, int(one))
    return x_out, *out.values()


def launch_post_project(
    b: Any, kernels: Any, c: PostProjectConfig, s: Dims, site: tuple[Any, ...], transpose_res: bool, phi: Any, gamma: Any,
    x_out: Any, h_in: Any,
) -> Any:  # fmt: skip
    """Launches the fused kernel on contiguous tensors, which writes x_out; returns the parts of the sums.

    A part is a slice of columns, or with few tokens a block. site: (x, f_out, h_post, h_res, h_pre). With weights h_pre
    it also writes what they collapse x_out to, to ``h_in``.
    """
    x, f_out, h_post, h_res, h_pre = site
    if few(b, s.T):
        kernel, grid, warps = kernels[1], (s.D // 32, b.cdiv(s.T, 64)), 4
    else:
        S = c.slices(s.D)
        groups = b.min(b.cdiv(s.T, c.NW * 16), max(1, b.device_props().sm_count // S))
        kernel, grid, warps = kernels[0], (S, groups), c.NW
    part = b.empty((grid[0], s.T, s.MP), b.f32)
    launch(
        b, kernel, grid, (warps, 1), s.values(), vars(c), x=b.aligned(x), f=b.aligned(f_out), h_post=h_post, h_res=h_res,
        h_pre=h_pre, phi=phi, gamma=gamma, out=x_out, h_in=h_in, part=part, HAS_RES=h_res is not None,
        TRANSPOSE=transpose_res, COLLAPSE=h_pre is not None, HAS_GAMMA=gamma is not None,
    )  # fmt: skip
    return part


def _forward(
    b: Any, post: tuple[Any, ...], transpose_res: bool, params: tuple[Any, ...], o: Options, has_post: bool = True
) -> tuple[Any, ...]:
    """Launches the forward of a fused op. post: (x, f_out, h_post, h_res); params: (phi, alpha, bias, gamma)."""
    x, f_out, h_post, h_res = post
    found = post_project(b, x, f_out)
    if found is not None:
        return _slices(b, *found, post, transpose_res, params, o, has_post)
    x_out = plan_mhc_post(b, x, f_out, h_post, h_res, transpose_res)
    return x_out, *plan_pre(b, x_out, params, o, has_post)


def plan_mhc_post_pre(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_pre``; returns (x_out, h_in, next_post, next_res, h_pre, h_mix, inv_rms)."""
    return _forward(b, (x, f_out, h_post, h_res), transpose_res, (phi, alpha, bias, gamma), Options(*options))


def plan_mhc_post_head(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any, gamma: Any,
    norm_eps: float, hc_eps: float, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_head``; returns (x_out, h_in, h_pre, h_mix, inv_rms)."""
    post, o = (x, f_out, h_post, h_res), Options(norm_eps, hc_eps, norm_form=norm_form)
    x_out, h_in, _, _, *rest = _forward(b, post, transpose_res, (phi, alpha, bias, gamma), o, False)
    return x_out, h_in, *rest


def plan_mhc_post_pre_backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_post: Any, dnext_res: Any, x: Any, f_out: Any, h_post: Any, h_res: Any,
    transpose_res: bool, x_out: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, next_post: Any, h_mix: Any,
    inv_rms: Any, *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_pre_backward``; returns (dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)."""
    params, post, o = (phi, alpha, bias, gamma), (x, f_out, h_post, h_res), Options(*options)
    coefficients = (dnext_post, dnext_res)
    return backward(b, x_out, params, h_pre, h_mix, inv_rms, dx_out, dh_in, coefficients, o, True, post, transpose_res)


def plan_mhc_post_head_backward(
    b: Any, dx_out: Any, dh_in: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, x_out: Any,
    phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any, norm_eps: float, hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_post_head_backward``; returns (dx, df, dh_post, dh_res, dphi, dalpha, dbias, dgamma)."""
    params, post = (phi, alpha, bias, gamma), (x, f_out, h_post, h_res)
    o = Options(norm_eps, hc_eps, norm_form=norm_form)
    return backward(b, x_out, params, h_pre, h_mix, inv_rms, dx_out, dh_in, (None, None), o, False, post, transpose_res)
