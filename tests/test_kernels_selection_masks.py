# SPDX-License-Identifier: Apache-2.0
"""Parity of the kernels for masks with the fp64 loop, with every buffer poisoned, in all three parts.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from conftest import some

from mhc_inductor.kernels.selection import masks_plan
from mhc_inductor.reference import selection_masks as reference
from tests.oracles import lists as h
from tests.oracles import masks as helpers_masks
from tests.oracles.selection import error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIN = torch.finfo(F32).min
ROUNDINGS = 1.05


def plans(builder, made, ups, scale):
    """Returns the outputs and gradients of both plans."""
    args = h.arguments(made, scale)
    assert masks_plan.unsupported_sizes(builder, *args) is None
    o, lse = masks_plan.plan_selection_mask_attention(builder, *args)
    both = (ups.get("o"), ups.get("lse"), *args[:-2], o, lse, *args[-2:])
    assert masks_plan.unsupported_sizes(builder, *both) is None
    grads = masks_plan.plan_selection_mask_attention_backward(builder, *both)
    got = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}
    for name, t in list(got.items()):
        given = made.get(name[1:], t)
        assert t.is_contiguous()
        if given is None:
            assert got.pop(name).shape == (0,)
        elif name.startswith("d"):
            assert (t.shape, t.dtype) == (given.shape, given.dtype)
    return got


def run(builder, *, up=h.OUTPUTS, scale=None, **kwargs):
    """Checks the outputs and gradients of both plans against fp64; returns inputs and results."""
    made = helpers_masks.make_inputs(device=str(builder.device), **{"B": 1, "dtype": F32, **kwargs})
    ups = h.upstream(made, up)
    got = plans(builder, made, ups, made["q"].shape[-1] ** -0.5 if scale is None else scale)
    h.check(got, made, ups, scale, ROUNDINGS)
    return made, got


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shared", [False, True])
def test_dtypes(builder, dtype, shared):
    run(builder, kind="random", dtype=dtype, S=9, S_kv=70, Dk=16, sink=True, shared=shared, strided=True, h=4)


@pytest.mark.parametrize("kind", helpers_masks.KINDS)
@pytest.mark.parametrize("sink", [False, True])
def test_kinds_of_masks(builder, kind, sink):
    run(builder, kind=kind, S=40, S_kv=90, sink=sink, h=2, G=1)


@pytest.mark.parametrize("mask_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kind", ["causal", "fills", "biased"])
def test_dtypes_of_masks(builder, kind, mask_dtype):
    if mask_dtype is F16 and kind == "fills":  # a sum with -65504 is rounded, which the loop in fp64 does not do
        kind = "window"
    run(builder, kind=kind, mask_dtype=mask_dtype, dtype=BF16, S=20, S_kv=70, h=4, G=1, Dk=16)


@pytest.mark.parametrize("shared_mask", ["", "B", "G", "BG", "S", "BGS"])
def test_a_mask_that_broadcasts(builder, shared_mask):
    run(builder, kind="random", B=2, S=18, S_kv=40, shared_mask=shared_mask)


@pytest.mark.parametrize(
    ("Dk", "Dv", "shared"),
    some(
        [(16, 16, True), (80, 48, False), (24, 40, False), (128, 128, True), (192, 128, True), (512, 512, False),
         (512, 512, True), (576, 512, True), (576, 512, False), (100, 60, True), (1, 1, True), (33, 7, False)],
        [(24, 40, False), (80, 64, True), (100, 60, True), (1, 1, True)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_widths(builder, Dk, Dv, shared, dtype):
    run(builder, kind="window", dtype=dtype, S=5, G=1, h=some(20, 3), S_kv=70, Dk=Dk, Dv=Dv, shared=shared)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["random", "biased"])
def test_the_widest_rows(builder, shared, kind):
    run(builder, kind=kind, dtype=BF16, S=3, G=1, h=2, S_kv=40, Dk=576, Dv=512, shared=shared)


@pytest.mark.parametrize("heads", some([1, 2, 17, 64, 65, 128], [1, 17, 65]))
def test_heads(builder, heads):
    run(builder, kind="random", dtype=BF16, S=5, G=1, h=heads, S_kv=70, Dk=16, sink=True)


@pytest.mark.parametrize("up", [("o",), ("lse",)])
@pytest.mark.parametrize("kind", ["empty", "fills"])
def test_one_gradient_alone(builder, up, kind):
    run(builder, kind=kind, S=9, S_kv=20, sink=True, up=up, shared=kind == "empty")


def test_a_negative_scale(builder):
    for kind in ("random", "biased"):
        run(builder, kind=kind, S=5, S_kv=20, scale=-0.7)


@pytest.mark.parametrize("fill", [MIN, torch.finfo(BF16).min, -65504.0, -1e9, -30.0])
def test_finite_fills_are_those_of_the_reference(builder, fill):
    made = helpers_masks.make_inputs("fills", F32, B=1, S=40, S_kv=70, G=1, sink=True, device=str(builder.device))
    made["mask"] = made["mask"].clamp(min=fill)
    assert (made["mask"] < 0).all(-1).any()
    # Scores of few bits: a rounding before the sum of score and fill would change the weights below -1e9.
    made["q"], made["k"] = made["q"].mul(4).round() / 4, made["k"].mul(4).round() / 4
    ups = h.upstream(made)
    args = h.arguments(made, 0.5)
    o, lse = reference.selection_mask_attention(*args)
    grads = reference.selection_mask_attention_backward(*ups.values(), *args[:-2], o, lse, *args[-2:])
    want = {"o": o, **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}
    got = plans(builder, made, ups, 0.5)
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
    mask = helpers_masks.make_mask(
        kind, (1, S, 1, S_kv), F32 if floats else torch.bool, torch.Generator().manual_seed(0)
    )
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


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["random", "biased"])
def test_nan_in_a_key_reaches_only_the_queries_that_see_it(builder, name, bad, kind):
    made = helpers_masks.make_inputs(kind, F32, B=1, S=6, G=1, S_kv=30, device=str(builder.device))
    if name == "q":
        made["q"][0, 2] = bad
        touched = torch.arange(6) == 2
    else:
        made[name][0, 0, 7] = bad
        shown = made["mask"][0, :, 0, 7].cpu()
        touched = shown if kind == "random" else shown != -torch.inf
    assert 0 < touched.sum() < 6
    got = plans(builder, made, {"o": torch.ones_like(made["q"])}, 0.3)
    for t in (got["o"], got["dq"]):
        finite = t[0].flatten(1).isfinite().all(-1).cpu()
        assert finite[~touched].all()
    assert not got["o"][0].flatten(1).isfinite().all(-1).cpu()[touched].any()
    if name != "q":  # dK and dV are reached only through the queries that see the key
        shown = made["mask"] if kind == "random" else made["mask"] != -torch.inf
        reached = shown[0, :, 0].cpu()[touched].any(0)
        assert not reached.all() and all(got[n][0, 0][~reached].isfinite().all() for n in ("dk", "dv"))


def test_a_sink_of_minus_infinity_beside_fills(builder):
    made = helpers_masks.make_inputs("fills", F32, B=1, S=9, S_kv=20, G=1, sink=True, device=str(builder.device))
    assert (made["mask"] < 0).all(-1).any()
    made["sink"][0, 0] = -torch.inf
    ups = h.upstream(made)
    got, want = plans(builder, made, ups, 0.3), plans(builder, {**made, "sink": None}, ups, 0.3)
    for n in ("o", "lse", "dq"):
        assert error(got[n][:, :, :, 0], want[n][:, :, :, 0]) < 1e-6
    assert got["dsink"][0, 0] == 0 and all(t.isfinite().all() for t in got.values())


def test_nan_in_a_mask_reaches_its_row(builder):
    made = helpers_masks.make_inputs("causal", F32, mask_dtype=F32, B=1, S=40, S_kv=90, G=1, device=str(builder.device))
    made["mask"][0, 5, 0, 80] = float("nan")  # in a tile that no query sees otherwise
    o, _ = masks_plan.plan_selection_mask_attention(builder, *h.arguments(made, 0.3))
    assert o[0, 5].isnan().all() and o[0, :5].isfinite().all() and o[0, 6:].isfinite().all()


def test_equal_bits_in_two_runs(builder):
    _, one = run(builder, kind="random", dtype=BF16, S=20, S_kv=70, h=4, sink=True)
    _, two = run(builder, kind="random", dtype=BF16, S=20, S_kv=70, h=4, sink=True)
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_nothing(builder):
    for case in ({"S": 0, "S_kv": 4}, {"S": 3, "S_kv": 0}, {"S": 1, "S_kv": 1}, {"B": 0}):
        run(builder, kind="random", sink=True, **case)
