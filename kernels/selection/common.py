# SPDX-License-Identifier: Apache-2.0
"""Shared functions of the selection kernels: list entries of key tiles, and a query's keys in a tile.

The rows of a program are QT neighbouring queries x HB heads of one group: row = query * HB + head. An entry of a list
packs a key tile and a bit for each query that selects any key of it; the keys of a tile that a query selects are the
bits of one word, which each row unpacks by a shift.
"""

import triton
import triton.language as tl


@triton.jit
def place(NQ, G, H: tl.constexpr, HB: tl.constexpr):
    """Returns b, g, bg (int64), the tile of queries and the block of heads of programs [B, G, NQ, heads / HB].

    The last queries come first.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    pid = tl.program_id(0)
    tile = pid // HN
    bg = (tile // NQ).to(tl.int64)
    return bg // G, bg % G, bg, NQ - 1 - tile % NQ, pid % HN


@triton.jit
def load_queries(q_ptr, b, s_row, g, head, live, sqb, sqs, sqg, sqh, d, D: tl.constexpr, ALIGN: tl.constexpr):
    """Loads q[b, s_row, g, head] of the rows [M] as [M, DP]; 0 where there is no such row."""
    q_row = (
        q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
        + tl.multiple_of(s_row.to(tl.int64) * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
    )  # fmt: skip
    return tl.load(q_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def pack_entry(tile, bits, QT: tl.constexpr):
    """Packs a list entry: the key tile, and a bit for each of the QT queries that select any key of it."""
    return (tile.to(bits.dtype) << QT) | bits


@triton.jit
def entry_tile(entry, QT: tl.constexpr):
    return (entry >> QT).to(tl.int32)


@triton.jit
def entry_bits(entry, QT: tl.constexpr):
    return (entry & ((1 << QT) - 1)).to(tl.uint32)


@triton.jit
def finite(x):
    x = x.to(tl.float32)
    return x - x == 0.0


@triton.jit
def _ones(x):
    """Returns an integer with the lowest x bits set, x from 0 to 64."""
    one = tl.full(x.shape, 1, tl.int64)
    return tl.where(x >= 64, -1, (one << (x & 63)) - 1)


@triton.jit
def _words(start, end, first, BN: tl.constexpr):
    """Returns the pieces [QT, RC] as bits of the BN <= 64 keys from ``first`` on, int64[QT]."""
    a = tl.minimum(tl.maximum(start - first, 0), BN)
    e = tl.minimum(tl.maximum(end - first, 0), BN)
    # Pieces are disjoint, so their sum is their union.
    return tl.sum(_ones(e) & ~_ones(a), axis=1)


@triton.jit
def load_pieces(p, rows, i, QS, R: tl.constexpr):
    """Loads starts or ends [QT, RC] of pieces i of the queries at rows [QT]; 0 where a query or piece is missing."""
    return tl.load(p + (rows * R)[:, None] + i[None, :], mask=(rows < QS)[:, None] & (i < R)[None, :], other=0)


@triton.jit
def key_words(starts_ptr, ends_ptr, start, end, rows, QS, first, R: tl.constexpr, RC: tl.constexpr, BN: tl.constexpr):
    """Returns int64[QT], in which bit j says whether the query selects key ``first`` + j.

    start and end [QT, RC] are the first RC of its R pieces.
    """
    words = _words(start, end, first, BN)
    if R > RC:
        for c in range(RC, R, RC):
            i = c + tl.arange(0, RC)
            words |= _words(load_pieces(starts_ptr, rows, i, QS, R), load_pieces(ends_ptr, rows, i, QS, R), first, BN)
    return words


@triton.jit
def to_rows(x, QT: tl.constexpr, HB: tl.constexpr):
    """Repeats each value of [QT] for each head: [QT * HB]."""
    return tl.reshape(tl.broadcast_to(x[:, None], (QT, HB)), (QT * HB,))


@triton.jit
def popcount(x):
    """Returns the number of set bits of int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def row_keys(words, BN: tl.constexpr):
    """Unpacks int64[M] to bool[M, BN]: whether the row selects the key."""
    j = tl.arange(0, BN)
    if BN <= 32:
        bits = words.to(tl.int32)[:, None]
    else:
        bits = tl.where((j < 32)[None, :], words.to(tl.int32)[:, None], (words >> 32).to(tl.int32)[:, None])
    return ((bits >> (j & 31)[None, :]) & 1) != 0


@triton.jit
def load_tile(p, mask_n, mask_d, MASK_N: tl.constexpr, MASK_D: tl.constexpr):
    """Loads a tile [BN, DP], masked only in dimensions in which it may end early."""
    if MASK_N and MASK_D:
        x = tl.load(p, mask=mask_n[:, None] & mask_d[None, :], other=0.0)
    elif MASK_N:
        x = tl.load(p, mask=mask_n[:, None], other=0.0)
    elif MASK_D:
        x = tl.load(p, mask=mask_d[None, :], other=0.0)
    else:
        x = tl.load(p)
    return x
