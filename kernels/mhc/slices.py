# SPDX-License-Identifier: Apache-2.0
"""Coefficients and collapse from partial sums over slices of columns, which ``gluon_post_project.py`` writes.

The formulas are those of ``pre.py``, for four streams; part[S, T, MP] has each slice's products with phi's rows and
its sum of squares. A program has BC tokens (coefficients) or BD columns of one token (h_in = sum_i h_pre[i] * x[i]),
in one launch. Bytes bound it: the streams are read once more and h_in is written. The S parts of a token are summed as
one tile [S, 4]: added one after the other, they were slower (docs/tuning.md).
"""

import triton
import triton.language as tl

from .contracted import logit, norm_factor
from .pre import as_fp32, coefficients, collapse_place, load_streams, store_collapsed


@triton.jit
def collapse(
    xs, ss, h, alpha_ptr, bias_ptr, h_in_ptr, t, d, norm_eps, hc_eps,
    D: tl.constexpr, BD: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Stores columns d of token t's h_in from its sum of squares and its products h with the rows of h_pre."""
    N: tl.constexpr = 4
    K: tl.constexpr = N * D
    i = tl.arange(0, N)
    inv, _ = norm_factor(ss, K, norm_eps, OUTSIDE)
    bias = tl.load(bias_ptr + i).to(tl.float32)
    pre = tl.sigmoid(logit(tl.load(alpha_ptr).to(tl.float32), h, inv, bias)) + hc_eps
    store_collapsed(h_in_ptr, t, d, xs, pre, D, N, BD)


@triton.jit
def mhc_slices_collapse(
    x_ptr, part_ptr, alpha_ptr, bias_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, CP,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr,
    BD: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Does what ``mhc_pre_collapse`` does, for four streams; the S parts of a token are summed as one tile."""
    pid = tl.program_id(0)
    N: tl.constexpr = 4
    K: tl.constexpr = N * D
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = as_fp32(norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    if pid < CP:
        coefficients(
            pid, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, S,
            norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
            K, N, N, M, MP, S, S, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
        )  # fmt: skip
    else:
        t, d = collapse_place(pid - CP, T, D, BD)
        xs = load_streams(x_ptr, t, d, D, N, False)
        s = tl.arange(0, SP)
        i = tl.arange(0, N)
        at = part_ptr + (tl.cast(T, tl.int64) * s + t) * MP
        ss = tl.sum(tl.load(at + M, mask=s < S, other=0.0), axis=0)
        h = tl.sum(tl.load(at[:, None] + i[None, :], mask=(s < S)[:, None], other=0.0), axis=0)  # [N]
        collapse(xs, ss, h, alpha_ptr, bias_ptr, h_in_ptr, t, d, norm_eps, hc_eps, D, BD, OUTSIDE)
