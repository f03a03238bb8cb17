# SPDX-License-Identifier: Apache-2.0
"""Parity of the kernels for lists of keys and for masks with the fp64 loop, with every buffer poisoned, in all three parts.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from conftest import cases, some

from mhc_inductor.kernels.eager import plan_of, why_not
from mhc_inductor.kernels.selection import lists_plan, masks_plan
from mhc_inductor.ops import registry
from tests.oracles import lists as h
from tests.oracles import masks
from tests.oracles.selection import error, selection_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIN = torch.finfo(F32).min


def results(made, ups, scale, op):
    """Returns the outputs and gradients of ``op(name)`` and of that of the backward."""
    args = h.arguments(made, made["q"].shape[-1] ** -0.5 if scale is None else scale)
    name = h.name_of(made)
    o, lse = op(name)(*args)
    grads = op(f"{name}_backward")(*h.backward_arguments((ups.get("o"), ups.get("lse")), args, o, lse))
    return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}


def planned(builder, made, ups, scale=None):
    """Returns the outputs and gradients of both plans."""

    def plan(name):
        def call(*args):
            assert why_not(name, args, builder) is None
            return plan_of(name)(builder, *args)

        return call

    got = results(made, ups, scale, plan)
    for name, t in list(got.items()):
        given = made.get(name[1:], t)
        assert t.is_contiguous()
        if given is None:
            assert got.pop(name).shape == (0,)
        elif name.startswith("d"):
            assert (t.shape, t.dtype) == (given.shape, given.dtype)
    return got


def run(builder, *, over="list", up=h.OUTPUTS, scale=None, **kwargs):
    """Checks the outputs and gradients of both plans against fp64; returns inputs and results."""
    make = h.make_inputs if over == "list" else masks.make_inputs
    made = make(device=str(builder.device), **{"B": 1, "dtype": F32, **kwargs})
    ups = h.upstream(made, up)
    got = planned(builder, made, ups, scale)
    h.check(got, made, ups, scale, 1.05)
    return made, got


BIASES = [{}, {"bias": "rows"}, {"bias": "rows", "repeats": True}]
MASK = {"over": "mask", "kind": "random"}
WIDTHS = some(
    [(16, 16, True), (80, 48, False), (24, 40, False), (128, 128, True), (192, 128, True), (512, 512, False),
     (512, 512, True), (576, 512, True), (576, 512, False), (100, 60, True), (1, 1, True), (33, 7, False)],
    [(24, 40, False), (80, 64, True), (100, 60, True), (1, 1, True)],
)  # fmt: skip
WIDE = [(*width, dtype) for width in WIDTHS for dtype in (F32, BF16)]
LOW = [F32, BF16, F16]
DTYPES = {"kind": "odd", "S": 4, "S_kv": 40, "Dk": 16, "n": 21, "sink": True, "strided": True}
LATENT = {"G": 1, "h": 2, "S_kv": 40, "Dk": 576, "Dv": 512}
CASES = cases(
    dtypes=[
        {**DTYPES, "dtype": dtype, "shared": shared, **bias, **({"bias_dtype": dtype} if bias else {})}
        for dtype, shared, bias in product(LOW, [False, True], BIASES)
    ],
    kinds=[
        {"kind": kind, "S": 3, "S_kv": 20, "n": 20, "sink": kind == "empty", **bias}
        for kind, bias in product(["random", "sorted", "empty", "all", "none"], BIASES)
    ],
    # Next to the lowest number, only the sum of the weights tells them: 70 entries, of few keys.
    rows_of_the_lowest_bias=(
        {"kind": "odd", "S": 4, "S_kv": 9, "n": 70, "bias": "lowest"},
        "repeats sink",
        product([False, True], [False, 0.5, float("-inf")]),
    ),
    widths=({"kind": "random", "S": 2, "G": 1, "h": some(20, 3), "S_kv": 60, "n": 37}, "Dk Dv shared dtype", WIDE),
    # In fp32 the queries are read again for every tile.
    widest=[
        {"kind": "odd", **LATENT, "S": 1, "G": 2, "S_kv": 30, "n": 18, "shared": True, **more}
        for more in ({"dtype": BF16}, {"bias": "rows"})
    ],
    heads=(
        {"kind": "odd", "dtype": BF16, "S": 2, "G": 1, "S_kv": 30, "n": 18, "Dk": 16, "sink": True},
        "h",
        some([1, 2, 17, 64, 65, 128], [1, 17, 65]),
    ),
    one_gradient=[
        {"kind": "odd", "S": 3, "S_kv": 20, "sink": True, "up": up, "shared": shared, **bias}
        for up, shared, bias in product([("o",), ("lse",)], [False, True], BIASES[::2])
    ],
    segments=(
        {"kind": "random", "S": 5, "S_kv": 24, "n": 12, "segments": True, "B": 2},
        "index_dtype",
        [torch.int32, torch.int64],
    ),
    packed=(
        {"kind": "odd", "n": 6},
        "S S_kv lengths key_lengths segments index_dtype",
        [(9, 11, (4, 0, 3), (6, 1, 4), True, torch.int32), (12, 12, (5, 0, 4, 3), None, False, torch.int64)],
    ),
    numbers=[
        {"kind": "random", "dtype": BF16, "S": 2, "G": 1, "S_kv": n + 3, "n": n}
        for n in some([1, 15, 17, 64, 130, 1000, 4096], [1, 17, 130])
    ],
    # The interpreter would take a minute for many queries: there a test of plan_invert is alone with so many.
    many_queries=[{"kind": "random", "dtype": BF16, "S": some(1500, 18), "G": 1, "h": 1, "Dk": 16, "S_kv": 5, "n": 2}],
    nothing=[
        {"kind": "none", "sink": True, "bias": bias, **sizes}
        for bias in (None, "normal")
        for sizes in ({"S": 0, "S_kv": 4}, {"S": 3, "S_kv": 0}, {"S": 2, "S_kv": 5, "n": 0}, {"B": 0})
    ],
    mask_dtypes=(
        {**MASK, "S": 9, "S_kv": 70, "Dk": 16, "sink": True, "strided": True, "h": 4},
        "dtype shared",
        product(LOW, [False, True]),
    ),
    mask_kinds=({**MASK, "S": 40, "S_kv": 90, "h": 2, "G": 1}, "kind sink", product(masks.KINDS, [False, True])),
    # A sum with -65504, the fill in fp16, is rounded, which the loop in fp64 does not do.
    dtypes_of_masks=(
        {**MASK, "dtype": BF16, "S": 20, "S_kv": 70, "h": 4, "G": 1, "Dk": 16},
        "kind mask_dtype",
        [("window" if t is F16 and k == "fills" else k, t) for k in ("causal", "fills", "biased") for t in LOW],
    ),
    masks_that_broadcast=({**MASK, "B": 2, "S": 18, "S_kv": 40}, "shared_mask", ["", "B", "G", "BG", "S", "BGS"]),
    mask_widths=({**MASK, "kind": "window", "S": 5, "G": 1, "h": some(20, 3), "S_kv": 70}, "Dk Dv shared dtype", WIDE),
    mask_widest=(
        {**MASK, **LATENT, "dtype": BF16, "S": 3},
        "shared kind",
        product([False, True], ["random", "biased"]),
    ),
    mask_heads=(
        {**MASK, "dtype": BF16, "S": 5, "G": 1, "S_kv": 70, "Dk": 16, "sink": True},
        "h",
        some([1, 2, 17, 64, 65, 128], [1, 17, 65]),
    ),
    mask_one_gradient=(
        {**MASK, "S": 9, "S_kv": 20, "sink": True},
        "up kind shared",
        [(up, kind, kind == "empty") for up in [("o",), ("lse",)] for kind in ("empty", "fills")],
    ),
    mask_scale=({**MASK, "S": 5, "S_kv": 20, "scale": -0.7}, "kind", ["random", "biased"]),
    mask_nothing=[
        {**MASK, "sink": True, **sizes}
        for sizes in ({"S": 0, "S_kv": 4}, {"S": 3, "S_kv": 0}, {"S": 1, "S_kv": 1}, {"B": 0})
    ],
)


@pytest.mark.parametrize("case", CASES)
def test_against_fp64(builder, case):
    run(builder, **case)


@pytest.mark.parametrize("low", [-1e4, -1e9, h.LOWEST / 2])
@pytest.mark.parametrize("repeats", [False, True])
def test_low_biases_are_rounded_as_the_reference_does(builder, low, repeats):
    """All entries of half the rows, and some of the others."""
    made = h.make_inputs("odd", F32, S=4, S_kv=12, n=40, bias="normal", repeats=repeats, device=str(builder.device))
    made["bias"] = made["bias"].where(made["bias"] > 0.5, low)
    made["bias"][:, ::2] = low
    ups = h.upstream(made)
    got, want = planned(builder, made, ups), results(made, ups, None, registry.REFERENCE.get)
    # At -1e4 a score that differs in its last bit may round to the next 2^-10.
    assert all(error(got[name], want[name]) < 1e-3 for name in got)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_bias_of_nan_gives_its_score_no_gradient(builder, dtype, shared):
    """Every second row has no other bias."""
    made = h.make_inputs(
        "odd", dtype, B=1, S=4, S_kv=12, n=40, bias="normal", repeats=True, shared=shared, device=str(builder.device)
    )
    made["bias"][:, ::2] = torch.nan
    ups = h.upstream(made)
    got, want = planned(builder, made, ups), results(made, ups, None, registry.REFERENCE.get)
    assert not got["dq"][:, ::2].any() and got["o"][:, ::2].isnan().all() and got["lse"][:, ::2].isnan().all()
    assert shared or got["dk"].isfinite().all()
    for name in got:
        assert torch.equal(got[name].isnan(), want[name].isnan()), name
        assert error(got[name].nan_to_num(), want[name].nan_to_num()) < (1e-5 if dtype is F32 else 2e-2), name


@pytest.mark.parametrize("bias", [{}, {"bias": "rows"}, {"bias": "lowest"}], ids=str)
def test_few_queries_split_their_keys(builder, monkeypatch, bias):
    splits = []
    monkeypatch.setattr(lists_plan, "splits", lambda b, rows, per: splits.append(3) or 3)
    run(builder, kind="random", S=1, S_kv=200, n=some(150, 91), sink=not bias, shared=True, **bias)
    assert splits


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", BIASES[::2], ids=str)
def test_any_size_of_the_chunks_gives_the_same_bits(builder, monkeypatch, shared, bias):
    case = {"kind": "odd", "dtype": BF16, "B": 2, "S": 7, "S_kv": 20, "n": 14, "sink": True, "shared": shared, **bias}
    # So few programs on a large GPU would split the keys of dQ, which a chunk of several does not.
    monkeypatch.setattr(lists_plan, "splits", lambda *_: 1)
    _, whole = run(builder, **case)
    for rows in (1, 3):
        monkeypatch.setattr(lists_plan, "MOST_QUERIES", rows)
        _, parts = run(builder, **case)
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("CQ", [16, 48, 1024, 1504, 2048])
def test_the_pairs_of_each_key_in_the_order_of_the_queries(builder, CQ):
    generator = torch.Generator().manual_seed(0)
    units, n = 5, 32
    slots = torch.randint(-40, n + 1, (units, CQ), generator=generator).clamp(min=0).short()
    slots[1], slots[2] = 0, n
    inverse, sizes = builder.empty((units, CQ), torch.int32), builder.empty((units,), torch.int32)
    lists_plan.plan_invert(builder, slots.to(builder.device), inverse, sizes, n)
    for unit in range(units):
        want = [c * n + int(slot) - 1 for c, slot in enumerate(slots[unit]) if slot]
        assert inverse[unit, : len(want)].tolist() == want and int(sizes[unit]) == len(want)


@pytest.mark.parametrize("S_kv", [100, 40_000, 4_000_000])
@pytest.mark.parametrize("S", [1, 900, 2048, 2100, 8192])
@pytest.mark.parametrize("n", [16, 640, 4096])
@pytest.mark.parametrize("programs", [1, 2, 200])
def test_chunks_stay_within_their_workspaces(builder, S, S_kv, n, programs):
    rows = lists_plan.chunk_of(builder, S, 2, n, 512, programs, S_kv)
    assert 1 <= rows <= min(S, 2048)
    assert 4 * 2 * rows * n * 512 <= max(lists_plan.PAIRS, 4 * 2 * n * 512)
    assert 6 * 2 * rows * S_kv <= max(lists_plan.TABLE, 6 * 2 * 1024 * S_kv)
    if 2 * rows < min(S, 2048):  # one more chunk would not do
        assert 4 * 2 * 2 * rows * n * 512 > lists_plan.PAIRS or 6 * 2 * 2 * rows * S_kv > lists_plan.TABLE


def test_the_order_of_a_list_does_not_matter(builder):
    made, got = run(builder, kind="sorted", dtype=BF16, S=4, S_kv=40, n=30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3)).to(builder.device)
    mixed = torch.cat((made["indices"], made["indices"][..., :7]), -1)[
        ..., torch.cat((order, order.new_tensor([33, 31])))
    ]
    args = h.arguments({**made, "indices": mixed}, made["q"].shape[-1] ** -0.5)
    o, lse = lists_plan.plan_selection_list_attention(builder, *args)
    assert torch.equal(o, got["o"]) and torch.equal(lse, got["lse"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("kind", "name"), [*product(["list", "random", "biased"], ["q", "k", "v"]), ("list", "bias")])
def test_nan_in_a_key_reaches_only_the_queries_that_see_it(builder, kind, name, bad):
    sizes = {"B": 1, "S": 6, "G": 1, "S_kv": 30, "device": str(builder.device)}
    if kind == "list":
        made = h.make_inputs("random", F32, n=5, bias="normal" if name == "bias" else None, **sizes)
    else:
        made = masks.make_inputs(kind, F32, **sizes)
    seen = torch.zeros(6, 30, dtype=torch.bool)
    for s in range(6):
        seen[s, selection_of({**made, "bias": None}, 0, s, 0)] = True
    if name in ("q", "bias"):
        made[name][0, 2, 0, 1] = bad
        touched = torch.arange(6) == 2
    else:
        key = int(seen[0].nonzero()[0])
        made[name][0, 0, key] = bad
        touched = seen[:, key]
    assert 0 < touched.sum() < 6
    got = planned(builder, made, h.upstream(made, ("o",)), 0.3)
    for n in ("o", "dq"):
        assert got[n][0].flatten(1).isfinite().all(-1).cpu()[~touched].all()
    assert not got["o"][0].flatten(1).isfinite().all(-1).cpu()[touched].any()
    if kind == "list" or name != "q":  # under a mask, dK and dV are reached only through the queries that see the key
        reached = seen[touched].any(0)
        assert not reached.all() and all(got[n][0, 0].isfinite().all(-1).cpu()[~reached].all() for n in ("dk", "dv"))


@pytest.mark.parametrize("bias", [None, "normal"])
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"n": 4096}, None), ({"n": 4097}, "n = 4097 keys a query are above 4096"), ({"Dk": 577}, "D = 577 is above 576"),
     ({"h": 129}, "h = 129 heads a group are above 128"), ({"dtype": torch.float64}, "dtype torch.float64 has no kernel")],
)  # fmt: skip
def test_what_runs_the_reference(builder, bias, sizes, reason):
    made = h.make_inputs(**{"dtype": F32, "S": 1, "bias": bias, **sizes})
    assert why_not(h.name_of(made), h.arguments(made, 0.3), builder) == reason


# --- masks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [MIN, torch.finfo(BF16).min, -65504.0, -1e9, -30.0])
def test_finite_fills_are_those_of_the_reference(builder, fill):
    made = masks.make_inputs("fills", F32, B=1, S=40, S_kv=70, G=1, sink=True, device=str(builder.device))
    made["mask"] = made["mask"].clamp(min=fill)
    assert (made["mask"] < 0).all(-1).any()
    # Scores of few bits: a rounding before the sum of score and fill would change the weights below -1e9.
    made["q"], made["k"] = made["q"].mul(4).round() / 4, made["k"].mul(4).round() / 4
    ups = h.upstream(made)
    got, want = planned(builder, made, ups, 0.5), results(made, ups, 0.5, registry.REFERENCE.get)
    lse = want.pop("lse")
    assert all(error(got[n], want[n]) < 2e-5 for n in want)
    assert (got["lse"] - lse).abs().le(1e-5 + 1e-6 * lse.abs()).all()


def lists_of(builder, mask, QT, BN):
    """Returns the tiles that the lists hold: pairs (tile of queries, tile of keys), those seen whole and in part."""
    S, S_kv = mask.shape[1], mask.shape[3]
    masked = masks_plan._masked(builder, mask)
    found = []
    for by_key in (False, True):
        lists = masked.lists(builder, S, S_kv, QT, BN, by_key)
        whole, part = set(), set()
        for i, (row, (nf, np)) in enumerate(
            zip(lists["lists"][0, 0].tolist(), lists["counts"][0, 0].tolist(), strict=True)
        ):
            back = row[::-1][:np]
            assert row[:nf] == sorted(row[:nf]) and back == sorted(back)
            whole |= {(j, i) if by_key else (i, j) for j in row[:nf]}
            part |= {(j, i) if by_key else (i, j) for j in back}
        found.append((whole, part))
    assert found[0] == found[1], "the lists of keys are those of queries, turned around"
    return found[0]


_LISTED = [(kind, floats) for kind in ("causal", "window", "sparse", "none", "all") for floats in (False, True)]


@pytest.mark.parametrize(("kind", "floats"), [*_LISTED, ("fills", True)])
def test_only_the_tiles_that_are_seen_are_listed(builder, kind, floats):
    QT, BN, S, S_kv = 4, 16, 30, 70
    mask = masks.make_mask(kind, (1, S, 1, S_kv), F32 if floats else torch.bool, torch.Generator().manual_seed(0))
    if kind == "fills":
        mask[0, 4:8, 0, :5] = 0  # in these rows fills hide what is under them
        mask[0, 4:8, 0, 20:] = MIN
    mask = mask.to(builder.device)
    whole, part = lists_of(builder, mask, QT, BN)
    seen = (mask == 0) if floats else mask
    hidden = (mask <= MIN / 2) if floats else ~mask
    for i in range(-(-S // QT)):
        rows = slice(i * QT, i * QT + QT)
        apart = bool((mask[0, rows, 0].amax(-1) > -1e30).all()) if floats else True
        for j in range(-(-S_kv // BN)):
            keys = slice(j * BN, j * BN + BN)
            is_whole = bool(seen[0, rows, 0, keys].all()) and j * BN + BN <= S_kv
            skipped = bool((mask[0, rows, 0, keys] == -torch.inf).all()) if floats else False
            skipped = skipped or (apart and bool(hidden[0, rows, 0, keys].all()))
            assert ((i, j) in whole) == is_whole and ((i, j) in part) == (not is_whole and not skipped)


def test_a_sink_of_minus_infinity_beside_fills(builder):
    made = masks.make_inputs("fills", F32, B=1, S=9, S_kv=20, G=1, sink=True, device=str(builder.device))
    assert (made["mask"] < 0).all(-1).any()
    made["sink"][0, 0] = -torch.inf
    ups = h.upstream(made)
    got, want = planned(builder, made, ups, 0.3), planned(builder, {**made, "sink": None}, ups, 0.3)
    for n in ("o", "lse", "dq"):
        assert error(got[n][:, :, :, 0], want[n][:, :, :, 0]) < 1e-6
    assert got["dsink"][0, 0] == 0 and all(t.isfinite().all() for t in got.values())


def test_nan_in_a_mask_reaches_its_row(builder):
    made = masks.make_inputs("causal", F32, mask_dtype=F32, B=1, S=40, S_kv=90, G=1, device=str(builder.device))
    made["mask"][0, 5, 0, 80] = float("nan")  # in a tile that no query sees otherwise
    o, _ = masks_plan.plan_selection_mask_attention(builder, *h.arguments(made, 0.3))
    assert o[0, 5].isnan().all() and o[0, :5].isfinite().all() and o[0, 6:].isfinite().all()


def test_equal_bits_in_two_runs(builder):
    _, one = run(builder, kind="random", dtype=BF16, S=20, S_kv=70, h=4, sink=True)
    _, two = run(builder, kind="random", dtype=BF16, S=20, S_kv=70, h=4, sink=True)
    assert all(torch.equal(one[n], two[n]) for n in one)
