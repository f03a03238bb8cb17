# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the mHC ops: which kernels, on which grid, with which configuration.

Each plan is written once against a builder (``kernels/launch.py`` eagerly, ``lowerings/builder.py`` in Inductor). A
configuration depends on n, D, dtypes and the device, never on the token count T, because T may be symbolic and a
token's bits must not depend on the batch around it. Small T uses the same launches, whose grids shrink with T.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dtypes import without_kernel
from .backward import (
    mhc_pre_backward_coefficients,
    mhc_pre_backward_dots,
    mhc_pre_backward_dphi,
    mhc_pre_backward_dx,
    mhc_pre_backward_finish,
)
from .config import (
    GROUP,
    GROUPS,
    SMALL_T,
    PreConfig,
    dots_config,
    dphi_config,
    dx_config,
    finish_config,
    post_backward_config,
    post_config,
    pow2,
    pre_config,
    pre_few,
    rows_config,
)
from .one_read_plan import plan_one_read
from .post import mhc_post, mhc_post_backward
from .pre import mhc_pre_collapse, mhc_pre_project, mhc_pre_weights
from .sinkhorn import mhc_sinkhorn, mhc_sinkhorn_backward
from .sizes import FORMS, OUTSIDE, Dims, contiguous, dims, numel, pre_outputs


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    return without_kernel(b, *(t for t in tensors if t is not None))


def precision(b: Any, x: Any, *weights: Any) -> tuple[int, str]:
    """Returns the number of bf16 terms of an fp32 factor and the input_precision of an fp32 product.

    See docs/design.md, decision 6.
    """
    if b.dtype(x) != b.bf16:
        return 0, "tf32x3" if b.device_props().backend == "cuda" else "ieee"
    if weights and all(w is None for w in weights[1:]) and b.dtype(weights[0]) == b.bf16:
        return 1, "ieee"
    return (3 if b.precision == "highest" else 2), "ieee"


def sections(b: Any, T: Any, groups: int, group: int) -> tuple[Any, Any]:
    """Returns the number of sections that a program sums, and the number of programs that share a token.

    With few tokens, each program sums one section, so that decoding fills the device.
    """
    many = b.min(b.cdiv(T, SMALL_T) - 1, 1)
    return 1 + (group - 1) * many, groups * (group - (group - 1) * many)


def weights(b: Any, s: Dims, phi: Any, gamma: Any, columns: int, terms: int) -> Any:
    """Returns phi * gamma as bf16 terms, or in fp32 if ``terms`` is 0."""
    w = b.empty((terms or 1, s.MP, s.K), b.bf16 if terms else b.f32)
    b.launch(
        mhc_pre_weights,
        (s.MP, -(-s.K // columns), 1),
        dict(phi_ptr=phi, gamma_ptr=gamma, w_ptr=w),
        dict(K=s.K, M=s.M, MP=s.MP, BK=columns, HAS_GAMMA=gamma is not None, TERMS=terms), 4, 1,
    )  # fmt: skip
    return w


def collapse(
    b: Any, s: Dims, c: PreConfig, x: Any, part: Any, RUN: Any, groups: int, group: int, alpha: Any, bias: Any,
    out: tuple[Any, ...], floats: tuple[Any, ...], iters: int, form: str, norm_form: str,
) -> None:  # fmt: skip
    """Launches the kernel that computes coefficients and h_in from the projection's parts.

    ``floats``: norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps.
    """
    one = pre_few(b, x, s.T)
    launch_collapse(
        b, mhc_pre_collapse, s, c.BC, c.BD, x, part, alpha, bias, out, floats, iters, form, dict(RUN=RUN),
        dict(N=s.n, NP=s.NP, GROUPS=groups, GROUP=group, FEW=one), c.collapse_warps, norm_form, int(one),
    )  # fmt: skip


def launch_collapse(
    b: Any, kernel: Any, s: Dims, BC: int, BD: int, x: Any, part: Any, alpha: Any, bias: Any, out: tuple[Any, ...],
    floats: tuple[Any, ...], iters: int, form: str, args: dict[str, Any], constexprs: dict[str, Any], warps: int,
    norm_form: str, tokens: int = 0,
) -> None:  # fmt: skip
    """Launches a kernel of coefficients and collapse.

    ``args`` and ``constexprs`` are those that only this kernel takes; ``tokens`` is the number of tokens of a
    coefficients program, if it is not BC.
    """
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = out
    programs = b.cdiv(s.T, tokens or BC)
    names = ("norm_eps", "hc_eps", "post_mult", "post_eps", "sinkhorn_eps")
    b.launch(
        kernel,
        (programs + s.T * (-(-s.D // BD)), 1, 1),
        dict(
            x_ptr=x, part_ptr=part, alpha_ptr=alpha, bias_ptr=bias, h_in_ptr=h_in, h_pre_ptr=h_pre,
            h_post_ptr=h_post, h_res_ptr=h_res if s.has_res else None, h_mix_ptr=h_mix, inv_ptr=inv_rms, T=s.T,
            CP=programs, **args, **dict(zip(names, floats, strict=True)),
        ),
        dict(
            D=s.D, M=s.M, MP=s.MP, **constexprs, BC=BC, BD=BD, HAS_POST=h_post is not None, HAS_RES=s.has_res,
            ITERS=iters if s.has_res else 0, FORM=FORMS[form], OUTSIDE=OUTSIDE[norm_form],
        ),
        warps, 1,
    )  # fmt: skip


def plan_pre(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, floats: tuple[Any, ...], iters: int, form: str,
    has_post: bool, norm_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches pre, or the head without ``has_post``; returns (h_in, h_post, h_res, h_pre, h_mix, inv_rms)."""
    s = dims(b, x, phi)
    out = pre_outputs(b, s, b.dtype(x), has_post)
    if b.is_static(s.T) and s.T == 0:
        return out
    x, phi, alpha, bias, gamma = contiguous(b, x, phi, alpha, bias, gamma)
    c = pre_config(b.device_props(), s.K, s.D, s.MP, b.dtype(x) == b.bf16)
    part, RUN = project(b, s, c, x, phi, gamma)
    collapse(b, s, c, x, part, RUN, GROUPS, GROUP, alpha, bias, out, floats, iters, form, norm_form)
    return out


def project(b: Any, s: Dims, c: PreConfig, x: Any, phi: Any, gamma: Any) -> tuple[Any, Any]:
    """Launches the projection of contiguous tensors; returns its parts, and the number of sections in each."""
    terms, prec = precision(b, x, phi, gamma)
    # A section has about 1 / (GROUPS * GROUP) of K's columns.
    KS = -(-s.K // (GROUPS * GROUP * c.BK)) * c.BK
    RUN, parts = sections(b, s.T, GROUPS, GROUP)
    # With few tokens a launch costs more than splitting phi in each program.
    split = pre_few(b, x, s.T)
    w = phi if split else weights(b, s, phi, gamma, c.WK, terms)
    part = b.empty((parts, s.T, s.MP), b.f32)
    b.launch(
        mhc_pre_project,
        (b.cdiv(s.T, c.BT), parts, 1),
        dict(x_ptr=x, w_ptr=w, gamma_ptr=gamma if split else None, part_ptr=part, T=s.T, RUN=RUN),
        dict(
            K=s.K, M=s.M, MP=s.MP, KS=KS, BT=c.BT, BK=c.BK, EVEN=s.K == KS * GROUPS * GROUP, SPLIT=split,
            HAS_GAMMA=split and gamma is not None, TERMS=terms, PREC=prec,
        ),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    return part, RUN


def plan_mhc_pre(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str,
    norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_pre``; returns (h_in, h_post, h_res, h_pre, h_mix, inv_rms)."""
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    done = plan_one_read(b, x, phi, alpha, bias, gamma, floats, sinkhorn_iters, sinkhorn_form, norm_form)
    if done is not None:
        return done
    return plan_pre(b, x, phi, alpha, bias, gamma, floats, sinkhorn_iters, sinkhorn_form, True, norm_form)


def plan_mhc_head(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_head``; returns (h_in, h_pre, h_mix, inv_rms)."""
    floats = (norm_eps, hc_eps, 0.0, 0.0, 0.0)
    h_in, _, _, h_pre, h_mix, inv_rms = plan_pre(b, x, phi, alpha, bias, gamma, floats, 0, "softmax", False, norm_form)
    return h_in, h_pre, h_mix, inv_rms


@dataclasses.dataclass(frozen=True)
class LogitGrads:
    """Results of the coefficients' backward that dx and the parameter gradients need (see ``backward.py``)."""

    rows: Any
    cols: Any
    cx: Any
    red: Any
    programs: Any
    TP: Any
    terms: int
    prec: str


def empty_grads(b: Any, x: Any, *inputs: Any) -> tuple[Any, ...]:
    """Allocates each input's gradient, with shape [0] for an input of None."""
    return tuple(b.empty((0,), b.dtype(x)) if v is None else b.empty(b.shape(v), b.dtype(v)) for v in inputs)


def zero_grads(b: Any, x: Any, *inputs: Any) -> tuple[Any, ...]:
    """Returns zeros for each input's gradient, with shape [0] for an input of None."""
    return tuple(b.empty((0,), b.dtype(x)) if v is None else b.zeros(b.shape(v), b.dtype(v)) for v in inputs)


def collapse_dots(b: Any, s: Dims, dh_in: Any, x: Any) -> Any:
    """Launches the kernel of <dh_in, x[i]> [T, n], the gradient of h_pre; returns None without ``dh_in``."""
    if dh_in is None:
        return None
    dots = b.empty((s.T, s.n), b.f32)
    c = dots_config(s.D, s.n)
    b.launch(
        mhc_pre_backward_dots, (s.T, 1, 1), dict(dh_in_ptr=dh_in, x_ptr=x, dots_ptr=dots),
        dict(D=s.D, N=s.n, BD=c.BD), c.num_warps, 1,
    )  # fmt: skip
    return dots


def logit_grads(
    b: Any, s: Dims, dh_pre: Any, dh_post: Any, dh_res: Any, x: Any, alpha: Any, bias: Any, h_mix: Any, inv_rms: Any,
    post_mult: float, iters: int, sinkhorn_eps: float, form: str, has_post: bool,
    norm_eps: float, norm_form: str,
) -> LogitGrads:  # fmt: skip
    """Launches the coefficients' backward, which computes dh_mix; all tensors must be contiguous."""
    if not s.has_res:
        dh_res = None
    RP = pow2(s.M + b.static(b.shape(alpha)[0]))
    r = rows_config(s.n)
    programs = b.cdiv(s.T, r.BC)
    terms, prec = precision(b, x)
    # dx reads dh_mix by rows, dphi by columns, which are padded to whole tiles.
    TP = b.cdiv(s.T, 64) * 64
    dt = b.bf16 if terms else b.f32
    rows = b.empty((2 if terms else 1, s.T, s.MP), dt)
    cols = b.empty(((terms or 1) * s.MP, TP), dt)
    cx = b.empty((s.T,), b.f32)
    red = b.empty((programs, RP), b.f32)
    sums = b.empty((2 * iters, s.T, s.n), b.f32) if iters and dh_res is not None else None
    b.launch(
        mhc_pre_backward_coefficients,
        (programs, 1, 1),
        dict(
            dots_ptr=dh_pre, dh_post_ptr=dh_post, dh_res_ptr=dh_res, alpha_ptr=alpha, bias_ptr=bias, h_mix_ptr=h_mix,
            inv_ptr=inv_rms, rows_ptr=rows, cols_ptr=cols, cx_ptr=cx, sums_ptr=sums, red_ptr=red, T=s.T, TP=TP,
            post_mult=post_mult,
            sinkhorn_eps=sinkhorn_eps, norm_eps=norm_eps if OUTSIDE[norm_form] else None,
        ),
        dict(
            K=s.K, N=s.n, NP=s.NP, M=s.M, MP=s.MP, RP=RP, BC=r.BC, HAS_DIN=dh_pre is not None, HAS_POST=has_post,
            HAS_DPOST=dh_post is not None, HAS_RES=s.has_res, HAS_DRES=dh_res is not None,
            ITERS=iters if s.has_res else 0, FORM=FORMS[form], TERMS=terms, OUTSIDE=OUTSIDE[norm_form],
        ),
        r.num_warps, 1,
    )  # fmt: skip
    return LogitGrads(rows, cols, cx, red, programs, TP, terms, prec)


def pre_dx(
    b: Any, s: Dims, d: LogitGrads, dh_in: Any, x: Any, phi: Any, gamma: Any, h_pre: Any, dx_acc: Any, dx: Any
) -> None:
    """Launches the kernel of pre's dx, which is written in dx's dtype."""
    tile = dx_config(b.device_props(), s.D, s.MP, b.dtype(x) == b.bf16)
    b.launch(
        mhc_pre_backward_dx,
        (s.n * (-(-s.D // tile.BD)) * b.cdiv(s.T, tile.R), 1, 1),
        dict(
            x_ptr=x, dh_in_ptr=dh_in, h_pre_ptr=h_pre, rows_ptr=d.rows, cx_ptr=d.cx, phi_ptr=phi, gamma_ptr=gamma,
            dx_acc_ptr=dx_acc, dx_ptr=dx, T=s.T,
        ),
        dict(
            D=s.D, N=s.n, M=s.M, MP=s.MP, R=tile.R, BD=tile.BD, HAS_DIN=dh_in is not None, HAS_ACC=dx_acc is not None,
            HAS_GAMMA=gamma is not None, TERMS=d.terms, PREC=d.prec,
        ),
        tile.num_warps, tile.num_stages,
    )  # fmt: skip


def param_grads(b: Any, s: Dims, d: LogitGrads, x: Any, phi: Any, gamma: Any, grads: tuple[Any, ...]) -> None:
    """Launches the kernels of dphi, dalpha, dbias and dgamma: one reduction over tokens."""
    dphi, dalpha, dbias, dgamma = grads
    A = b.static(b.shape(dalpha)[0])
    chunk = dphi_config(b.device_props(), s.K, s.MP, d.terms)
    parts = chunk.C * chunk.Z
    part = b.empty((parts, s.MP, s.K), b.f32)
    b.launch(
        mhc_pre_backward_dphi,
        (-(-s.K // chunk.BK), parts, 1),
        dict(x_ptr=x, cols_ptr=d.cols, part_ptr=part, T=s.T, TP=d.TP, STEPS=b.cdiv(b.cdiv(s.T, chunk.R), chunk.C)),
        dict(
            K=s.K, M=s.M, MP=s.MP, FOLD=chunk.FOLD, C=chunk.C, Z=chunk.Z, R=chunk.R, BK=chunk.BK, TERMS=d.terms,
            PREC=d.prec,
        ),
        chunk.num_warps, chunk.num_stages,
    )  # fmt: skip
    f = finish_config(s.MP)
    b.launch(
        mhc_pre_backward_finish,
        (-(-s.K // f.BK) + 1, 1, 1),
        dict(
            part_ptr=part, red_ptr=d.red, phi_ptr=phi, gamma_ptr=gamma, dphi_ptr=dphi,
            dgamma_ptr=dgamma if gamma is not None else None, dalpha_ptr=dalpha, dbias_ptr=dbias, P=d.programs,
        ),
        dict(
            K=s.K, M=s.M, MP=s.MP, A=A, RP=pow2(s.M + A), PARTS=parts, BK=f.BK, BP=f.BP, HAS_GAMMA=gamma is not None,
        ),
        f.num_warps, 1,
    )  # fmt: skip


def _pre_backward(
    b: Any, dh_in: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_mix: Any, inv_rms: Any, dx_acc: Any, post_mult: float, iters: int, sinkhorn_eps: float, form: str, has_post: bool,
    norm_eps: float, norm_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    s = dims(b, x, phi)
    params = (phi, alpha, bias, gamma)
    if b.is_static(s.T) and s.T == 0:
        return zero_grads(b, x, x, *params)
    dx, *dparams = empty_grads(b, x, x, *params)
    x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dh_in, dh_post, dh_res, dx_acc = contiguous(
        b, x, *params, h_pre, h_mix, inv_rms, dh_in, dh_post, dh_res, dx_acc
    )
    d = logit_grads(
        b, s, collapse_dots(b, s, dh_in, x), dh_post, dh_res, x, alpha, bias, h_mix, inv_rms, post_mult, iters,
        sinkhorn_eps, form, has_post, norm_eps, norm_form,
    )  # fmt: skip
    pre_dx(b, s, d, dh_in, x, phi, gamma, h_pre, dx_acc, dx)
    param_grads(b, s, d, x, phi, gamma, tuple(dparams))
    return dx, *dparams


def plan_mhc_pre_backward(
    b: Any, dh_in: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_post: Any, h_mix: Any, inv_rms: Any, dx_acc: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_pre_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    return _pre_backward(
        b, dh_in, dh_post, dh_res, x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_acc, post_mult,
        sinkhorn_iters, sinkhorn_eps, sinkhorn_form, True, norm_eps, norm_form,
    )  # fmt: skip


def plan_mhc_head_backward(
    b: Any, dh_in: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any,
    dx_acc: Any, norm_eps: float, hc_eps: float, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_head_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    return _pre_backward(
        b, dh_in, None, None, x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_acc, 0.0, 0, 0.0, "softmax", False,
        norm_eps, norm_form,
    )  # fmt: skip


def plan_mhc_sinkhorn(b: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    """Launches ``mhc_sinkhorn``; returns the matrix."""
    *lead, n, _ = b.shape(h_res)
    n = b.static(n)
    T = numel(lead)
    h_res = b.contiguous(h_res)
    out = b.empty(b.shape(h_res), b.dtype(h_res))
    if b.is_static(T) and T == 0:
        return out
    r = rows_config(n)
    b.launch(
        mhc_sinkhorn, (b.cdiv(T, r.BC), 1, 1), dict(logits_ptr=h_res, out_ptr=out, T=T, eps=eps),
        dict(N=n, NP=pow2(n), BC=r.BC, ITERS=iters, FORM=FORMS[form]), r.num_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_sinkhorn_backward(b: Any, grad: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    """Launches ``mhc_sinkhorn_backward``; returns the gradient of h_res."""
    *lead, n, _ = b.shape(h_res)
    n = b.static(n)
    T = numel(lead)
    grad, h_res = b.contiguous(grad), b.contiguous(h_res)
    out = b.empty(b.shape(h_res), b.dtype(h_res))
    if b.is_static(T) and T == 0:
        return out
    r = rows_config(n)
    sums = b.empty((2 * iters, T, n), b.f32)
    b.launch(
        mhc_sinkhorn_backward, (b.cdiv(T, r.BC), 1, 1),
        dict(grad_ptr=grad, logits_ptr=h_res, out_ptr=out, sums_ptr=sums, T=T, eps=eps),
        dict(N=n, NP=pow2(n), BC=r.BC, ITERS=iters, FORM=FORMS[form]), r.num_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_post(b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool) -> Any:
    """Launches ``mhc_post``; returns the new streams."""
    return post(b, x, f_out, h_post, h_res, None, transpose_res)[0]


def post(b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, h_pre: Any, transpose_res: bool) -> tuple[Any, Any]:
    """Launches post; returns the new streams and, with weights ``h_pre``, what these collapse them to, else None."""
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    T = numel(lead)
    out = b.empty(b.shape(x), b.dtype(x))
    h_in = None if h_pre is None else b.empty((*lead, D), b.dtype(x))
    if b.is_static(T) and T == 0:
        return out, h_in
    x, f_out, h_post, h_res, h_pre = contiguous(b, x, f_out, h_post, h_res, h_pre)
    c = post_config(D, n)
    b.launch(
        mhc_post, (T * (-(-D // c.BD)), 1, 1),
        dict(
            x_ptr=x, f_ptr=f_out, h_post_ptr=h_post, h_res_ptr=h_res, out_ptr=out, h_pre_ptr=h_pre, h_in_ptr=h_in,
        ),
        dict(
            D=D, N=n, BD=c.BD, HAS_RES=h_res is not None, TRANSPOSE=transpose_res, COLLAPSE=h_pre is not None,
        ),
        c.num_warps, 1,
    )  # fmt: skip
    return out, h_in


def plan_mhc_post_backward(
    b: Any, g: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool
) -> tuple[Any, ...]:
    """Launches ``mhc_post_backward``; returns (dx, df, dh_post, dh_res)."""
    *lead, _, _ = b.shape(x)
    T = numel(lead)
    grads = empty_grads(b, x, x, f_out, h_post, h_res)
    if b.is_static(T) and T == 0:
        return grads
    g, x, f_out, h_post, h_res = contiguous(b, g, x, f_out, h_post, h_res)
    post_grads(b, g, x, f_out, h_post, h_res, transpose_res, grads)
    return grads


def post_grads(
    b: Any, g: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool, grads: tuple[Any, ...],
    dh_in: Any = None, dh_pre: Any = None,
) -> None:  # fmt: skip
    """Launches the kernel of post's gradients, all contiguous; writes (dx, df, dh_post, dh_res) to ``grads``.

    With ``dh_in``, the gradient of the collapsed streams, also writes that of the collapse's weights to ``dh_pre``.
    """
    dx, df, dh_post, dh_res = grads
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    itemsize = max(b.dtype(v).itemsize for v in (x, f_out, g))
    c = post_backward_config(b.device_props(), D, n, itemsize, dh_in is not None)
    b.launch(
        mhc_post_backward, (numel(lead), 1, 1),
        dict(
            g_ptr=g, x_ptr=x, f_ptr=f_out, h_post_ptr=h_post, h_res_ptr=h_res, dh_in_ptr=dh_in, dx_ptr=dx, df_ptr=df,
            dh_post_ptr=dh_post, dh_res_ptr=dh_res if h_res is not None else None, dh_pre_ptr=dh_pre,
        ),
        dict(
            D=D, N=n, BD=c.BD, HAS_RES=h_res is not None, TRANSPOSE=transpose_res, COLLAPSE=dh_in is not None,
        ),
        c.num_warps, 1,
    )  # fmt: skip
