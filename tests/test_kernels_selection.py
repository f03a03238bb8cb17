# SPDX-License-Identifier: Apache-2.0
"""The tile path of selection attention against the fp64 loop, through its launch plan, with every buffer poisoned.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch
from conftest import GPU, INTERPRETED, some

import mhc_inductor  # noqa: F401
from mhc_inductor.kernels.launch import DeviceProps
from mhc_inductor.kernels.selection import config, plan, tile_lists_plan
from tests.oracles import selection as h
from tests.oracles.poisoned import Poisoned

if INTERPRETED:
    from tests.tools.interpreter_fixes import fix_dot, fix_rounding

    fix_dot()
    fix_rounding()

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def builder(monkeypatch, device):
    """Makes the helpers call the launch plan of the tile path in place of the registered op."""
    made = Poisoned(torch.device(device), None if GPU else DeviceProps(4, "cuda", 90))
    op = types.SimpleNamespace(selection_attention=lambda *args: plan.plan_tiles(made, *args))
    monkeypatch.setattr(h, "OPS", op)
    return made


def run(device, kind="odd", dtype=F32, *, scale=None, **made):
    inputs = h.make_inputs(kind, dtype, device=device, **made)
    got = h.run(inputs, scale=scale)
    h.check(got, inputs, scale=scale)
    return inputs, got


# --- shapes, dtypes, ranges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", some([1, 2, 3, 4, 6, 16, 33, 64, 100, 128], [1, 6, 33, 64, 100]))
def test_heads(device, heads):
    run(device, h=heads, S=9, S_kv=70, B=1, size=24)


@pytest.mark.parametrize(
    ("Dk", "Dv"),
    some(
        [(1, 3), (16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (24, 100), (256, 256), (512, 512)],
        [(1, 3), (80, 80), (192, 128), (24, 100), (512, 512)],
    ),
)
def test_widths(device, Dk, Dv):
    run(device, Dk=Dk, Dv=Dv, S=5, S_kv=70, G=1, B=1, size=24)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    some(
        [*itertools.product(["odd", "corr"], [F32, BF16, F16])],
        [("odd", F32), ("corr", BF16), ("odd", BF16), ("corr", F16)],
    ),
)
def test_dtypes(device, kind, dtype):
    run(device, kind, dtype, S=9, S_kv=70, Dk=32, size=16, r=5, sink=True)


KINDS = ["odd", "corr", "rand", "token", "twice", "empty", "all", "none"]


@pytest.mark.parametrize(
    ("kind", "range_dtype"),
    [
        *some([*itertools.product(KINDS, [I32, I64])], [*zip(KINDS, [I32, I64] * 4, strict=True)]),
        ("wide", I64),
    ],
)
def test_ranges(device, kind, range_dtype):
    run(device, kind, S=35, S_kv=131, B=1, G=1, h=2, r=6, size=32, range_dtype=range_dtype)


@pytest.mark.parametrize("r", some([1, 2, 16, 33, 40, 64], [1, 33, 64]))
def test_ranges_per_query(device, r):
    run(device, "odd", S=18, S_kv=200, B=1, G=1, r=r, size=4)


@pytest.mark.parametrize(
    ("S", "S_kv"),
    some([(1, 1), (1, 100), (3, 65), (33, 64), (65, 63), (31, 129)], [(1, 1), (3, 65), (33, 64)]),
)
def test_odd_sizes(device, S, S_kv):
    run(device, S=S, S_kv=S_kv, h=4, size=30)


@pytest.mark.parametrize("name", h.MISTAKES)
def test_mistakes_made_before(device, name):
    made = dict(h.MISTAKES[name])
    run(device, made.pop("kind"), **made)


@pytest.mark.parametrize("sink_dtype", [F32, BF16, torch.float64])
def test_sink(device, sink_dtype):
    run(device, "empty", h=3, S=12, sink=True, sink_dtype=sink_dtype)


@pytest.mark.parametrize("scale", some([0.3, 0.0, -0.7, 11.0], [0.0, -0.7]))
def test_scale(device, scale):
    run(device, "odd", S=9, S_kv=40, scale=scale)


@pytest.mark.parametrize(("lengths", "key_lengths"), [((5, 0, 30, 9), None), ((20, 24), (60, 3)), ((3, 4), (9, 8))])
def test_packed_sequences(device, lengths, key_lengths):
    run(device, "odd", B=1, S=44, S_kv=44 if key_lengths is None else 63, lengths=lengths, key_lengths=key_lengths)


@pytest.mark.parametrize(("r", "index"), [(4, I64), (40, I32)])
def test_segments(device, r, index):
    """Tests packed sequences with segments as well, and NaN in keys of no query's segment."""
    lengths = {"lengths": (5, 9), "key_lengths": (50, 40)}
    made = {
        "B": 1,
        "S": 14,
        "S_kv": 90,
        "r": r,
        "size": 40,
        "h": 2,
        "segments": "mixed",
        "segment_dtype": index,
        "sink": True,
    }
    run(device, "odd", **made, **lengths)
    inputs, _ = run(device, "odd", **made)
    inputs["segments_q"] = ids = inputs["segments_q"].long().T.contiguous().T  # may differ from the keys' dtype
    inputs["segments_q"] = torch.where(ids == ids.unique()[2], ids.unique()[1], ids)
    unseen = inputs["segments_k"] == ids.unique()[2]
    results = []
    for bad in (1.0, NAN):
        for name in ("k", "v"):
            inputs[name] = torch.where(unseen[:, None, :, None], bad, inputs[name])
        results.append(h.run(inputs))
    assert unseen.any() and all(torch.equal(results[0][k], results[1][k]) for k in results[0])


@pytest.mark.parametrize("shape", [{"B": 0}, {"S": 0}, {"S_kv": 0}, {"r": 0}])
def test_empty_inputs(device, shape):
    for segments in (None, "mixed"):
        inputs = h.make_inputs("odd", F32, **{"S_kv": 9, **shape}, segments=segments, device=device)
        got = h.run(inputs)
        assert not got["o"].any() and bool((got["lse"] == -INF).all())


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_logits_with_a_standard_deviation_of_24(device, dtype):
    run(device, "corr", dtype, S=20, S_kv=150, h=4, G=1, Dk=64, size=32, r=5, spread=24.0, B=1)


# --- configurations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("QT", "HB", "BN"),
    some(
        [(8, 16, 64), (4, 16, 32), (2, 8, 16), (32, 4, 64), (32, 2, 32), (1, 16, 64), (8, 4, 64)],
        [(2, 8, 16), (32, 4, 64), (1, 16, 64)],
    ),
)
def test_configurations(device, monkeypatch, QT, HB, BN):
    c = config.ForwardConfig(QT, HB, BN, 4 if QT * HB < 128 else 8, 2)
    monkeypatch.setattr(config, "forward_config", lambda *_: c)
    run(device, "empty", S=37, S_kv=140, h=5, B=1, G=1, size=24, sink=True)
    run(device, "corr", S=some(33, 9), S_kv=130, h=16, B=1, G=1, size=64)


def test_every_device_gets_a_configuration_that_fits():
    for backend, arch in (("cuda", 80), ("cuda", 89), ("cuda", 90), ("cuda", 100), ("cuda", 120), ("hip", 94)):
        for heads in (1, 3, 16, 64):
            for D in (8, 64, 128, 192, 512):
                for itemsize in (2, 4):
                    c = config.forward_config(heads, D, D, itemsize, backend, arch)
                    P = config.padded(D)
                    rows = 0 if backend == "hip" else c.QT * c.HB
                    held = itemsize * P * (rows + 2 * c.num_stages * c.BN)
                    assert held <= config.shared_limit(backend, arch) and 32 % c.QT == 0 and 16 <= c.QT * c.HB <= 64


def test_equal_bits_twice_and_in_any_batch(device):
    inputs, got = run(device, "odd", BF16, B=3, S=20, S_kv=90, Dk=16, size=24)
    again = h.run(inputs)
    assert all(torch.equal(got[k], again[k]) for k in got)
    one = {k: t if t is None or k == "sink" else t[1:2] for k, t in inputs.items()}
    alone = h.run(one)
    assert all(torch.equal(got[k][1:2], alone[k]) for k in got)


# --- lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("QT", some([1, 2, 4, 8, 16, 32], [1, 8, 32]))
def test_lists_name_each_tile_once(device, builder, monkeypatch, QT, in_order):
    """Uses blocks of 4 tiles, so that counts continue from block to block. Deterministic algorithms ask for one order."""
    monkeypatch.setattr(tile_lists_plan, "LIST_BLOCK", 4)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: in_order)
    i = h.make_inputs("odd", F32, S=40, S_kv=300, r=5, size=40, device=device)
    i["k"][:, 1, 100] = NAN
    i["v"][1, :, 290] = INF
    x = tile_lists_plan.plan_lists(builder, i["k"], i["v"], i["ranges"], None, None, QT, 16)
    wild = (~(i["k"].isfinite().all(-1) & i["v"].isfinite().all(-1))).cpu()
    chosen = np.zeros((2, 2, -(-40 // QT) * QT, 19 * 16), bool)
    for b, s, g in np.ndindex(2, 40, 2):
        chosen[b, g, s, h.selection_of(i, b, s, g)] = True
    counts, dirty, tiles = (t.cpu() for t in (x.counts, x.dirty, x.tiles))
    for b, g, row in np.ndindex(2, 2, x.NQ):
        mine = chosen[b, g, row * QT : (row + 1) * QT].reshape(QT, 19, 16)
        some, whole = mine.any(-1), mine.all(-1)
        full, part, odd = [], [], []
        for t in np.flatnonzero(some.any(0)):
            entry = (int(t) << QT) | sum(1 << int(j) for j in np.flatnonzero(some[:, t]))
            spoilt = wild[b, g, t * 16 : (t + 1) * 16].any()
            alike = (some[:, t] == whole[:, t]).all() and not in_order
            (odd if spoilt else full if alike else part).append(entry)
        assert counts[b, g, row].tolist() == [len(full), len(part) + len(odd)] and dirty[b, g, row] == len(odd)
        line = tiles[b, g, row].tolist()
        assert line[: len(full)] == full and line[::-1][: len(part) + len(odd)] == part + odd


# --- strides ------------------------------------------------------------------------------------------------


class Counting(Poisoned):
    """Fails if a tensor is copied."""

    def contiguous(self, t):
        assert t.is_contiguous()
        return t

    def strided(self, t):
        assert t.stride(-1) == 1
        return t


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_strided_views_are_not_copied(device, monkeypatch, dtype):
    made = Counting(torch.device(device), None if GPU else DeviceProps(4, "cuda", 90))
    op = types.SimpleNamespace(selection_attention=lambda *args: plan.plan_tiles(made, *args))
    monkeypatch.setattr(h, "OPS", op)
    run(device, "odd", dtype, S=20, S_kv=90, Dk=16, Dv=24, strided=True, size=24)
    inputs = h.make_inputs("odd", dtype, S=20, S_kv=90, Dk=16, size=24, device=device)
    inputs["q"] = inputs["q"].permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
    inputs["k"] = torch.cat((inputs["k"], inputs["v"]), -1)[..., 3:19]  # neither aligned nor dense
    inputs["v"] = inputs["v"][:, :1].expand(-1, 2, -1, -1)
    h.check(h.run(inputs), inputs)


def test_other_strides_are_copied(device):
    inputs = h.make_inputs("odd", F32, S=20, S_kv=90, Dk=16, size=24, device=device)
    inputs["k"] = inputs["k"].mT.contiguous().mT
    inputs["q"] = inputs["q"].mT.contiguous().mT
    inputs["v"] = inputs["v"][..., :1].expand(-1, -1, -1, 5)
    inputs["ranges"] = inputs["ranges"].mT.contiguous().mT
    h.check(h.run(inputs), inputs)


def test_offsets_beyond_2_to_the_31(device):
    far = 2**31 + 64
    memory = torch.empty(far + 4096, dtype=BF16, device=device)
    i = h.make_inputs("odd", BF16, B=1, S=20, S_kv=90, Dk=16, size=24, device=device)
    for name, offset in (("k", 0), ("v", 2048)):
        view = memory.as_strided((1, 2, 90, 16), (1, far, 16, 1), offset)
        i[name] = view.copy_(i[name])
    h.check(h.run(i), i)


# --- NaN and infinity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "poison", "heads", "dtype"),
    some(
        [(n, p, *c) for n in "kv" for p in (NAN, INF, -INF) for c in ((1, BF16), (4, F32), (64, BF16))],
        [("k", NAN, 64, BF16), ("v", NAN, 4, F32), ("k", INF, 1, BF16), ("k", -INF, 4, F32), ("v", -INF, 1, BF16)],
    ),
)
def test_keys_that_a_query_does_not_select_never_reach_it(device, name, poison, heads, dtype):
    inputs = h.make_inputs("odd", dtype, B=1, S=12, S_kv=150, h=heads, Dk=16, r=3, size=32, device=device)
    clean = h.run(inputs)
    keys = (7, 70, 149)
    inputs[name][:, :, keys] = poison
    got = h.run(inputs)
    chosen = np.array([[bool({*keys} & {*h.selection_of(inputs, 0, s, g)}) for g in range(2)] for s in range(12)])
    assert chosen.any() and not chosen.all()
    free = torch.from_numpy(~chosen).to(device)
    for key in got:
        # A poisoned tile takes a separate path: results are equal except for the order of the tiles.
        assert h.error(got[key][0][free], clean[key][0][free]) < (1e-6 if dtype is F32 else 1e-2)
    seen = got["o"][0][~free]
    if poison != poison or name == "v":
        assert bool((~seen.isfinite()).any(-1).all()), "and those that select it see it"


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_selected_values_are_what_the_formula_says(device, poison):
    inputs = h.make_inputs("all", F32, B=1, S=5, S_kv=40, h=2, r=1, device=device)
    inputs["v"][0, 0, 3, 2] = poison
    inputs["v"][0, 1, 39, 0] = poison
    want = h.oracle(inputs)
    assert h.error(h.run(inputs)["o"], want["o"]) < 1e-6


def test_nan_in_a_query_stays_in_its_row(device):
    inputs = h.make_inputs("empty", F32, B=1, S=20, S_kv=60, h=2, device=device)
    clean = h.run(inputs)
    inputs["q"][0, 3, 0, 1] = NAN
    got = h.run(inputs)
    got["o"][0, 3, 0, 1], got["lse"][0, 3, 0, 1] = clean["o"][0, 3, 0, 1], clean["lse"][0, 3, 0, 1]
    assert all(torch.equal(got[k], clean[k]) for k in got)


# --- the choice of a path -----------------------------------------------------------------------------------


def test_the_path_follows_from_the_shape(builder):
    assert plan.takes_tiles(builder, 4096, 16)
    assert not plan.takes_tiles(builder, 1, 16), "decoding"
    assert not plan.takes_tiles(builder, 4096, 512), "token-level"
    assert plan.takes_tiles(types.SimpleNamespace(is_static=lambda _: False), None, 16), "any S"


def test_unsupported_inputs_have_a_reason(builder):
    def why(**made):
        inputs = h.make_inputs(**{"kind": "odd", "dtype": F32, **made})
        sizes = plan.unsupported_sizes(builder, *h.positional(inputs, 1.0))
        return plan.unsupported(builder, *[t for t in inputs.values() if t is not None]) or sizes

    assert why() is None and why(Dk=512, h=64, sink=True, range_dtype=torch.int64) is None
    assert why(Dk=576, Dv=512, h=128, segments="mixed") is None
    assert "float64" in why(dtype=torch.float64)
    assert "D = 577" in why(Dk=577) and "D = 600" in why(Dv=600) and "Dv = 513 is above 512" in why(Dk=576, Dv=513)
    assert "h = 129" in why(h=129) and "r = 5000" in why(r=5000, S=1)


@pytest.mark.parametrize("r", [3, 70])
def test_deterministic_algorithms_give_a_query_equal_bits_in_any_batch(device, r, monkeypatch):
    """Few queries have kernels of their own, and split their keys: not with deterministic algorithms."""
    builder = Poisoned(torch.device(device), None if GPU else DeviceProps(132, "cuda", 90))
    inputs = h.make_inputs("odd", F32, S=40, S_kv=130, r=r, size=30, h=4, B=1, device=device)
    few = {**inputs, **{n: inputs[n][:, 5:9] for n in ("q", "ranges")}}
    forward = lambda made: plan.plan_selection_attention(builder, *(made[n] for n in h.NAMES), 0.3)  # noqa: E731
    forward(few)
    assert "selection_gather" in builder.names and "selection_combine" in builder.names
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    builder.names.clear()
    for whole, part in zip(forward(inputs), forward(few), strict=True):
        # The interpreter's products depend on a row's place in the tile.
        torch.testing.assert_close(whole[:, 5:9], part, **({"rtol": 0, "atol": 0} if GPU else {}))
    assert "selection_combine" not in builder.names
    assert ("selection_gather" in builder.names) == (r > plan.MOST_TILE_RANGES)
