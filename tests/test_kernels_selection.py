# SPDX-License-Identifier: Apache-2.0
"""Selection attention's kernels through their launch plans, with every buffer poisoned, against the fp64 loop.

``PATHS``: the forward by tiles and by gathers, these also with a query's keys in three splits, and the backward, dq and
dkv, by the kernels for many queries and for few. The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import math
import types
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import GPU, cases, some

from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.kernels.selection import backward_plan, config, gather_plan, pieces_plan, plan, tile_lists_plan
from mhc_inductor.reference import selection as reference
from tests.oracles import selection as h
from tests.oracles.poisoned import Poisoned

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
NAN, INF = math.nan, math.inf
PATHS = ("tiles", "gather", "splits", "many", "few")
FEW = 16  # queries, of at most 64 ranges
SPLITS = {"gather": 1, "splits": 3, "by shape": None}  # of a query's keys
H200 = DeviceProps(132, "cuda", 90)
MULTIPROCESSORS = 4


def gathered(inputs, ups, scale, NS):
    """Returns o and lse and, by the definition of delta, dq."""
    builder = Poisoned(inputs["q"].device, None if GPU else DeviceProps(1, "cuda", 90))
    args = q, k, v, ranges, sink, cu_q, cu_k = [inputs[n] for n in h.NAMES]
    ids = pieces_plan.plan_segments(builder, *(inputs.get(n) for n in h.SEGMENTS))
    o, lse = gather_plan.plan_gather(builder, *args, scale, None, NS, ids)
    if not ups:
        return {"o": o, "lse": lse}
    ups = {n: t.contiguous() for n, t in ups.items()}  # as plan_delta makes them
    total = lse if sink is None else torch.logaddexp(lse, sink.float())
    delta = (ups["o"].float() * o.float()).sum(-1) if "o" in ups else torch.zeros_like(lse)
    if "lse" in ups:
        delta = delta - torch.where(lse.isinf(), 0.0, ups["lse"] * (total - lse).exp())
    lse2 = torch.where(lse.isinf(), torch.inf, total / 0.6931471805599453)
    rest = (ranges, cu_q, cu_k, lse2, delta, scale, None, NS, None, ids)
    return {"o": o, "lse": lse, "dq": gather_plan.plan_gather_dq(builder, ups.get("o"), q, k, v, *rest)}


def backward_of(path, inputs, ups, scale, multiprocessors):
    """Returns the reference's o and lse, and the gradients. The integers: a query that no list holds alone."""
    builder = Poisoned(inputs["q"].device, DeviceProps(multiprocessors, "cuda", 90), integers=1)
    form = types.SimpleNamespace(
        selection_attention=reference.selection_attention,
        selection_attention_backward=lambda *args: backward_plan.plan_selection_attention_backward(builder, *args),
    )
    by_few = mock.patch.object(backward_plan, "plan_dkv_few", wraps=backward_plan.plan_dkv_few)
    with mock.patch.object(backward_plan, "FEW_QUERIES", 128 if path == "few" else 0), by_few as few:
        got = h.run(inputs, ups, scale, form)
    assert few.called or path != "few" or inputs["q"].shape[1] > FEW
    return got


def results(path, inputs, ups=None, scale=None, multiprocessors=2):
    """Returns what a path computes, under the oracle's names.

    On two multiprocessors, the backward's four programs end inside key tiles, and hold several of them.
    """
    scale = inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    if path == "op":
        return h.run(inputs, ups, scale)
    if path in SPLITS:
        got = gathered(inputs, ups, scale, SPLITS[path])
    elif path == "tiles":
        builder = Poisoned(inputs["q"].device, None if GPU else DeviceProps(MULTIPROCESSORS, "cuda", 90))
        form = types.SimpleNamespace(selection_attention=lambda *args: plan.plan_tiles(builder, *args))
        got = h.run(inputs, None, scale, form)
    else:
        return backward_of(path, inputs, ups or h.upstream(inputs), scale, multiprocessors)
    assert got["o"].dtype == inputs["q"].dtype and got["lse"].dtype == F32
    assert got["o"].is_contiguous() and got["lse"].is_contiguous()
    return got


def check(got, inputs, ups=None, scale=None):
    """Checks results of a path, of which forward paths have no gradients, against fp64."""
    want = h.oracle(inputs, ups, scale=scale)
    h.check({**want, **got}, inputs, ups, scale=scale)
    empty = want["lse"] == -INF
    assert not got["o"][empty].any() and not ("dq" in got and got["dq"][empty].any())
    assert all(t.is_contiguous() for n, t in got.items() if n.startswith("d"))


def run(path, device, kind="odd", dtype=F32, *, up=h.OUTPUTS, scale=None, sink_value=None, on=2, **made):
    if "lengths" not in made and made.get("r", 1) <= plan.MOST_TILE_RANGES:  # gathers run a program for each query
        most = {"few": FEW, **({} if GPU else dict.fromkeys(SPLITS, 4))}.get(path, math.inf)
        made["S"] = min(made.get("S", 7), most)
    inputs = h.make_inputs(kind, dtype, device=device, **made)
    if sink_value is not None:
        inputs["sink"].fill_(sink_value)
    ups = h.upstream(inputs, up)
    got = results(path, inputs, ups, scale, on)
    check(got, inputs, ups, scale)
    return inputs, ups, got


def named(rows):
    """Returns parameters (path, options). Each commit interprets all of the tiles."""
    marks = {"tiles": pytest.mark.every_case}
    return [pytest.param(p, *case.values, id=f"{p} {case.id}", marks=marks.get(p, ())) for p, case in rows]


KINDS = ["odd", "corr", "rand", "token", "twice", "empty", "all", "none"]
ONE = {"B": 1, "G": 1}
SHORT = {"S": 9, "S_kv": 70, "B": 1}
WIDTHS = [(16, 16), (80, 80), (128, 128), (24, 40), (192, 128), (64, 300), (128, 64), (24, 512), (512, 16)]
LATENT = {"B": 1, "G": 1, "S": 4, "S_kv": 40, "h": 20, "Dk": 576, "Dv": 512, "r": 2}
CASES = cases(
    heads=(
        {"S": some(40, 9), "S_kv": 70, "B": 1, "Dk": 16, "size": 24, "sink": True},
        "h",
        some([1, 2, 3, 4, 6, 16, 33, 64, 100, 128], [1, 6, 33, 64, 128]),
    ),
    widths=(
        {"S": 5, "S_kv": 70, **ONE, "size": 24, "r": 3},
        "Dk Dv dtype",
        [
            *((*d, t) for d in some(WIDTHS, []) for t in (F32, BF16)),
            *some([(64, 64, F32), (256, 256, F32), (19, 7, BF16)], [(80, 80, F32), (192, 128, BF16), (64, 300, BF16)]),
            *[(1, 3, F32), (24, 100, F32), (512, 512, BF16)],
        ],
    ),
    latent_widths=(LATENT, "dtype segments sink up", [(BF16, "mixed", False, ("o",)), (F32, None, True, h.OUTPUTS)]),
    dtypes=(
        {"S": 9, "S_kv": 70, "Dk": 32, "size": 16, "r": 5, "sink": True},
        "kind dtype",
        some(
            [*product(["odd", "corr"], [F32, BF16, F16])], [("odd", F32), ("corr", BF16), ("odd", BF16), ("corr", F16)]
        ),
    ),
    ranges=(
        {"S": 35, "S_kv": 131, **ONE, "h": 2, "r": 6, "size": 32},
        "kind range_dtype",
        [*some(product(KINDS, [I32, I64]), zip(KINDS, [I32, I64] * 4, strict=True)), ("wide", I64)],
    ),
    ranges_in_bf16=({**SHORT, "S_kv": 40, "dtype": BF16, "sink": True}, "kind", KINDS[2:]),
    many_ranges=({"S": 18, "S_kv": 200, **ONE, "size": 4}, "r", some([1, 2, 16, 33, 40, 64], [1, 33, 64])),
    odd_sizes=(
        {"h": 4, "size": 30},
        "S S_kv",
        some([(1, 1), (1, 100), (3, 65), (33, 64), (65, 63), (31, 129)], [(1, 1), (3, 65), (33, 64)]),
    ),
    mistakes_made_before=h.MISTAKES.values(),
    sink=({"kind": "empty", "h": 3, "S": 12, "sink": True}, "sink_dtype", [F32, BF16, torch.float64]),
    sinks_far_from_the_scores=(
        {"S": 9, "S_kv": 70, "h": 4, "sink": True, "up": ("o",)},
        "sink_value",
        some([-200.0, 200.0, -INF, -1e30, 1e30], [200.0, -INF, 1e30]),
    ),
    one_gradient=(
        {**SHORT, "h": 4, "Dk": 16},
        "up sink dtype",
        some(
            [*product([("o",), ("lse",), h.OUTPUTS], [False, True], [F32, BF16, F16])],
            [
                (("o",), True, F32),
                (("o",), False, BF16),
                (("lse",), False, F32),
                (("lse",), True, BF16),
                (h.OUTPUTS, False, F16),
            ],
        ),
    ),
    scale=({"S": 9, "S_kv": 40, "sink": True}, "scale", some([0.3, 0.0, -0.7, 2.5, 11.0], [0.0, -0.7])),
    packed_segments=(
        {"B": 1, "S": 14, "S_kv": 90, "size": 40, "h": 2, "segments": "mixed", "sink": True},
        "r segment_dtype lengths key_lengths",
        [(4, I64, (5, 9), (50, 40)), (40, I32, (5, 9), (50, 40)), (4, I32, None, None)],
    ),
    spread=(
        {"kind": "corr", "S": 20, "S_kv": 150, "h": 4, **ONE, "Dk": 64, "size": 32, "r": 5, "spread": 24.0},
        "dtype",
        [F16, BF16, F32],
    ),
    strided=({"S": 9, "S_kv": 70, "strided": True, "scale": -0.7}, "Dk Dv dtype", [(16, 24, F32), (19, 7, BF16)]),
)


def paths_of(i):
    """Returns the paths of a case: one of the two forms of gathers, and in the interpreter one of the backward."""
    return ("tiles", ("gather", "splits")[i % 2], *some(["many", "few"], [("many", "few")[i // 2 % 2]]))


def taken(path, case):
    """Returns whether a path takes a case: the tiles leave wide heads of fp32 to the gathers."""
    (made,) = case.values
    return path != "tiles" or made.get("Dk", 1) * made.get("dtype", F32).itemsize <= plan.MAX_TILE_BYTES


@pytest.mark.parametrize(
    ("path", "case"), named((path, case) for i, case in enumerate(CASES) for path in paths_of(i) if taken(path, case))
)
def test_against_fp64(device, path, case):
    run(path, device, **case)


# What CASES do not reach: of gathers, lists of many ranges; of the backward, units of many queries, in several rounds; and
# the registered op on a GPU, at sizes that would take the interpreter hours.
REAL = {"B": 1, "S": 1024, "S_kv": 1024, "h": 16, "Dk": 128, "kind": "corr", "size": 64, "r": 16}
LOW = [BF16, F16, F32]
SEGMENTED = {"kind": "odd", "segments": "mixed", "segment_dtype": I64, "sink": True}
ON_GPU = {
    "op": cases(
        real=(REAL, "dtype sink", product(LOW, [False, True])),
        spread=(
            {**REAL, "dtype": BF16},
            "B S S_kv kind r spread",
            [
                (*of, spread)
                for of in [(1, 1024, 1024, "corr", 16), (3, 1, 4096, "corr", 16), (1, 64, 1024, "token", 100)]
                for spread in (1.0, 24.0)
            ],
        ),
        odd=({**REAL, "dtype": BF16}, "kind", ["odd", "empty"]),
        wide_fp32=({**REAL, "S": 256, "S_kv": 256, "h": 4}, "Dk Dv", [(512, 16), (512, 512), (300, 64)]),
        wide=(
            {"B": 1, "G": 1, "S": 256, "S_kv": 256, "h": 64, "Dk": 512, "size": 32, "sink": True},
            "kind dtype",
            [("corr", BF16)],
        ),
        packed=({**REAL, "dtype": BF16}, "lengths", [(300, 0, 65, 659)]),
        segments=({**SEGMENTED, "S": 300, "S_kv": 700, "h": 16, "Dk": 128, "B": 1, "size": 64, "r": 6}, "dtype", LOW),
        documents=(
            {**SEGMENTED, "kind": "all", "S": 100, "S_kv": 400, "h": 4, "Dk": 64, "r": 1, "segments": "documents"},
            "dtype",
            LOW,
        ),
        packed_segments=(
            {**SEGMENTED, "B": 1, "S": 90, "S_kv": 90, "size": 40, "h": 4, "Dk": 64},
            "lengths dtype",
            product([(40, 0, 50)], LOW),
        ),
        decoding_segments=({**SEGMENTED, "S": 3, "S_kv": 500, "h": 16, "Dk": 128, "size": 64}, "dtype", LOW),
        token_segments=({**SEGMENTED, "kind": "token", "S": 40, "S_kv": 300, "r": 100, "h": 8, "Dk": 64}, "dtype", LOW),
        latent=(
            {"B": 1, "G": 1, "S_kv": 300, "h": 128, "Dk": 576, "Dv": 512, "size": 64, "sink": True},
            "S dtype",
            product([300, 1], [BF16, F32]),
        ),
    )
}
PACKED = [(44, (5, 0, 30, 9), None), (63, (20, 24), (60, 3)), (63, (3, 4), (9, 8))]
TALL = {"S": some(140, 70), **ONE, "h": 8, "Dk": 16}
OF_ONE_PATH = {
    **some(ON_GPU, {}),
    "tiles": cases(packed=({"B": 1, "S": 44}, "S_kv lengths key_lengths", PACKED)),
    "splits": cases(
        many_ranges=({"S": 2, **ONE, "S_kv": some(600, 300), "size": 5, "sink": True}, "r", [100]),
        token_level=(
            {"kind": "token", "dtype": BF16, "S": 1, "B": 1, "h": 16, "Dk": 16},
            "S_kv r",
            [(some(2000, 500), some(512, 130))],
        ),
        widest=({"S": 1, **ONE, "h": 20, "S_kv": 30, "sink": True}, "Dk dtype", [(512, BF16)]),
        packed=(
            {"B": 1},
            "S S_kv lengths key_lengths sink r",
            [(*c, r) for r in (3, 70) for c in [(6, 6, (2, 0, 3), None, False), (4, 40, (2, 0, 2), (20, 3, 12), True)]],
        ),
        spread=({"kind": "all", "S": 3, "S_kv": 200, "r": 1, "spread": 24.0}, "Dk dtype", [(64, F16)]),
    ),
    "many": cases(
        packed=({"B": 1, "S": 44, "h": 4, "Dk": 16, "sink": True}, "S_kv lengths key_lengths", PACKED),
        blocks=(
            {"dtype": BF16, "S": some(150, 80), "S_kv": some(170, 150), **ONE, "h": 4, "Dk": 16, "size": 64, "r": 3},
            "kind",
            some(["corr", "rand"], ["corr"]),
        ),
        one_unit=(
            TALL,
            "kind S_kv sink CAP",
            [(*case, cap) for case in [("all", 50, True), ("odd", 70, False)] for cap in some([16, 64], [16])],
        ),
        rounds_of_both_kinds=(
            {**TALL, "kind": "corr", "dtype": BF16, "S_kv": some(140, 70), "h": 16, "size": 64, "r": 2},
            "CAP",
            [16],
        ),
        words=[{**TALL, "S_kv": 70, "h": some(16, 4), "WORDS": 2}],
        programs=({"B": some(2, 1), "S": 20, "S_kv": 140, "h": 4, "Dk": 16}, "on", [1, 50]),
        many_ranges=(
            {"kind": "token", "S": 20, "S_kv": 140, **ONE, "h": 4, "Dk": 16},
            "r",
            some([33, 64, 100], [33, 100]),
        ),
    ),
    "few": cases(
        many_ranges=(
            {"kind": "token", "dtype": BF16, **ONE, "h": 4, "Dk": 16},
            "S S_kv r",
            some(
                [(S, n, r) for S in (1, 2, 32, 33, 128) for n, r in ((140, 100), (1500, 600))],
                [(1, 1500, 600), (34, 140, 70)],
            ),
        ),
        packed=[{"B": 1, "S": 9, "S_kv": 9, "h": 4, "Dk": 16, "lengths": (3, 0, 5, 1)}],
        heads=(
            {"S": 3, "S_kv": 100, "Dk": 16, "sink": True},
            "h dtype",
            some([*product([1, 4, 16, 33, 64], [BF16, F16, F32])], [(4, BF16), (33, F32)]),
        ),
    ),
}


@pytest.mark.parametrize(("path", "case"), named((path, row) for path, rows in OF_ONE_PATH.items() for row in rows))
def test_cases_of_one_path(device, monkeypatch, path, case):
    for name in {"CAP", "WORDS"} & case.keys():
        monkeypatch.setattr(backward_plan, name, case[name])
    run(path, device, **{name: value for name, value in case.items() if name not in ("CAP", "WORDS")})


def equal(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("path", [*PATHS, *some(["op"], [])])
@pytest.mark.parametrize("r", [4, 40])
def test_keys_of_other_segments_do_not_leak(device, path, r):
    """Puts NaN into keys of no query's segment. The ids of queries may have another dtype and other strides."""
    sizes = {"B": 1, "S": 40 if path == "many" else 5, "S_kv": 90, "r": r, "size": 60, "Dk": 16}
    if path == "op":
        sizes |= {"S": 300 if r == 4 else 3, "S_kv": 700, "h": 16, "Dk": 128}
    inputs = h.make_inputs("odd", F32, **sizes, segments="mixed", sink=True, device=device)
    inputs["segments_q"] = ids = inputs["segments_q"].long().T.contiguous().T
    ids[ids == 2] = 1
    unseen, ups, found = inputs["segments_k"] == 2, h.upstream(inputs), []
    for bad in (1.0, NAN):
        for name in "kv":
            inputs[name] = torch.where(unseen[:, None, :, None], bad, inputs[name])
        found.append(results(path, inputs, ups))
    assert unseen.any() and equal(*found)
    for name in {"dk", "dv"} & found[0].keys():
        assert not found[0][name][:, :, unseen[0]].any() and found[0][name].any()


@pytest.mark.parametrize(("path", "segments"), [*product([*PATHS, "by shape"], [None]), ("tiles", "mixed")])
@pytest.mark.parametrize(
    "sizes",
    [{"B": 0}, {"S": 0}, {"S_kv": 0}, {"r": 0}, {"kind": "none"}, {"B": 1, "S": 1, "S_kv": 0, "r": 100}],
    ids=str,
)
def test_empty_inputs(device, path, sizes, segments):
    made = {"kind": "all", "dtype": F32, "S": 20 if path == "many" else 5, "S_kv": 70, "h": 4, "Dk": 16, **sizes}
    inputs = h.make_inputs(**made, sink=True, segments=segments, device=device)
    got = results(path, inputs, h.upstream(inputs))
    assert got["o"].shape == inputs["q"].shape and not got["o"].any() and (got["lse"] == -INF).all()
    for n in h.WANTED:
        assert f"d{n}" not in got or torch.equal(got[f"d{n}"], torch.zeros_like(inputs[n])), n


@pytest.mark.parametrize("path", [*PATHS, "by shape"])
def test_equal_bits_twice_and_in_any_batch(device, path):
    sizes = {
        "S": {"tiles": 20, "many": some(100, 40)}.get(path, 4),
        "S_kv": some(150, 70),
        "h": 4,
        "Dk": 16,
        "size": 24,
    }
    inputs, ups, got = run(path, device, dtype=BF16, B=3, sink=True, **sizes)
    assert equal(results(path, inputs, ups), got)
    if path == "tiles":
        alone = results(path, {n: t if t is None or n == "sink" else t[1:2] for n, t in inputs.items()})
        assert equal(alone, {n: t[1:2] for n, t in got.items()})


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_strides(device, path, dtype):
    sizes = {"S": some(20, 4), "S_kv": 70, "h": 4, "Dk": 16}
    inputs, ups, got = run(path, device, dtype=dtype, **sizes, sink=True)
    rows = {n: inputs[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "kv"}
    outside = {"q": inputs["q"].permute(3, 2, 1, 0, 4).contiguous().permute(3, 2, 1, 0, 4)}
    turned = {n: inputs[n].mT.contiguous().mT for n in "qkv"}
    for change in (rows, outside, turned):
        assert equal(results(path, {**inputs, **change}, {n: t.mT.contiguous().mT for n, t in ups.items()}), got)


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
    run("tiles", device, "empty", S=37, S_kv=140, h=5, B=1, G=1, size=24, sink=True)
    run("tiles", device, "corr", S=some(33, 9), S_kv=130, h=16, B=1, G=1, size=64)


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
    monkeypatch.setattr("test_kernels_selection.Poisoned", Counting)
    run("tiles", device, "odd", dtype, S=20, S_kv=90, Dk=16, Dv=24, strided=True, size=24)
    inputs = h.make_inputs("odd", dtype, S=20, S_kv=90, Dk=16, size=24, device=device)
    inputs["q"] = inputs["q"].permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
    inputs["k"] = torch.cat((inputs["k"], inputs["v"]), -1)[..., 3:19]  # neither aligned nor dense
    inputs["v"] = inputs["v"][:, :1].expand(-1, 2, -1, -1)
    check(results("tiles", inputs), inputs)


def test_other_strides_are_copied(device):
    inputs = h.make_inputs("odd", F32, S=20, S_kv=90, Dk=16, size=24, device=device)
    inputs["k"] = inputs["k"].mT.contiguous().mT
    inputs["q"] = inputs["q"].mT.contiguous().mT
    inputs["v"] = inputs["v"][..., :1].expand(-1, -1, -1, 5)
    inputs["ranges"] = inputs["ranges"].mT.contiguous().mT
    check(results("tiles", inputs), inputs)


def test_offsets_beyond_2_to_the_31(device):
    far = 2**31 + 64
    memory = torch.empty(far + 4096, dtype=BF16, device=device)
    i = h.make_inputs("odd", BF16, B=1, S=20, S_kv=90, Dk=16, size=24, device=device)
    for name, offset in (("k", 0), ("v", 2048)):
        view = memory.as_strided((1, 2, 90, 16), (1, far, 16, 1), offset)
        i[name] = view.copy_(i[name])
    check(results("tiles", i), i)


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
    clean = results("tiles", inputs)
    keys = (7, 70, 149)
    inputs[name][:, :, keys] = poison
    got = results("tiles", inputs)
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
    assert h.error(results("tiles", inputs)["o"], want["o"]) < 1e-6


def test_nan_in_a_query_stays_in_its_row(device):
    inputs = h.make_inputs("empty", F32, B=1, S=20, S_kv=60, h=2, device=device)
    clean = results("tiles", inputs)
    inputs["q"][0, 3, 0, 1] = NAN
    got = results("tiles", inputs)
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


# --- gathers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SPLITS)
def test_nan_that_one_query_selects_stays_with_it(device, path):
    inputs = h.make_inputs("all", F32, B=1, S=3, G=1, S_kv=20, r=2, device=device)
    inputs["ranges"][:] = torch.tensor([[0, 10], [3, 4]])
    inputs["ranges"][0, 1] = torch.tensor([[0, 5], [12, 16]])
    inputs["v"][0, 0, 13] = NAN
    inputs["k"][0, 0, 14] = NAN
    got = results(path, inputs)
    assert got["o"][0, 1].isnan().all() and got["lse"][0, 1].isnan().all()
    assert got["o"][0, [0, 2]].isfinite().all() and got["lse"][0, [0, 2]].isfinite().all()


def test_splits(builder):
    sms = builder.device_props().sm_count
    splits = [gather_plan.splits(builder, rows, 4) for rows in (0, 1, 2, sms, 2 * sms, 4 * sms, 4 * sms + 1, 10**9)]
    most = min(gather_plan.MAX_SPLITS, 4 * sms)
    assert splits == [most, most, min(most, 2 * sms), 4, 2, 1, 1, 1]


# --- the backward -------------------------------------------------------------------------------------------


def test_nan_in_one_of_few_queries_reaches_only_its_keys(device):
    """Puts NaN into one query and its gradient, where other queries select the same tiles."""
    inputs = h.make_inputs("odd", BF16, B=1, S=6, S_kv=70, G=1, h=4, Dk=16, device=device)
    ups = h.upstream(inputs)
    want = results("few", inputs, ups)
    ups["o"][0, 2] = NAN
    inputs["q"][0, 2] = NAN
    got = results("few", inputs, ups)
    keys = set(h.selection_of(inputs, 0, 2, 0))
    assert 0 < len(keys) < 70
    for x in range(70):
        for n in ("dk", "dv"):
            bad, good = got[n][0, 0, x], want[n][0, 0, x]
            assert bad.isnan().all() if x in keys else torch.equal(bad, good), (n, x)


@pytest.mark.parametrize(
    ("S", "r", "chosen"), [(1, 16, True), (16, 16, True), (17, 16, False), (256, 65, True), (257, 65, False)]
)
def test_the_kernel_follows_from_the_shape(S, r, chosen):
    """Checks which shapes run the kernel for few queries.

    Not those whose neighbours share key tiles, nor more queries than it reads bitmap words for.
    """
    names = []

    class Names(EagerBuilder):
        def launch(self, kernel, *args):
            names.append(kernel.__name__)

    def empty(*shape, dtype=BF16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k, lse = empty(1, S, 2, 16, 128), empty(1, 2, 4096, 128), empty(1, S, 2, 16, dtype=F32)
    args = (q, lse, q, k, k, empty(1, S, 2, r, 2, dtype=torch.int32), None, None, None, q, lse, 0.1)
    backward_plan.plan_selection_attention_backward(Names(torch.device("meta"), DeviceProps(132, "cuda", 90)), *args)
    assert ("selection_dkv_few" in names, "selection_dkv" in names) == (chosen, not chosen)


@pytest.mark.parametrize(
    ("path", "value", "heads", "r"),
    [
        *[("many", *of, 4) for of in some([*product([NAN, INF], [4, 16])], [(NAN, 4), (NAN, 16), (INF, 16)])],
        *[("by shape", value, 3, r) for value, r in some([*product([NAN, INF], [2, 70])], [(NAN, 2), (INF, 70)])],
    ],
)
def test_what_is_not_selected_does_not_leak(device, path, value, heads, r):
    """Puts NaN or infinity into keys and values that no query selects, in tiles that all queries read."""
    S, S_kv = 20 if path == "many" else 2, max(70, 25 * r)
    inputs = h.make_inputs("odd", BF16, B=1, S=S, S_kv=S_kv, G=1, h=heads, Dk=16, r=r, sink=True, device=device)
    ups = h.upstream(inputs)
    unseen = torch.ones(S_kv, dtype=torch.bool)
    for s in range(S):
        unseen[h.selection_of(inputs, 0, s, 0)] = False
    unseen[::7] = True  # and some keys are taken from every query
    rows = inputs["ranges"].cpu()
    for at in unseen.nonzero()[:, 0].tolist():
        hit = (rows[..., 0] <= at) & (at < rows[..., 1])
        rows[..., 1] = torch.where(hit, torch.full_like(rows[..., 1], at), rows[..., 1])
    inputs["ranges"] = rows.to(device)
    want = results(path, inputs, ups)
    for n in "kv":
        inputs[n][:, :, unseen] = value
    got = results(path, inputs, ups)
    assert 10 <= unseen.sum() < S_kv and (path == "many" or equal(got, want))
    for n in {"dq", "dk", "dv"} & got.keys():
        assert got[n].isfinite().all(), n
        assert torch.allclose(got[n].double(), want[n].double(), rtol=0.02, atol=0.02), n


def test_a_nan_reaches_only_those_that_select_it(device):
    inputs = h.make_inputs("odd", BF16, B=1, S=20, S_kv=70, G=1, h=4, Dk=16, device=device)
    ups = h.upstream(inputs, ("o",))
    inputs["k"][0, 0, 33] = NAN
    got = results("many", inputs, ups)
    touched = [33 in h.selection_of(inputs, 0, s, 0) for s in range(20)]
    assert any(touched) and not all(touched)
    for s, nan in enumerate(touched):
        assert bool(got["dq"][0, s].isnan().any()) == nan, s


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("D", [16, 80, 128, 192, 256, 512])
def test_dq_and_dkv_have_one_key_tile(D, arch):
    """Checks that dK and dV use the tiles of dQ's bitmaps, which hold one bit per key in two words."""
    for itemsize in (2, 4):
        found = backward_plan.backward_config(16, D, D, itemsize, "cuda", arch)
        if found is None:
            assert (D, itemsize) == (512, 4) and arch in (89, 120)
            continue
        queries, keys = found
        assert keys.BN <= 64 and (queries is None or queries.BN == keys.BN)


def test_unsupported_sizes_have_a_reason():
    small = EagerBuilder(torch.device("meta"), DeviceProps(100, "cuda", 89))
    q, k, ranges, lse = (
        torch.empty(*n, device="meta") for n in ((1, 3, 1, 2, 512), (1, 1, 9, 512), (1, 3, 1, 2, 2), (1, 3, 1, 2))
    )
    args = (q, lse, q, k, k, ranges.int(), q, lse)
    assert "512" in backward_plan.unsupported(small, *args)
    assert (
        backward_plan.unsupported(
            small, *(t.bfloat16() if len(t.shape) > 3 and t.shape[-1] == 512 else t for t in args)
        )
        is None
    )
