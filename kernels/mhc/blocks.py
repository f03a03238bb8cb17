# SPDX-License-Identifier: Apache-2.0
"""Coefficients and collapse of few tokens from partial sums over blocks of columns, which ``gluon_few.py`` writes.

The formulas are those of ``pre.py``, for four streams. part[D / 32, T, MP] has for each block of 32 columns of every
stream the products with phi's rows and four sums of squares. The blocks of a slice are added one after the other, as
``gluon_post_project.py`` adds them; then the slices in the order of ``slices.py``: a token has the bits that those two
kernels give it. One program a token for the coefficients, others for BD columns of one token's h_in, in one launch.
With few tokens latency bounds it: a program asks for all parts of its token at once, as tiles [slices, columns], and
then adds.
"""

import triton
import triton.language as tl

from .pre import as_fp32, collapse_place, load_streams, token_coefficients
from .slices import collapse


@triton.jit
def _slices(
    part_ptr, t, T, FIRST: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr, MP: tl.constexpr, BLOCKS: tl.constexpr,
    NB: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Returns COLUMNS columns of token t's parts from FIRST on, [SP, W]: each slice's blocks one after the other."""
    s = tl.arange(0, SP)[:, None]
    m = tl.arange(0, W)[None, :]
    parts = tl.zeros((SP, W), tl.float32)
    for b in tl.static_range(NB):
        block = s * NB + b
        at = part_ptr + (tl.cast(T, tl.int64) * block + t) * MP + FIRST + m
        parts += tl.load(at, mask=(block < BLOCKS) & (m < COLUMNS), other=0.0)
    return parts


@triton.jit
def _squares(parts, FIRST: tl.constexpr):
    """Returns the sum of columns FIRST to FIRST + 4 of parts, in the order of the other kernel's sum over lanes."""
    m = tl.arange(0, parts.shape[1])[None, :]
    q = ()
    for o in tl.static_range(4):
        q = q + (tl.sum(tl.where(m == FIRST + o, parts, 0.0), axis=1),)
    return (q[0] + q[2]) + (q[1] + q[3])


@triton.jit
def _rows(x):
    """Returns the rows of x, whose number is a power of two, as a tuple."""
    N: tl.constexpr = x.shape[1]
    H: tl.constexpr = x.shape[0] // 2
    if H > 0:
        low, high = tl.split(tl.permute(tl.reshape(tl.trans(x), (N, 2, H)), (0, 2, 1)))
        rows = _rows(tl.trans(low)) + _rows(tl.trans(high))
    else:
        rows = (tl.reshape(x, (N,)),)
    return rows


@triton.jit
def _coefficients(
    t, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BLOCKS: tl.constexpr, NB: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, BC: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr,
    FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of token t."""
    parts = _slices(part_ptr, t, T, 0, M + 4, MP, MP, BLOCKS, NB, SP)
    # The sum of squares takes the place of product M.
    parts = tl.where((tl.arange(0, MP) == M)[None, :], _squares(parts, M)[:, None], parts)
    slices = _rows(parts)
    mix = tl.zeros((MP,), tl.float32)
    for g in tl.static_range(S):
        mix += slices[g]
    total = tl.sum(tl.where(tl.arange(0, MP) == M, mix, 0.0), axis=0)
    token_coefficients(
        t, mix, total, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr,
        norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
        4 * D, 4, 4, M, MP, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def mhc_blocks_coefficients(
    part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, NB: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    BC: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of one token."""
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = as_fp32(norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    _coefficients(
        tl.program_id(0).to(tl.int64), part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr,
        inv_ptr, T, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
        D, M, MP, D // 32, NB, S, SP, BC, True, HAS_RES, ITERS, FORM, OUTSIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "CP"])
def mhc_blocks_collapse(
    x_ptr, part_ptr, alpha_ptr, bias_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, CP,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, NB: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr,
    FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of one token (programs below CP) or BD columns of one token's h_in (the others)."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = D // 32
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = as_fp32(norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    if pid < CP:
        _coefficients(
            pid.to(tl.int64), part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T,
            norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
            D, M, MP, BLOCKS, NB, S, SP, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
        )  # fmt: skip
    else:
        t, d = collapse_place(pid - CP, T, D, BD)
        xs = load_streams(x_ptr, t, d, D, 4, False)
        h = _slices(part_ptr, t, T, 0, 4, 4, MP, BLOCKS, NB, SP)
        ss = _squares(_slices(part_ptr, t, T, M, 4, 4, MP, BLOCKS, NB, SP), 0)
        collapse(
            xs, tl.sum(ss, axis=0), tl.sum(h, axis=0), alpha_ptr, bias_ptr, h_in_ptr, t, d, norm_eps, hc_eps, D, BD,
            OUTSIDE,
        )  # fmt: skip
