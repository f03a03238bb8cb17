# SPDX-License-Identifier: Apache-2.0
"""Launch plans of single-pass mHC: coefficients, collapse with given weights, and all between two sublayers in one op.

The weights of a collapse are known before its streams are computed, so no pass waits for a projection. Where it can
run, one Gluon kernel computes post, the collapse and the projection (``gluon.py``); elsewhere post and collapse share
a kernel. In the backward, the logits' gradients come from the op's inputs, and <dh_in, x_out> shares post's pass.
"""

from __future__ import annotations

from typing import Any

from ..launch import launch
from ..operands import contiguous, power_of_two
from .blocks import mhc_blocks_coefficients
from .config import BLOCKS_MAXNREG, COEFFICIENTS, GROUP, GROUPS, dots_config, few, post_config, pre_config
from .fused_plan import launch_post_project
from .gluon import post_project
from .plan import backward, empty_grads, post, project, unsupported
from .single_pass import mhc_coefficients, mhc_collapse, mhc_collapse_backward
from .sizes import Dims, Options, dims, nothing, of_tokens, outputs

__all__ = ["unsupported"]


def _outputs(out: dict[str, Any]) -> tuple[Any, ...]:
    """Returns h_pre, h_post, h_res, h_mix and inv_rms."""
    return tuple(out[name] for name in ("h_pre", "h_post", "h_res", "h_mix", "inv"))


def _of_parts(b: Any, s: Dims, values: dict[str, Any], RUN: Any, groups: int, group: int) -> None:
    """Launches the coefficients from ``groups`` groups of parts."""
    launch(b, mhc_coefficients, b.cdiv(s.T, COEFFICIENTS.BC), COEFFICIENTS, values, RUN=RUN, GROUPS=groups, GROUP=group)


def _of_streams(b: Any, s: Dims, x: Any, params: tuple[Any, ...], out: dict[str, Any], o: Options) -> None:
    """Launches the projection of contiguous streams, and the coefficients ``out`` that follow from it."""
    c = pre_config(b.device_props(), s.K, s.D, s.MP, b.dtype(x) == b.bf16)
    part, RUN = project(b, s, c, x, params[0], params[3])
    _of_parts(b, s, dict(of_tokens(s, out, params, o), part=part), RUN, GROUPS, GROUP)


def plan_mhc_coefficients(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, *options: Any
) -> tuple[Any, ...]:
    """Launches ``mhc_coefficients``; returns (h_pre, h_post, h_res, h_mix, inv_rms)."""
    s = dims(b, x, phi)
    out = outputs(b, s, None)
    if not nothing(b, s.T):
        x, *params = contiguous(b, x, phi, alpha, bias, gamma)
        _of_streams(b, s, x, tuple(params), out, Options(*options))
    return _outputs(out)


def plan_mhc_coefficients_backward(
    b: Any, dh_pre: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_post: Any, h_mix: Any, inv_rms: Any, dx_acc: Any, *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_coefficients_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    params, coefficients = (phi, alpha, bias, gamma), (dh_pre, dh_post, dh_res)
    return backward(b, x, params, None, h_mix, inv_rms, dx_acc, None, coefficients, Options(*options))


def plan_mhc_collapse(b: Any, x: Any, h_pre: Any) -> Any:
    """Launches ``mhc_collapse``; returns h_in."""
    s = dims(b, x)
    h_in = b.empty((*s.lead, s.D), b.dtype(x))
    if not nothing(b, s.T):
        x, h_pre = contiguous(b, x, h_pre)
        c = post_config(s.D, s.n)
        launch(b, mhc_collapse, s.T * (-(-s.D // c.BD)), c, s.values(), x=x, h_pre=h_pre, h_in=h_in)
    return h_in


def plan_mhc_collapse_backward(b: Any, dh_in: Any, x: Any, h_pre: Any) -> tuple[Any, ...]:
    """Launches ``mhc_collapse_backward``; returns (dx, dh_pre)."""
    s = dims(b, x)
    dx, dh_pre = empty_grads(b, x, h_pre)
    if not nothing(b, s.T):
        dh_in, x, h_pre = contiguous(b, dh_in, x, h_pre)
        values = dict(s.values(), dh_in=dh_in, x=x, h_pre=h_pre, dx=dx, dh_pre=dh_pre)
        launch(b, mhc_collapse_backward, s.T, dots_config(s.D, s.n), values)
    return dx, dh_pre


def plan_mhc_single_pass(
    b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, h_pre: Any, transpose_res: bool, phi: Any, alpha: Any, bias: Any,
    gamma: Any, *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_single_pass``; returns (x_out, h_in, next_pre, next_post, next_res, h_mix, inv_rms)."""
    s, o = dims(b, x, phi), Options(*options)
    out = outputs(b, s, None)
    found = post_project(b, x, f_out, collapse=True)
    if found is None:
        x_out, h_in = post(b, x, f_out, h_post, h_res, h_pre, transpose_res)
    else:
        x_out, h_in = b.empty(b.shape(x), b.bf16), b.empty((*s.lead, s.D), b.bf16)
    if nothing(b, s.T):
        return x_out, h_in, *_outputs(out)
    params = contiguous(b, phi, alpha, bias, gamma)
    if found is None:
        _of_streams(b, s, x_out, params, out, o)
    else:
        site, c = contiguous(b, x, f_out, h_post, h_res, h_pre), found[1]
        part = launch_post_project(b, *found, s, site, transpose_res, params[0], params[3], x_out, h_in)
        S, values = c.slices(s.D), dict(of_tokens(s, out, params, o), part=part)
        if few(b, s.T):
            values.update(NB=c.NB, S=S, SP=power_of_two(S), maxnreg=BLOCKS_MAXNREG)
            launch(b, mhc_blocks_coefficients, s.T, COEFFICIENTS, values)
        else:
            _of_parts(b, s, values, S, S, S)
    return x_out, h_in, *_outputs(out)


def plan_mhc_single_pass_backward(
    b: Any, dx_out: Any, dh_in: Any, dnext_pre: Any, dnext_post: Any, dnext_res: Any, x: Any, f_out: Any, h_post: Any,
    h_res: Any, h_pre: Any, transpose_res: bool, x_out: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, next_pre: Any,
    next_post: Any, h_mix: Any, inv_rms: Any, *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_single_pass_backward``.

    Returns (dx, df, dh_post, dh_res, dh_pre, dphi, dalpha, dbias, dgamma).
    """
    params, site, coefficients = (
        (phi, alpha, bias, gamma),
        (x, f_out, h_post, h_res, h_pre),
        (dnext_pre, dnext_post, dnext_res),
    )
    return backward(
        b,
        x_out,
        params,
        h_pre,
        h_mix,
        inv_rms,
        dx_out,
        dh_in,
        coefficients,
        Options(*options),
        True,
        site,
        transpose_res,
    )
