# SPDX-License-Identifier: Apache-2.0
"""Canonical pieces of ranges, and the tiles they touch, against numpy: compiled on a GPU, elsewhere interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import some

from mhc_inductor.kernels.selection.pieces_plan import plan_pieces, plan_segments
from tests.oracles import selection as h

MULTIPROCESSORS = 4
I32, I64 = torch.int32, torch.int64


def odd_ranges(B, S, G, r, S_kv, dtype=I32, seed=0):
    """Returns short, long, empty, backward, negative, overlapping and far ranges, unsorted."""
    rng = np.random.default_rng(seed)
    start = rng.integers(-5, S_kv + 5, (B, S, G, r))
    length = rng.choice([0, 1, 3, 8, 17, S_kv, -4], (B, S, G, r))
    ranges = np.stack([start, start + length], -1)
    far = rng.random(ranges.shape) < 0.05
    big = 2**62 if dtype == I64 else 2**31 - 1
    ranges[far] = rng.choice([-big, big], int(far.sum()))
    ranges[rng.random((B, S, G)) < 0.1] = 0  # rows that select nothing
    return torch.from_numpy(ranges).to(dtype)


def selected(ranges, S_kv, cu_q=None, cu_k=None):
    """Returns the selected keys by the definition, bool [B, G, S, S_kv]."""
    B, S, G, _, _ = ranges.shape
    want = np.zeros((B, G, S, S_kv), bool)
    for b, s, g in np.ndindex(B, S, G):
        lo, hi = 0, S_kv
        if cu_q is not None:
            own = [n for n in range(len(cu_q) - 1) if cu_q[n] <= s < cu_q[n + 1]]
            lo, hi = (cu_k[own[0]], cu_k[own[0] + 1]) if own else (0, 0)
        for start, end in ranges[b, s, g].tolist():
            want[b, g, s, lo + min(max(start, 0), hi - lo) : lo + min(max(end, 0), hi - lo)] = True
    return want


def check(builder, ranges, S_kv, tile, cu_q=None, cu_k=None, index=I32):
    cu = [None if c is None else torch.tensor(c, dtype=index, device=builder.device) for c in (cu_q, cu_k)]
    want = selected(ranges, S_kv, cu_q, cu_q if cu_k is None else cu_k)
    p = plan_pieces(builder, ranges.to(builder.device), *cu, S_kv, count=True, tile=tile)
    bare = plan_pieces(builder, ranges.to(builder.device), *cu, S_kv)
    assert torch.equal(bare.starts, p.starts) and torch.equal(bare.ends, p.ends) and bare.totals is bare.sel is None
    starts, ends, totals = (t.cpu().numpy() for t in (p.starts, p.ends, p.totals))
    assert starts.shape == (*want.shape[:3], ranges.shape[3])
    got = np.zeros(want.shape, int)
    for at in np.ndindex(starts.shape):
        got[at[:3]][starts[at] : ends[at]] += 1
    assert (got == want).all(), "disjoint, and the union"
    assert (starts <= ends).all() and (np.diff(starts, axis=-1) >= 0).all()
    assert (starts >= 0).all() and (ends <= S_kv).all()
    assert (totals == np.cumsum(ends - starts, -1)).all()
    NT = -(-S_kv // tile)
    B, G, S = want.shape[:3]
    assert p.sel.shape == p.full.shape == (B, G, -(-S // 32), NT)
    tiles = np.zeros((B, G, -(-S // 32) * 32, NT * tile), int)
    tiles[:, :, :S, :S_kv] = want
    count = tiles.reshape(B, G, -1, 32, NT, tile).sum(-1)
    bits = np.arange(32)[:, None]
    for got_words, bit in ((p.sel, count > 0), (p.full, count == tile)):
        words = got_words.cpu().numpy().astype(np.uint32)
        assert (((words[:, :, :, None] >> bits) & 1) == bit).all()


@pytest.mark.parametrize(
    ("r", "dtype"),
    some(
        [(r, t) for r in (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 40) for t in (I32, I64)],
        [(1, I64), (2, I32), (5, I64), (13, I32), (16, I64), (17, I32), (32, I32), (33, I64)],
    ),
)
def test_odd_ranges(builder, r, dtype):
    check(builder, odd_ranges(2, 5, 2, r, 60, dtype, seed=r), 60, 16)


@pytest.mark.parametrize("r", some([100, 512], [100]))
def test_many_ranges(builder, r):
    check(builder, odd_ranges(1, 2, 1, r, 1200, seed=1), 1200, 64)


@pytest.mark.parametrize(("S", "tile"), [(1, 32), (33, 64), (70, 16)])
def test_words_of_queries_and_tiles(builder, S, tile):
    check(builder, odd_ranges(1, S, 2, 4, 130), 130, tile)


def test_adjoining_pieces_fill_a_tile(builder):
    ranges = torch.tensor([[32, 48], [0, 16], [48, 64], [16, 32], [64, 80], [81, 128]]).view(1, 1, 1, 6, 2)
    check(builder, ranges, 128, 64)


@pytest.mark.parametrize(("r", "index"), some([(3, I32), (3, I64), (40, I32), (40, I64)], [(3, I64), (40, I32)]))
def test_packed_sequences(builder, r, index):
    check(builder, odd_ranges(1, 12, 2, r, 50), 50, 16, [0, 3, 3, 7, 11], [0, 20, 25, 25, 50], index)
    check(builder, odd_ranges(1, 12, 2, r, 12), 12, 16, [0, 5, 12], index=index)
    check(builder, odd_ranges(1, 12, 2, r, 50), 50, 16, [2, 9], [10, 41], index)


@pytest.mark.parametrize("index", [I32, I64])
@pytest.mark.parametrize("kind", ["mixed", "documents"])
def test_segments_leave_tiles_out(builder, kind, index):
    """Checks that full tiles hold only keys of the query's segment, and that tiles without such keys are left out."""
    B, S, S_kv, tile, any_id = 2, 40, 200, 16, -(2**31)
    ids_q, ids_k = (t.to(builder.device) for t in h.make_segments(kind, B, S, S_kv, dtype=index))
    ids_k[0, 96:112] = any_id
    ranges = odd_ranges(B, S, 1, 5, S_kv)
    ranges[:, ::3, :, 0] = torch.tensor([0, S_kv])
    p = plan_pieces(
        builder, ranges.to(builder.device), None, None, S_kv, tile=tile, segments=plan_segments(builder, ids_q, ids_k)
    )
    q, k = ids_q.cpu().numpy(), ids_k.cpu().numpy()
    seen = (k[:, None] == q[:, :, None]) | (k[:, None] == any_id)
    whole = np.zeros((B, S, 13 * tile), bool)
    whole[..., :S_kv] = selected(ranges, S_kv)[:, 0]
    own = np.pad(seen, ((0, 0), (0, 0), (0, 13 * tile - S_kv)))
    count = (whole & own).reshape(B, S, 13, tile).sum(-1)
    bit = np.arange(S) % 32
    sel, full = (
        ((t.cpu().numpy().astype(np.uint32)[:, 0, np.arange(S) // 32] >> bit[:, None]) & 1) for t in (p.sel, p.full)
    )
    assert (full == (count == tile)).all() and full.any()
    assert (sel >= (count > 0)).all() and (sel >= full).all()
    # Ids between the lowest and the highest of a tile cannot be excluded.
    mixed = [len(set(k[b, t * tile : (t + 1) * tile].tolist())) > 1 for b in range(B) for t in range(13)]
    uniform = ~np.array(mixed).reshape(B, 1, 13)
    assert (np.where(uniform, sel, 0) == np.where(uniform, count > 0, 0)).all()


@pytest.mark.parametrize("cu", [[9, 4, -3, 700], [0, 99], [-5, -1], [7], [0, 0, 0]])
def test_senseless_boundaries_stay_inside(builder, cu):
    cu = torch.tensor(cu, device=builder.device)
    p = plan_pieces(builder, odd_ranges(1, 12, 2, 4, 12).to(builder.device), cu, None, 12, count=True, tile=16)
    assert (p.starts >= 0).all() and (p.ends <= 12).all() and (p.starts <= p.ends).all()


@pytest.mark.parametrize(("B", "S", "r", "S_kv"), [(0, 3, 2, 9), (1, 0, 2, 9), (1, 3, 0, 9), (1, 3, 2, 0)])
def test_empty_inputs(builder, B, S, r, S_kv):
    ranges = torch.randint(-3, 12, (B, S, 2, r, 2), device=builder.device)
    p = plan_pieces(builder, ranges, None, None, S_kv, count=True, tile=16)
    assert p.starts.shape == (B, 2, S, r) and torch.equal(p.starts, p.ends)
    assert p.sel.shape == (B, 2, -(-S // 32), -(-S_kv // 16)) and not p.sel.any()
