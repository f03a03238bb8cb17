# SPDX-License-Identifier: Apache-2.0
"""Launch plan of pre with one read of x (``gluon_one_read.py``)."""

from __future__ import annotations

from typing import Any

from mhc_inductor.log import warn_once

from . import gluon
from .sizes import FORMS, OUTSIDE, contiguous, dims, pre_outputs

WARPS = 8  # the kernel's layouts are written for them


def plan_one_read(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, floats: tuple[Any, ...], iters: int, form: str,
    norm_form: str,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Launches the kernel; returns (h_in, h_post, h_res, h_pre, h_mix, inv_rms), or None if others must run."""
    kernel = gluon.one_read(b, x)
    if kernel is None:
        return None
    s = dims(b, x, phi)
    out = pre_outputs(b, s, b.bf16, True)
    if s.T == 0:
        return out
    x, phi, alpha, bias, gamma = contiguous(b, x, phi, alpha, bias, gamma)
    G, tiles = s.D // gluon.COLUMNS, b.cdiv(s.T, 16)
    # A counter per group and five sums per token, all 0 at first; the other sums.
    words = b.zeros((gluon.COUNTERS + tiles * G * 80,), b.i32)
    part = b.empty((tiles * G * 320,), b.f32)
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = out
    names = ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_eps")
    args = dict(
        x_ptr=b.aligned(x), phi_ptr=phi, gamma_ptr=gamma, alpha_ptr=alpha, bias_ptr=bias, words_ptr=words, part_ptr=part,
        h_in_ptr=h_in, h_pre_ptr=h_pre, h_post_ptr=h_post, h_res_ptr=h_res if s.has_res else None, h_mix_ptr=h_mix,
        inv_ptr=inv_rms, T=s.T, tiles=tiles, **dict(zip(names, floats, strict=True)),
    )  # fmt: skip
    constexprs = dict(
        D=s.D, G=G, GP=16 if G <= 16 else 32, M=s.M, HAS_GAMMA=gamma is not None, HAS_RES=s.has_res, ITERS=iters,
        FORM=FORMS[form], OUTSIDE=OUTSIDE[norm_form], launch_cooperative_grid=True,
    )  # fmt: skip
    groups = min(tiles, b.device_props().sm_count // G)
    try:
        b.launch(kernel, (groups * G, 1, 1), args, constexprs, WARPS, 1)
    except RuntimeError as error:
        if "cooperative" not in str(error):
            raise
        gluon.refused.add(b.device)
        warn_once(
            "one read", f"mHC reads x twice on {b.device}, which cannot hold the kernel's programs at once: {error}"
        )
        return None
    return out
