# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix as a tuple of tiles: NM tiles of MC columns, then one of TC columns if TC is not 0.

A program pads a width such as 576 to 512 + 64 in place of 1024, which would double its registers, shared memory and
products. Rows may be gathered: p + at names each; its columns lie next to each other.
"""

import triton
import triton.language as tl


@triton.jit
def column_tile(p, at, mask, first: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Loads columns ``first`` to ``first`` + W of the rows at p + at [ROWS]; 0 outside mask and beyond D."""
    d = first + tl.arange(0, W)
    if first + W <= D:
        x = tl.load(p + at[:, None] + d[None, :], mask=mask[:, None], other=0.0)
    else:
        x = tl.load(p + at[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0)
    return x


@triton.jit
def tile_at(p, at, mask, c: tl.constexpr, D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr):
    """Loads tile c of the rows at p + at."""
    if c < NM:
        x = column_tile(p, at, mask, c * MC, MC, D)
    else:
        x = column_tile(p, at, mask, NM * MC, TC, D)
    return x


@triton.jit
def tiles_at(p, at, mask, D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr):
    """Loads all tiles of the rows at p + at."""
    t = ()
    for c in tl.static_range(NM + (TC > 0)):
        t = t + (tile_at(p, at, mask, c, D, NM, MC, TC),)
    return t


@triton.jit
def product_of_rows(
    acc, p, at, live, r, r_at, mask, D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Adds the products of the rows at p + at with those at r + r_at to acc, reading one tile of both at a time."""
    d = tl.arange(0, MC)
    for c in range(NM):
        inside = (c * MC + d < D)[None, :]
        x = tl.load(p + at[:, None] + (c * MC + d)[None, :], mask=live[:, None] & inside, other=0.0)
        y = tl.load(r + r_at[:, None] + (c * MC + d)[None, :], mask=mask[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PREC)
    if TC > 0:
        x = tile_at(p, at, live, NM, D, NM, MC, TC)
        acc = tl.dot(x, tl.trans(tile_at(r, r_at, mask, NM, D, NM, MC, TC)), acc, input_precision=PREC)
    return acc


@triton.jit
def block_products(
    x, p, at, live, r, r_at, mask, HELD: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Returns the products [ROWS, BN] of the rows at p + at, HELD as the tiles x or read again, with those at r + r_at."""
    acc = tl.zeros((ROWS, BN), tl.float32)
    if HELD:
        for c in tl.static_range(NM + (TC > 0)):
            acc = tl.dot(x[c], tl.trans(tile_at(r, r_at, mask, c, D, NM, MC, TC)), acc, input_precision=PREC)
    else:
        acc = product_of_rows(acc, p, at, live, r, r_at, mask, D, NM, MC, TC, PREC)
    return acc


@triton.jit
def zero_tiles(ROWS: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr):
    """Returns accumulators."""
    t = ()
    for c in tl.static_range(NM + (TC > 0)):
        t = t + (tl.zeros((ROWS, MC if c < NM else TC), tl.float32),)
    return t


@triton.jit
def store_tiles(p, at, mask, tiles, factor, D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr):
    """Stores tiles * factor [ROWS] to the rows at p + at."""
    for c in tl.static_range(NM + (TC > 0)):
        d = c * MC + tl.arange(0, MC if c < NM else TC)
        x = (tiles[c] * factor[:, None]).to(p.dtype.element_ty)
        tl.store(p + at[:, None] + d[None, :], x, mask=mask[:, None] & (d < D)[None, :])
