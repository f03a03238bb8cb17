# SPDX-License-Identifier: Apache-2.0
"""The attention's distribution over listed keys, summed over its heads, with wgmma (sm_90).

    out[b, s, j] = log of the sum over the heads of exp(scale * <q[head], k[keys[j]]> - lse[head])

A program has 64 heads of a query and three warpgroups. Two take tiles of 64 keys in turn: one reduces its weights over
the heads while the other's scores are computed. The third copies each key's row to shared memory once. The rows
gathered from the L2 bound it: 64 FLOP a byte.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..gluon_language import thread_barrier
from ..selection.gluon_list_tiles import (
    HB,
    LOG2E,
    NW,
    RING,
    allocate,
    copy_tiles,
    product,
    scores_layout,
    signal,
)

BN = gl.constexpr(64)  # keys of a tile


@gluon.jit
def _finite(top):
    """Returns maxima, 0 in place of infinite ones: what a log-sum-exp subtracts and adds again."""
    return gl.where(gl.abs(top) == float("inf"), 0.0, top)


@gluon.jit
def heads_of_tiles(
    tiles, bars, f_base, out_row, scale, hb, sfh, n, turn: gl.constexpr,
    H: gl.constexpr, KT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Computes log of the sum of exp(scale * x - f) over the heads, added to what other heads gave unless FIRST.

    Of every second tile, from the tile ``turn`` on.
    """
    q_l, q_r, q_t, _, _, _, _ = tiles
    q_ready, _, _, left_free, right_free = bars
    M: gl.constexpr = scores_layout(BN)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, M))
    live = head < H
    f = gl.load(f_base + head.to(gl.int64) * sfh, mask=live, other=0.0).to(gl.float32)
    f = gl.where(f == float("-inf"), 0.0, f) * LOG2E  # -inf: a query without keys
    qk = scale * LOG2E
    mbarrier.wait(q_ready.index(0), 0)
    for tile in range(turn, gl.cdiv(n, BN), 2):
        x = warpgroup_mma_wait(0, deps=(product(q_l, q_r, q_t, tiles, bars, tile, KT, BN),))
        signal(left_free.index(tile % RING))
        mbarrier.arrive(right_free.index(tile % RING), count=1)
        # The products of missing heads are 0, or NaN where a key has NaN or inf.
        x = gl.where(live[:, None], x * qk - f[:, None], float("-inf"))
        top = _finite(gl.max(x, axis=0))
        part = gl.log2(gl.sum(gl.exp2(x - top[None, :]), axis=0)) + top
        j = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, M))
        if not FIRST:
            old = gl.load(out_row + j, mask=j < n, other=float("-inf")) * LOG2E
            both = _finite(gl.maximum(old, part))
            part = gl.log2(gl.exp2(old - both) + gl.exp2(part - both)) + both
        gl.store(out_row + j, part * 0.6931471805599453, mask=j < n)


@gluon.jit(do_not_specialize=["S", "g", "hb", "so", "sqb", "sqs", "sqg", "skb", "skg", "sfb", "sfs", "sfg", "sfh"])
def index_list_target_wgmma(
    q_ptr, k_ptr, f_ptr, keys_ptr, counts_ptr, out_ptr, scale, S, N, g, hb, so,
    sqb, sqs, sqg, sqh, skb, skg, skn, sfb, sfs, sfg, sfh,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Computes out[B, S, so] of the heads hb of group g, from q[B, S, G, H, DK], k[B, G, T, DK] and keys[B, S, N].

    As ``loss.index_list_heads`` with its target. DV is a power of two; KT columns hold the other DK - DV. Programs [B, S].
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    row = gl.program_id(0).to(gl.int64)
    b = row // S
    s = row % S
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    k_base = k_ptr + gl.multiple_of(b * skb + g * skg, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    skn = gl.multiple_of(gl.to_tensor(skn).to(gl.int64), 8)
    n = gl.load(counts_ptr + row)
    keys_row = keys_ptr + row * N
    f_base = f_ptr + b * sfb + s * sfs + g * sfg
    tiles, bars = allocate(dtype, BN, DV, KT, False, 1)
    thread_barrier()
    gl.warp_specialize(
        [
            (heads_of_tiles, (tiles, bars, f_base, out_ptr + row * so, scale, hb, sfh, n, 0, H, KT, FIRST)),
            (heads_of_tiles, (tiles, bars, f_base, out_ptr + row * so, scale, hb, sfh, n, 1, H, KT, FIRST)),
            (copy_tiles, (tiles, bars, q_base, k_base, keys_row, keys_row, hb, sqh, skn, 0, n, H, DK, DV, KT, False, BN)),
        ],
        [NW, NW],
        [224, 80],
    )  # fmt: skip
