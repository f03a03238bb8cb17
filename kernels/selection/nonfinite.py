# SPDX-License-Identifier: Apache-2.0
"""Flags of key tiles that hold a NaN or an infinity, which a product would spread even with a probability of 0.

k, v[B, G, S_kv, D] -> flags[B, G, NT] int32. A program has one tile of BN keys, DC columns at a time. Bytes bound it:
K and V are read once, so that the attention's main loops need no test.
"""

import triton
import triton.language as tl

from .common import finite


@triton.jit
def _any_wild(p, n, keep, stride, ALIGN: tl.constexpr, D: tl.constexpr, DC: tl.constexpr):
    wild = 0
    for c in tl.static_range(0, D, DC):
        d = c + tl.arange(0, DC)
        x = tl.load(
            p + n[:, None] * tl.multiple_of(tl.cast(stride, tl.int64), ALIGN) + d[None, :],
            mask=keep[:, None] & (d < D)[None, :],
            other=0.0,
        )
        wild |= tl.max(tl.max((~finite(x)).to(tl.int32), axis=1), axis=0)
    return wild


@triton.jit(do_not_specialize=["S_kv", "NT", "G", "skb", "skg", "skn", "svb", "svg", "svn"])
def selection_finite(
    k_ptr, v_ptr, flags_ptr, S_kv, NT, G, skb, skg, skn, svb, svg, svn,
    DK: tl.constexpr, DV: tl.constexpr, DC: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes flags[B, G, NT] int32: 1 if not all keys and values of the tile are finite. One program: one tile."""
    pid = tl.program_id(0)
    t = pid % NT
    bg = pid // NT
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    n = t.to(tl.int64) * BN + tl.arange(0, BN)  # [BN]
    k = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    wild = _any_wild(k, n, n < S_kv, skn, ALIGN, DK, DC) | _any_wild(v, n, n < S_kv, svn, ALIGN, DV, DC)
    tl.store(flags_ptr + pid, wild)
