# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the mHC ops: which kernels, on which grid, with which configuration.

Each plan is written once against a builder (``kernels/launch.py`` eagerly, ``lowerings/builder.py`` in Inductor). A
configuration depends on n, D, dtypes and the device, never on the token count T, because T may be symbolic and a
token's bits must not depend on the batch around it. Small T uses the same launches, whose grids shrink with T.
"""

from __future__ import annotations

from typing import Any

from mhc_inductor.log import warn_once

from ..launch import launch
from ..operands import contiguous, power_of_two, without_kernel
from . import gluon
from .backward import (
    mhc_pre_backward_coefficients,
    mhc_pre_backward_dots,
    mhc_pre_backward_dphi,
    mhc_pre_backward_dx,
    mhc_pre_backward_finish,
)
from .common import mhc_sinkhorn, mhc_sinkhorn_backward
from .config import (
    FINISH_COLUMNS,
    FINISH_ROWS,
    GROUP,
    GROUPS,
    SMALL_T,
    PreConfig,
    dots_config,
    dphi_config,
    dx_config,
    post_backward_config,
    post_config,
    pre_config,
    pre_few,
    rows_config,
)
from .post import mhc_post, mhc_post_backward
from .pre import mhc_pre_collapse, mhc_pre_project, mhc_pre_weights
from .sizes import FORMS, OUTSIDE, Dims, Options, dims, nothing, numel, of_tokens, outputs


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
    launch(
        b, mhc_pre_weights, (s.MP, -(-s.K // columns)), (4, 1), s.values(), phi=phi, gamma=gamma, w=w, BK=columns,
        HAS_GAMMA=gamma is not None, TERMS=terms,
    )  # fmt: skip
    return w


def launch_collapse(
    b: Any, kernel: Any, s: Dims, c: Any, warps: int, values: dict[str, Any], tokens: int = 0, **more: Any
) -> None:
    """Launches a kernel of coefficients and collapse with the values of :func:`of_tokens`.

    ``more`` are those that only this kernel takes; ``tokens`` is the number of tokens of a coefficients program, if it is
    not BC.
    """
    programs = b.cdiv(s.T, tokens or c.BC)
    grid = programs + s.T * (-(-s.D // c.BD))
    launch(b, kernel, grid, (warps, 1), values, CP=programs, BC=c.BC, BD=c.BD, **more)


def plan_pre(b: Any, x: Any, params: tuple[Any, ...], o: Options, has_post: bool = True) -> tuple[Any, ...]:
    """Launches pre, or the head without ``has_post``; returns (h_in, h_post, h_res, h_pre, h_mix, inv_rms).

    params: (phi, alpha, bias, gamma).
    """
    s = dims(b, x, params[0])
    out = outputs(b, s, b.dtype(x), has_post)
    if not nothing(b, s.T):
        x, params = b.contiguous(x), contiguous(b, *params)
        c = pre_config(b.device_props(), s.K, s.D, s.MP, b.dtype(x) == b.bf16)
        part, RUN = project(b, s, c, x, params[0], params[3])
        one = pre_few(b, x, s.T)
        launch_collapse(
            b, mhc_pre_collapse, s, c, c.collapse_warps, of_tokens(s, out, params, o), int(one), x=x, part=part, RUN=RUN,
            GROUPS=GROUPS, GROUP=GROUP, FEW=one,
        )  # fmt: skip
    return tuple(out.values())


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
    launch(
        b, mhc_pre_project, (b.cdiv(s.T, c.BT), parts), c, s.values(), x=x, w=w, gamma=gamma if split else None, part=part,
        RUN=RUN, KS=KS, EVEN=s.K == KS * GROUPS * GROUP, SPLIT=split, HAS_GAMMA=split and gamma is not None, TERMS=terms,
        PREC=prec,
    )  # fmt: skip
    return part, RUN


def _one_read(b: Any, x: Any, params: tuple[Any, ...], o: Options) -> tuple[Any, ...] | None:
    """Launches pre with one read of x (``gluon_one_read.py``); returns None if the other kernels must run."""
    kernel = gluon.one_read(b, x)
    if kernel is None:
        return None
    s = dims(b, x, params[0])
    out = outputs(b, s, b.bf16)
    if s.T == 0:
        return tuple(out.values())
    x, params = b.contiguous(x), contiguous(b, *params)
    G, tiles = s.D // gluon.COLUMNS, b.cdiv(s.T, 16)
    values = dict(
        of_tokens(s, out, params, o), ITERS=o.iters, x=b.aligned(x), tiles=tiles, G=G, GP=16 if G <= 16 else 32,
        # A counter per group and five sums per token, all 0 at first; the other sums.
        words=b.zeros((gluon.COUNTERS + tiles * G * 80,), b.i32), part=b.empty((tiles * G * 320,), b.f32),
    )  # fmt: skip
    groups = min(tiles, b.device_props().sm_count // G)
    try:
        launch(b, kernel, groups * G, (gluon.WARPS, 1), values, launch_cooperative_grid=True)
    except RuntimeError as error:
        if "cooperative" not in str(error):
            raise
        gluon.refused.add(b.device)
        warn_once(
            "one read", f"mHC reads x twice on {b.device}, which cannot hold the kernel's programs at once: {error}"
        )
        return None
    return tuple(out.values())


def plan_mhc_pre(b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, *options: Any) -> tuple[Any, ...]:
    """Launches ``mhc_pre``; returns (h_in, h_post, h_res, h_pre, h_mix, inv_rms)."""
    params, o = (phi, alpha, bias, gamma), Options(*options)
    return _one_read(b, x, params, o) or plan_pre(b, x, params, o)


def plan_mhc_head(
    b: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, norm_eps: float, hc_eps: float,
    norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_head``; returns (h_in, h_pre, h_mix, inv_rms)."""
    o = Options(norm_eps, hc_eps, norm_form=norm_form)
    h_in, _, _, *rest = plan_pre(b, x, (phi, alpha, bias, gamma), o, False)
    return h_in, *rest


def empty_grads(b: Any, *inputs: Any) -> tuple[Any, ...]:
    """Allocates each input's gradient, with shape [0] and the first one's dtype for an input of None."""
    return tuple(b.empty((0,), b.dtype(inputs[0])) if v is None else b.empty(b.shape(v), b.dtype(v)) for v in inputs)


def _dots(b: Any, s: Dims, dh_in: Any, x: Any) -> Any:
    """Launches the kernel of <dh_in, x[i]> [T, n], the gradient of h_pre; returns None without ``dh_in``."""
    if dh_in is None:
        return None
    dots = b.empty((s.T, s.n), b.f32)
    launch(b, mhc_pre_backward_dots, s.T, dots_config(s.D, s.n), s.values(), dh_in=dh_in, x=x, dots=dots)
    return dots


def _logit_grads(
    b: Any, s: Dims, coefficients: tuple[Any, ...], x: Any, alpha: Any, bias: Any, h_mix: Any, inv: Any, o: Options,
    has_post: bool,
) -> dict[str, Any]:  # fmt: skip
    """Launches the coefficients' backward, which computes dh_mix; all tensors must be contiguous.

    Returns the values that dx and the parameter gradients need (see ``backward.py``).
    """
    dh_pre, dh_post, dh_res = coefficients
    if not s.has_res:
        dh_res = None
    r = rows_config(s.n)
    programs = b.cdiv(s.T, r.BC)
    terms, prec = precision(b, x)
    # dx reads dh_mix by rows, dphi by columns, which are padded to whole tiles.
    TP = b.cdiv(s.T, 64) * 64
    dt, RP = b.bf16 if terms else b.f32, power_of_two(s.M + b.static(b.shape(alpha)[0]))
    d: dict[str, Any] = dict(
        rows=b.empty((2 if terms else 1, s.T, s.MP), dt), cols=b.empty(((terms or 1) * s.MP, TP), dt),
        cx=b.empty((s.T,), b.f32), red=b.empty((programs, RP), b.f32), P=programs, TP=TP, RP=RP, TERMS=terms, PREC=prec,
    )  # fmt: skip
    sums = b.empty((2 * o.iters, s.T, s.n), b.f32) if o.iters and dh_res is not None else None
    launch(
        b, mhc_pre_backward_coefficients, programs, r, s.values(), o.values(s.has_res), d, dots=dh_pre, dh_post=dh_post,
        dh_res=dh_res, alpha=alpha, bias=bias, h_mix=h_mix, inv=inv, sums=sums,
        norm_eps=o.norm_eps if OUTSIDE[o.norm_form] else None, HAS_DIN=dh_pre is not None, HAS_POST=has_post,
        HAS_DPOST=dh_post is not None, HAS_DRES=dh_res is not None,
    )  # fmt: skip
    return d


def _pre_dx(
    b: Any, s: Dims, d: dict[str, Any], dh_in: Any, x: Any, phi: Any, gamma: Any, h_pre: Any, dx_acc: Any, dx: Any
) -> None:
    """Launches the kernel of pre's dx, which is written in dx's dtype."""
    tile = dx_config(b.device_props(), s.D, s.MP, b.dtype(x) == b.bf16)
    launch(
        b, mhc_pre_backward_dx, s.n * (-(-s.D // tile.BD)) * b.cdiv(s.T, tile.R), tile, s.values(), d, x=x, dh_in=dh_in,
        h_pre=h_pre, phi=phi, gamma=gamma, dx_acc=dx_acc, dx=dx, HAS_DIN=dh_in is not None, HAS_ACC=dx_acc is not None,
        HAS_GAMMA=gamma is not None,
    )  # fmt: skip


def _param_grads(b: Any, s: Dims, d: dict[str, Any], x: Any, phi: Any, gamma: Any, grads: tuple[Any, ...]) -> None:
    """Launches the kernels of dphi, dalpha, dbias and dgamma: one reduction over tokens."""
    dphi, dalpha, dbias, dgamma = grads
    chunk = dphi_config(b.device_props(), s.K, s.MP, d["TERMS"])
    parts = chunk.C * chunk.Z
    part = b.empty((parts, s.MP, s.K), b.f32)
    steps = b.cdiv(b.cdiv(s.T, chunk.R), chunk.C)
    launch(b, mhc_pre_backward_dphi, (-(-s.K // chunk.BK), parts), chunk, s.values(), d, x=x, part=part, STEPS=steps)
    launch(
        b, mhc_pre_backward_finish, -(-s.K // FINISH_COLUMNS) + 1, (4, 1), s.values(), d, part=part, phi=phi, gamma=gamma, dphi=dphi,
        dgamma=dgamma if gamma is not None else None, dalpha=dalpha, dbias=dbias, A=b.static(b.shape(dalpha)[0]),
        PARTS=parts, BK=FINISH_COLUMNS, BP=FINISH_ROWS, HAS_GAMMA=gamma is not None,
    )  # fmt: skip


def backward(
    b: Any, x: Any, params: tuple[Any, ...], h_pre: Any, h_mix: Any, inv: Any, dx_acc: Any, dh_in: Any,
    coefficients: tuple[Any, ...], o: Options, has_post: bool = True, site: tuple[Any, ...] = (),
    transpose_res: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches the backward of an op that computes coefficients from the streams ``x``, and what came before them.

    Args:
        b: The builder.
        x: The streams.
        params: (phi, alpha, bias, gamma).
        h_pre: The weights that collapsed x to h_in.
        h_mix: What the forward saved.
        inv: What the forward saved.
        dx_acc: A further gradient of x, or None.
        dh_in: That of h_in, or None.
        coefficients: Those of h_pre, h_post and h_res; that of h_pre follows from dh_in where it is left out.
        o: The options.
        has_post: Whether there are coefficients besides h_pre.
        site: Nothing, or what post took to make x: (x, f_out, h_post, h_res), and h_pre if its weights were given, too.
        transpose_res: As post had it.

    Returns:
        The gradients of x or of the site, and of params.
    """
    inputs = (*(site or (x,)), *params)
    s = dims(b, x, params[0])
    grads = empty_grads(b, *inputs)
    if nothing(b, s.T):
        return tuple(g if v is None else b.zeros(b.shape(v), b.dtype(v)) for g, v in zip(grads, inputs, strict=True))
    x, h_pre, h_mix, inv, dx_acc, dh_in = contiguous(b, x, h_pre, h_mix, inv, dx_acc, dh_in)
    coefficients = contiguous(b, *coefficients)
    (phi, alpha, bias, gamma), site = contiguous(b, *params), contiguous(b, *site)
    if len(coefficients) < 3:
        coefficients = (_dots(b, s, dh_in, x), *coefficients)
    d = _logit_grads(b, s, coefficients, x, alpha, bias, h_mix, inv, o, has_post)
    # With a site, the whole gradient of x: dx_acc is added in fp32, and the sum is rounded once.
    g = b.empty(b.shape(x), b.dtype(x)) if site else grads[0]
    _pre_dx(b, s, d, dh_in, x, phi, gamma, h_pre, dx_acc, g)
    if len(site) == 4:
        _post_grads(b, g, site, transpose_res, grads[:4])
    elif site:
        dh_pre = grads[4] if dh_in is not None else b.zeros(b.shape(site[4]), b.dtype(site[4]))
        grads = (*grads[:4], dh_pre, *grads[5:])
        _post_grads(b, g, site[:4], transpose_res, grads[:4], dh_in, dh_pre)
    _param_grads(b, s, d, x, phi, gamma, grads[-4:])
    return grads


def plan_mhc_pre_backward(
    b: Any, dh_in: Any, dh_post: Any, dh_res: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any,
    h_post: Any, h_mix: Any, inv_rms: Any, dx_acc: Any, *options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_pre_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    params = (phi, alpha, bias, gamma)
    return backward(b, x, params, h_pre, h_mix, inv_rms, dx_acc, dh_in, (dh_post, dh_res), Options(*options))


def plan_mhc_head_backward(
    b: Any, dh_in: Any, x: Any, phi: Any, alpha: Any, bias: Any, gamma: Any, h_pre: Any, h_mix: Any, inv_rms: Any,
    dx_acc: Any, norm_eps: float, hc_eps: float, norm_form: str = "inside",
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``mhc_head_backward``; returns (dx, dphi, dalpha, dbias, dgamma)."""
    params, o = (phi, alpha, bias, gamma), Options(norm_eps, hc_eps, norm_form=norm_form)
    return backward(b, x, params, h_pre, h_mix, inv_rms, dx_acc, dh_in, (None, None), o, False)


def plan_mhc_sinkhorn(b: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    """Launches ``mhc_sinkhorn``; returns the matrix."""
    return _sinkhorn(b, mhc_sinkhorn, h_res, iters, eps, form)


def plan_mhc_sinkhorn_backward(b: Any, grad: Any, h_res: Any, iters: int, eps: float, form: str) -> Any:
    """Launches ``mhc_sinkhorn_backward``; returns the gradient of h_res."""
    return _sinkhorn(b, mhc_sinkhorn_backward, h_res, iters, eps, form, grad)


def _sinkhorn(b: Any, kernel: Any, h_res: Any, iters: int, eps: float, form: str, grad: Any = None) -> Any:
    *lead, n, _ = b.shape(h_res)
    n, T = b.static(n), numel(lead)
    grad, h_res = contiguous(b, grad, h_res)
    out = b.empty(b.shape(h_res), b.dtype(h_res))
    if nothing(b, T):
        return out
    r = rows_config(n)
    sums = None if grad is None else b.empty((2 * iters, T, n), b.f32)
    launch(
        b, kernel, b.cdiv(T, r.BC), r, grad=grad, logits=h_res, out=out, sums=sums, T=T, eps=eps, N=n, NP=power_of_two(n),
        ITERS=iters, FORM=FORMS[form],
    )  # fmt: skip
    return out


def plan_mhc_post(b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool) -> Any:
    """Launches ``mhc_post``; returns the new streams."""
    return post(b, x, f_out, h_post, h_res, None, transpose_res)[0]


def post(b: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, h_pre: Any, transpose_res: bool) -> tuple[Any, Any]:
    """Launches post; returns the new streams and, with weights ``h_pre``, what these collapse them to, else None."""
    s = dims(b, x)
    out = b.empty(b.shape(x), b.dtype(x))
    h_in = None if h_pre is None else b.empty((*s.lead, s.D), b.dtype(x))
    if nothing(b, s.T):
        return out, h_in
    x, f_out, h_post, h_res, h_pre = contiguous(b, x, f_out, h_post, h_res, h_pre)
    c = post_config(s.D, s.n)
    launch(
        b, mhc_post, s.T * (-(-s.D // c.BD)), c, s.values(), x=x, f=f_out, h_post=h_post, h_res=h_res, out=out,
        h_pre=h_pre, h_in=h_in, HAS_RES=h_res is not None, TRANSPOSE=transpose_res, COLLAPSE=h_pre is not None,
    )  # fmt: skip
    return out, h_in


def plan_mhc_post_backward(
    b: Any, g: Any, x: Any, f_out: Any, h_post: Any, h_res: Any, transpose_res: bool
) -> tuple[Any, ...]:
    """Launches ``mhc_post_backward``; returns (dx, df, dh_post, dh_res)."""
    grads = empty_grads(b, x, f_out, h_post, h_res)
    if not nothing(b, dims(b, x).T):
        site = contiguous(b, x, f_out, h_post, h_res)
        _post_grads(b, b.contiguous(g), site, transpose_res, grads)
    return grads


def _post_grads(
    b: Any, g: Any, site: tuple[Any, ...], transpose_res: bool, grads: tuple[Any, ...], dh_in: Any = None,
    dh_pre: Any = None,
) -> None:  # fmt: skip
    """Launches the kernel of post's gradients, all contiguous; writes (dx, df, dh_post, dh_res) to ``grads``.

    site: (x, f_out, h_post, h_res). With ``dh_in``, the gradient of the collapsed streams, also writes that of the
    collapse's weights to ``dh_pre``.
    """
    (x, f_out, h_post, h_res), (dx, df, dh_post, dh_res) = site, grads
    s = dims(b, x)
    itemsize = max(b.dtype(v).itemsize for v in (x, f_out, g))
    launch(
        b, mhc_post_backward, s.T, post_backward_config(b.device_props(), s.D, s.n, itemsize, dh_in is not None),
        s.values(), g=g, x=x, f=f_out, h_post=h_post, h_res=h_res, dh_in=dh_in, dx=dx, df=df, dh_post=dh_post,
        dh_res=dh_res if h_res is not None else None, dh_pre=dh_pre, HAS_RES=h_res is not None, TRANSPOSE=transpose_res,
        COLLAPSE=dh_in is not None,
    )  # fmt: skip
