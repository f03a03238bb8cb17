"""Launch plans of the mHC ops: which kernels, on which grid, with which configuration.

Written once against a builder (``kernels/launch.py`` eagerly, ``lowerings/builder.py`` in Inductor). A configuration
depends on n, D, dtypes and the device, never on the token count T: T may be symbolic, and a token's bits must not
depend on the batch around it. Small T is served by the same launches, whose grids shrink with T.
"""

from __future__ import annotations

from typing import Any

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
    dots_config,
    dphi_config,
    dx_config,
    finish_config,
    post_backward_config,
    post_config,
    pre_config,
    rows_config,
)
from .post import mhc_post, mhc_post_backward
from .pre import mhc_pre_collapse, mhc_pre_project, mhc_pre_weights
from .sinkhorn import mhc_sinkhorn, mhc_sinkhorn_backward

FORMS = {"softmax": 0, "exp": 1}
FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Why these inputs run the reference instead of the kernels; None when they run the kernels."""
    for t in tensors:
        if t is not None and str(b.dtype(t)) not in FLOATS:
            return f"dtype {b.dtype(t)} has no kernel"
    return None


def _numel(shape: Any) -> Any:
    total: Any = 1
    for s in shape:
        total = total * s
    return total


def _pow2(v: int) -> int:
    return 1 << (v - 1).bit_length()


def _terms(b: Any, x: Any, *weights: Any) -> tuple[int, str]:
    """(bf16 terms of an fp32 factor, input_precision of an fp32 product); see docs/design.md, precision."""
    if b.dtype(x) != b.bf16:
        return 0, "tf32x3" if b.device_props().backend == "cuda" else "ieee"
    if weights and all(w is None for w in weights[1:]) and b.dtype(weights[0]) == b.bf16:
        return 1, "ieee"
    return (3 if b.precision == "highest" else 2), "ieee"


def _pre(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float,
    post_mult: float, post_eps: float, iters: int, sinkhorn_eps: float, form: str, has_post: bool,
) -> tuple[Any, ...]:  # fmt: skip
    *lead, n, D = b.shape(x)
    n, D, M = b.static(n), b.static(D), b.static(b.shape(phi)[0])
    T = _numel(lead)
    has_res = 2 * n < M
    K = n * D
    x, phi, alpha, bias = (b.contiguous(v) for v in (x, phi, alpha, bias))
    gamma = None if gamma is None else b.contiguous(gamma)
    res = (n, n) if has_res else (0, 0)
    h_in = b.empty((*lead, D), b.dtype(x))
    h_pre = b.empty((*lead, n), b.f32)
    h_post = b.empty((*lead, n), b.f32) if has_post else None
    h_res = b.empty((*lead, *res), b.f32) if has_post else None
    h_mix = b.empty((*lead, M), b.f32)
    inv_rms = b.empty(tuple(lead), b.f32)
    out = (h_in, h_post, h_res, h_pre, h_mix, inv_rms)
    if b.is_static(T) and T == 0:
        return out
    terms, prec = _terms(b, x, phi, gamma)
    MP = max(16, _pow2(M + 1))
    c = pre_config(b.device_props(), K, D, MP, b.dtype(x) == b.bf16)
    # A section is 1 / (GROUPS * GROUP) of K; few tokens: one section a program, so that decoding fills the chip.
    KS = -(-K // (GROUPS * GROUP * c.BK)) * c.BK
    many = b.min(b.cdiv(T, SMALL_T) - 1, 1)
    RUN = 1 + (GROUP - 1) * many
    parts = GROUPS * (GROUP - (GROUP - 1) * many)
    w = b.empty((terms or 1, MP, K), b.bf16 if terms else b.f32)
    b.launch(
        mhc_pre_weights,
        (MP, -(-K // c.WK), 1),
        dict(phi_ptr=phi, gamma_ptr=gamma, w_ptr=w),
        dict(K=K, M=M, MP=MP, BK=c.WK, HAS_GAMMA=gamma is not None, TERMS=terms), 4, 1,
    )  # fmt: skip
    part = b.empty((parts, T, MP), b.f32)
    b.launch(
        mhc_pre_project,
        (b.cdiv(T, c.BT), parts, 1),
        dict(x_ptr=x, w_ptr=w, part_ptr=part, T=T, RUN=RUN),
        dict(K=K, M=M, MP=MP, KS=KS, BT=c.BT, BK=c.BK, EVEN=K == KS * GROUPS * GROUP, TERMS=terms, PREC=prec),
        c.num_warps, c.num_stages,
    )  # fmt: skip
    coefficient_programs = b.cdiv(T, c.BC)
    b.launch(
        mhc_pre_collapse,
        (coefficient_programs + T * (-(-D // c.BD)), 1, 1),
        dict(
            x_ptr=x, part_ptr=part, alpha_ptr=alpha, bias_ptr=bias, h_in_ptr=h_in, h_pre_ptr=h_pre,
            h_post_ptr=h_post, h_res_ptr=h_res if has_res else None, h_mix_ptr=h_mix, inv_ptr=inv_rms, T=T, RUN=RUN,
            CP=coefficient_programs, norm_eps=norm_eps, hc_eps=hc_eps, post_mult=post_mult, post_eps=post_eps,
            sinkhorn_eps=sinkhorn_eps,
        ),
        dict(
            D=D, N=n, NP=_pow2(n), M=M, MP=MP, GROUPS=GROUPS, GROUP=GROUP, BC=c.BC, BD=c.BD, HAS_POST=has_post,
            HAS_RES=has_res, ITERS=iters if has_res else 0, FORM=FORMS[form],
        ),
        c.collapse_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_pre(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    return _pre(
        b, x, phi, alpha, bias, gamma, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_iters, sinkhorn_eps,
        sinkhorn_form, True,
    )  # fmt: skip


def plan_mhc_head(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float
) -> tuple[Any, ...]:
    h_in, _, _, h_pre, h_mix, inv_rms = _pre(
        b, x, phi, alpha, bias, gamma, norm_eps, hc_eps, 0.0, 0.0, 0, 0.0, "softmax", False
    )
    return h_in, h_pre, h_mix, inv_rms


def _pre_backward(
    b: Any, dh_in: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_mix: Any, inv_rms: Any, dx_acc: Any, post_mult: float, iters: int, sinkhorn_eps: float, form: str, has_post: bool,
) -> tuple[Any, ...]:  # fmt: skip
    *lead, n, D = b.shape(x)
    n, D, M = b.static(n), b.static(D), b.static(b.shape(phi)[0])
    A = b.static(b.shape(alpha)[0])
    T = _numel(lead)
    has_res = 2 * n < M
    K = n * D
    dx = b.empty(b.shape(x), b.dtype(x))
    shapes = [(b.shape(v), b.dtype(v)) for v in (phi, alpha, bias)]
    shapes.append(((0,), b.f32) if gamma is None else (b.shape(gamma), b.dtype(gamma)))
    if b.is_static(T) and T == 0:
        return (dx, *(b.zeros(*s) for s in shapes))
    dphi, dalpha, dbias, dgamma = (b.empty(*s) for s in shapes)
    x, phi, alpha, bias, h_pre, h_mix, inv_rms = (b.contiguous(v) for v in (x, phi, alpha, bias, h_pre, h_mix, inv_rms))
    gamma, dh_in, dh_post, dh_res, dx_acc = (
        None if v is None else b.contiguous(v) for v in (gamma, dh_in, dh_post, dh_res, dx_acc)
    )
    if not has_res:
        dh_res = None
    MP = max(16, _pow2(M + 1))
    RP = _pow2(M + A)
    props = b.device_props()
    dots = None
    if dh_in is not None:
        dots = b.empty((T, n), b.f32)
        c = dots_config(D, n)
        b.launch(
            mhc_pre_backward_dots, (T, 1, 1), dict(dh_in_ptr=dh_in, x_ptr=x, dots_ptr=dots),
            dict(D=D, N=n, BD=c.BD), c.num_warps, 1,
        )  # fmt: skip
    r = rows_config(n)
    programs = b.cdiv(T, r.BC)
    terms, prec = _terms(b, x)
    # dh_mix by rows for dx and by columns, padded to whole tiles, for dphi.
    TP = b.cdiv(T, 64) * 64
    dt = b.bf16 if terms else b.f32
    rows = b.empty((2 if terms else 1, T, MP), dt)
    cols = b.empty(((terms or 1) * MP, TP), dt)
    cx = b.empty((T,), b.f32)
    red = b.empty((programs, RP), b.f32)
    sums = b.empty((2 * iters, T, n), b.f32) if iters and dh_res is not None else None
    b.launch(
        mhc_pre_backward_coefficients,
        (programs, 1, 1),
        dict(
            dots_ptr=dots, dh_post_ptr=dh_post, dh_res_ptr=dh_res, alpha_ptr=alpha, bias_ptr=bias, h_mix_ptr=h_mix,
            inv_ptr=inv_rms, rows_ptr=rows, cols_ptr=cols, cx_ptr=cx, sums_ptr=sums, red_ptr=red, T=T, TP=TP,
            post_mult=post_mult,
            sinkhorn_eps=sinkhorn_eps,
        ),
        dict(
            K=K, N=n, NP=_pow2(n), M=M, MP=MP, RP=RP, BC=r.BC, HAS_DIN=dh_in is not None, HAS_POST=has_post,
            HAS_DPOST=dh_post is not None, HAS_RES=has_res, HAS_DRES=dh_res is not None,
            ITERS=iters if has_res else 0, FORM=FORMS[form], TERMS=terms,
        ),
        r.num_warps, 1,
    )  # fmt: skip
    tile = dx_config(props, D, MP, b.dtype(x) == b.bf16)
    b.launch(
        mhc_pre_backward_dx,
        (n * (-(-D // tile.BD)) * b.cdiv(T, tile.R * tile.STEPS), 1, 1),
        dict(
            x_ptr=x, dh_in_ptr=dh_in, h_pre_ptr=h_pre, rows_ptr=rows, cx_ptr=cx, phi_ptr=phi, gamma_ptr=gamma,
            dx_acc_ptr=dx_acc, dx_ptr=dx, T=T,
        ),
        dict(
            D=D, N=n, M=M, MP=MP, R=tile.R, STEPS=tile.STEPS, BD=tile.BD, HAS_DIN=dh_in is not None, HAS_ACC=dx_acc is not None,
            HAS_GAMMA=gamma is not None, TERMS=terms, PREC=prec,
        ),
        tile.num_warps, tile.num_stages,
    )  # fmt: skip
    chunk = dphi_config(props, K, MP, terms)
    parts = chunk.C * chunk.Z
    part = b.empty((parts, MP, K), b.f32)
    b.launch(
        mhc_pre_backward_dphi,
        (-(-K // chunk.BK), parts, 1),
        dict(x_ptr=x, cols_ptr=cols, part_ptr=part, T=T, TP=TP, STEPS=b.cdiv(b.cdiv(T, chunk.R), chunk.C)),
        dict(K=K, M=M, MP=MP, FOLD=chunk.FOLD, C=chunk.C, Z=chunk.Z, R=chunk.R, BK=chunk.BK, TERMS=terms, PREC=prec),
        chunk.num_warps, chunk.num_stages,
    )  # fmt: skip
    f = finish_config(MP)
    b.launch(
        mhc_pre_backward_finish,
        (-(-K // f.BK) + 1, 1, 1),
        dict(
            part_ptr=part, red_ptr=red, phi_ptr=phi, gamma_ptr=gamma, dphi_ptr=dphi,
            dgamma_ptr=dgamma if gamma is not None else None, dalpha_ptr=dalpha, dbias_ptr=dbias, P=programs,
        ),
        dict(K=K, M=M, MP=MP, A=A, RP=RP, PARTS=parts, BK=f.BK, BP=f.BP, HAS_GAMMA=gamma is not None),
        f.num_warps, 1,
    )  # fmt: skip
    return dx, dphi, dalpha, dbias, dgamma


def plan_mhc_pre_backward(
    b: Any, dh_in: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_post: Any, h_mix: Any, inv_rms: Any, dx_acc: Any, norm_eps: float, hc_eps: float, post_mult: float,
    post_eps: float, sinkhorn_iters: int, sinkhorn_eps: float, sinkhorn_form: str,
) -> tuple[Any, ...]:  # fmt: skip
    return _pre_backward(
        b, dh_in, dh_post, dh_res, x, phi, alpha, bias, gamma, h_pre, h_mix, inv_rms, dx_acc, post_mult,
        sinkhorn_iters, sinkhorn_eps, sinkhorn_form, True,
    )  # fmt: skip


def plan_mhc_head_backward(
    b: Any, dh_in: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any,
    dx_acc: Any, norm_eps: float, hc_eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    return _pre_backward(
        b,
        dh_in,
        None,
        None,
        x,
        phi,
        alpha,
        bias,
        gamma,
        h_pre,
        h_mix,
        inv_rms,
        dx_acc,
        0.0,
        0,
        0.0,
        "softmax",
        False,
    )


def plan_mhc_sinkhorn(b: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    *lead, n, _ = b.shape(h_res)
    n = b.static(n)
    T = _numel(lead)
    h_res = b.contiguous(h_res)
    out = b.empty(b.shape(h_res), b.dtype(h_res))
    if b.is_static(T) and T == 0:
        return out
    r = rows_config(n)
    b.launch(
        mhc_sinkhorn, (b.cdiv(T, r.BC), 1, 1), dict(logits_ptr=h_res, out_ptr=out, T=T, eps=eps),
        dict(N=n, NP=_pow2(n), BC=r.BC, ITERS=iters, FORM=FORMS[form]), r.num_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_sinkhorn_backward(b: Any, grad: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    *lead, n, _ = b.shape(h_res)
    n = b.static(n)
    T = _numel(lead)
    grad, h_res = b.contiguous(grad), b.contiguous(h_res)
    out = b.empty(b.shape(h_res), b.dtype(h_res))
    if b.is_static(T) and T == 0:
        return out
    r = rows_config(n)
    sums = b.empty((2 * iters, T, n), b.f32)
    b.launch(
        mhc_sinkhorn_backward, (b.cdiv(T, r.BC), 1, 1),
        dict(grad_ptr=grad, logits_ptr=h_res, out_ptr=out, sums_ptr=sums, T=T, eps=eps),
        dict(N=n, NP=_pow2(n), BC=r.BC, ITERS=iters, FORM=FORMS[form]), r.num_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_post(b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool) -> Any:
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    T = _numel(lead)
    x, f_out, h_post = (b.contiguous(v) for v in (x, f_out, h_post))
    h_res = None if h_res is None else b.contiguous(h_res)
    out = b.empty(b.shape(x), b.dtype(x))
    if b.is_static(T) and T == 0:
        return out
    c = post_config(D, n)
    b.launch(
        mhc_post, (T * (-(-D // c.BD)), 1, 1),
        dict(x_ptr=x, f_ptr=f_out, h_post_ptr=h_post, h_res_ptr=h_res, out_ptr=out),
        dict(D=D, N=n, BD=c.BD, HAS_RES=h_res is not None, TRANSPOSE=transpose_res), c.num_warps, 1,
    )  # fmt: skip
    return out


def plan_mhc_post_backward(
    b: Any, g: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool
) -> tuple[Any, ...]:
    *lead, n, D = b.shape(x)
    n, D = b.static(n), b.static(D)
    T = _numel(lead)
    g, x, f_out, h_post = (b.contiguous(v) for v in (g, x, f_out, h_post))
    h_res = None if h_res is None else b.contiguous(h_res)
    dx, df, dh_post = (b.empty(b.shape(v), b.dtype(v)) for v in (x, f_out, h_post))
    dh_res = b.empty((0,), b.f32) if h_res is None else b.empty(b.shape(h_res), b.dtype(h_res))
    if b.is_static(T) and T == 0:
        return dx, df, dh_post, dh_res
    c = post_backward_config(D, n, max(b.dtype(v).itemsize for v in (x, f_out, g)))
    b.launch(
        mhc_post_backward, (T, 1, 1),
        dict(
            g_ptr=g, x_ptr=x, f_ptr=f_out, h_post_ptr=h_post, h_res_ptr=h_res, dx_ptr=dx, df_ptr=df,
            dh_post_ptr=dh_post, dh_res_ptr=dh_res if h_res is not None else None,
        ),
        dict(D=D, N=n, BD=c.BD, HAS_RES=h_res is not None, TRANSPOSE=transpose_res), c.num_warps, 1,
    )  # fmt: skip
    return dx, df, dh_post, dh_res
