"""Collapse and coefficients from parts by slices of columns, as ``gluon_post_project.py`` leaves them."""

import triton
import triton.language as tl

from .pre import _coefficients


@triton.jit
def mhc_slices_collapse(
    x_ptr, part_ptr, alpha_ptr, bias_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, CP,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """``mhc_pre_collapse`` of four streams; the S parts of a token are summed as one tile."""
    pid = tl.program_id(0)
    N: tl.constexpr = 4
    K: tl.constexpr = N * D
    # Generated code passes Python floats as fp64.
    norm_eps = tl.cast(norm_eps, tl.float32)
    hc_eps = tl.cast(hc_eps, tl.float32)
    post_mult = tl.cast(post_mult, tl.float32)
    post_eps = tl.cast(post_eps, tl.float32)
    sinkhorn_eps = tl.cast(sinkhorn_eps, tl.float32)
    if pid < CP:
        _coefficients(
            pid, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, S,
            norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
            K, N, N, M, MP, S, S, BC, HAS_POST, HAS_RES, ITERS, FORM,
        )  # fmt: skip
    else:
        DT: tl.constexpr = (D + BD - 1) // BD
        # Last tokens first: they are what the projection left in L2.
        t = (T - 1 - (pid - CP) // DT).to(tl.int64)
        d = ((pid - CP) % DT) * BD + tl.arange(0, BD)
        dm = d < D
        xs = ()
        for i in tl.static_range(N):
            # What is read here last, post reads first.
            xs = xs + (tl.load(x_ptr + t * K + i * D + d, mask=dm, other=0.0, eviction_policy="evict_last"),)  # [BD]
        s = tl.arange(0, SP)
        i = tl.arange(0, N)
        at = part_ptr + (tl.cast(T, tl.int64) * s + t) * MP
        ss = tl.sum(tl.load(at + M, mask=s < S, other=0.0), axis=0)
        h = tl.sum(tl.load(at[:, None] + i[None, :], mask=(s < S)[:, None], other=0.0), axis=0)  # [N]
        inv = tl.rsqrt(ss / K + norm_eps)
        bias = tl.load(bias_ptr + i).to(tl.float32)
        pre = tl.sigmoid(tl.load(alpha_ptr).to(tl.float32) * (h * inv) + bias) + hc_eps
        o = tl.zeros((BD,), tl.float32)
        for k in tl.static_range(N):
            o += tl.sum(tl.where(i == k, pre, 0.0), axis=0) * xs[k].to(tl.float32)
        tl.store(h_in_ptr + t * D + d, o.to(h_in_ptr.dtype.element_ty), mask=dm)
