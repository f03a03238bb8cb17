"""Launch plan of pre and of the fused post and pre with one read of x (``gluon_one_read.py``)."""

from __future__ import annotations

from typing import Any

from mhc_inductor.log import warn_once

from . import gluon
from .sizes import FORMS, contiguous, dims, pre_outputs


def plan_one_read(
    b: Any, x: Any, post: tuple[Any, ...] | None, transpose_res: bool, params: tuple[Any, ...], floats: tuple[Any, ...],
    iters: int, form: str, has_post: bool,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Launches the kernel; returns (x_out, h_in, h_post, h_res, h_pre, h_mix, inv_rms), or None if others must run.

    post: (f_out, h_post, h_res), or None for pre alone, whose x_out is None. params: (phi, alpha, bias, gamma).
    """
    found = gluon.one_read(b, x, post)
    if found is None:
        return None
    kernel, c = found
    s = dims(b, x, params[0])
    out = pre_outputs(b, s, b.bf16, has_post)
    x_out = None if post is None else b.empty(b.shape(x), b.bf16)
    if s.T == 0:
        return x_out, *out
    phi, alpha, bias, gamma = contiguous(b, *params)
    tensors = [None if t is None else b.aligned(b.contiguous(t)) for t in (x, *(post or (None, None, None)))]
    G, tiles = s.D // gluon.COLUMNS, b.cdiv(s.T, 16)
    # A counter per group and five sums per token, all 0 at first; the other sums.
    words = b.zeros((gluon.COUNTERS + tiles * G * 80,), b.i32)
    part = b.empty((tiles * G * 320,), b.f32)
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = out
    names = ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_eps")
    args = dict(
        zip(("x_ptr", "f_ptr", "h_post_ptr", "h_res_ptr"), tensors, strict=True),
        out_ptr=x_out, phi_ptr=phi, gamma_ptr=gamma, alpha_ptr=alpha, bias_ptr=bias, words_ptr=words, part_ptr=part,
        h_in_ptr=h_in, next_pre_ptr=h_pre, next_post_ptr=h_post, next_res_ptr=h_res if s.has_res else None, h_mix_ptr=h_mix, inv_ptr=inv_rms,
        T=s.T, tiles=tiles, **dict(zip(names, floats, strict=True)),
    )  # fmt: skip
    constexprs = dict(
        D=s.D, G=G, GP=16 if G <= 16 else 32, M=s.M, HAS_GAMMA=gamma is not None, POST=post is not None,
        HAS_MIX=tensors[3] is not None, TRANSPOSE=transpose_res, HAS_POST=has_post, HAS_RES=has_post and s.has_res,
        ITERS=iters, FORM=FORMS[form], R=c.R, LAG=c.LAG, W=c.W, launch_cooperative_grid=True,
    )  # fmt: skip
    groups = min(tiles, b.device_props().sm_count // G)
    try:
        b.launch(kernel, (groups * G, 1, 1), args, constexprs, c.W, 1)
    except RuntimeError as error:
        if "cooperative" not in str(error):
            raise
        gluon.refused.add(b.device)
        warn_once(
            "one read", f"mHC reads x twice on {b.device}, which cannot hold the kernel's programs at once: {error}"
        )
        return None
    return x_out, *out
