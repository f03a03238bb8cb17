# SPDX-License-Identifier: Apache-2.0
"""Parity of the kernels for lists of keys with the fp64 loop, with every buffer poisoned, in all three parts.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import some

from mhc_inductor.kernels.eager import plan_of, why_not
from mhc_inductor.kernels.selection import lists_plan
from mhc_inductor.ops import registry
from tests.oracles import lists as h
from tests.oracles.selection import error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDINGS = 1.05


def results(made, ups, scale, op):
    """Returns the outputs and gradients of ``op(name)`` and of that of the backward."""
    args = h.arguments(made, made["q"].shape[-1] ** -0.5 if scale is None else scale)
    name = h.name_of(made)
    o, lse = op(name)(*args)
    grads = op(f"{name}_backward")(*h.backward_arguments((ups.get("o"), ups.get("lse")), args, o, lse))
    return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}


def planned(builder, made, ups, scale=None):
    """Returns the outputs and gradients of both plans."""
    assert why_not(h.name_of(made), h.arguments(made, 1.0), builder) is None
    return results(made, ups, scale, lambda name: functools.partial(plan_of(name), builder))


def run(builder, *, up=h.OUTPUTS, scale=None, **kwargs):
    """Checks the outputs and gradients of both plans against fp64; returns inputs and results."""
    made = h.make_inputs(device=str(builder.device), **{"B": 1, "dtype": F32, **kwargs})
    ups = h.upstream(made, up)
    got = planned(builder, made, ups, scale)
    for name, t in list(got.items()):
        given = made.get(name[1:], t)
        assert t.is_contiguous()
        if given is None:
            assert got.pop(name).shape == (0,)
        elif name.startswith("d"):
            assert (t.shape, t.dtype) == (given.shape, given.dtype)
    h.check(got, made, ups, scale, ROUNDINGS)
    return made, got


BIASES = [{}, {"bias": "rows"}, {"bias": "rows", "repeats": True}]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_dtypes(builder, dtype, shared, bias):
    bias = {"bias_dtype": dtype, **bias} if bias else {}
    run(builder, kind="odd", dtype=dtype, S=4, S_kv=40, Dk=16, n=21, sink=True, shared=shared, strided=True, **bias)


@pytest.mark.parametrize("kind", ["random", "sorted", "empty", "all", "none"])
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_kinds_of_lists(builder, kind, bias):
    run(builder, kind=kind, S=3, S_kv=20, n=20, sink=kind == "empty", **bias)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("sink", [False, 0.5, float("-inf")])
def test_rows_of_the_lowest_bias(builder, repeats, sink):
    """Next to the lowest number, only the sum of the weights tells them: 70 entries, of few keys."""
    run(builder, kind="odd", S=4, S_kv=9, n=70, bias="lowest", repeats=repeats, sink=sink)


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
    assert all(error(got[name], want[name]) < 1e-3 for name in want)


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
    for name in want:
        assert torch.equal(got[name].isnan(), want[name].isnan()), name
        assert error(got[name].nan_to_num(), want[name].nan_to_num()) < (1e-5 if dtype is F32 else 2e-2), name


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
    run(builder, kind="random", dtype=dtype, S=2, G=1, h=some(20, 3), S_kv=60, n=37, Dk=Dk, Dv=Dv, shared=shared)


@pytest.mark.parametrize("more", [{"dtype": BF16}, {"bias": "rows"}], ids=str)
def test_the_widest_rows(builder, more):
    """In fp32 the queries are read again for every tile."""
    run(builder, kind="odd", S=1, G=2, h=2, S_kv=30, n=18, Dk=576, Dv=512, shared=True, **more)


@pytest.mark.parametrize("heads", some([1, 2, 17, 64, 65, 128], [1, 17, 65]))
def test_heads(builder, heads):
    run(builder, kind="odd", dtype=BF16, S=2, G=1, h=heads, S_kv=30, n=18, Dk=16, sink=True)


@pytest.mark.parametrize("up", [("o",), ("lse",)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", BIASES[::2], ids=str)
def test_one_gradient_alone(builder, up, shared, bias):
    run(builder, kind="odd", S=3, S_kv=20, sink=True, up=up, shared=shared, **bias)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_segments(builder, index_dtype):
    run(builder, kind="random", S=5, S_kv=24, n=12, segments=True, index_dtype=index_dtype, B=2)


def test_packed_sequences(builder):
    run(builder, kind="odd", S=9, S_kv=11, lengths=(4, 0, 3), key_lengths=(6, 1, 4), n=6, segments=True)
    run(builder, kind="odd", S=12, S_kv=12, lengths=(5, 0, 4, 3), n=6, index_dtype=torch.int64)


@pytest.mark.parametrize("n", some([1, 15, 17, 64, 130, 1000, 4096], [1, 17, 130]))
def test_numbers_of_keys(builder, n):
    run(builder, kind="random", dtype=BF16, S=2, G=1, S_kv=n + 3, n=n)


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
    _, whole = run(builder, **case)
    for rows in (1, 3):
        monkeypatch.setattr(lists_plan, "MOST_QUERIES", rows)
        _, parts = run(builder, **case)
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_chunk_of_many_queries(builder):
    # The interpreter would take a minute: there the next test is alone with so many.
    run(builder, kind="random", dtype=BF16, S=some(1500, 18), G=1, h=1, Dk=16, S_kv=5, n=2)


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


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_a_key_reaches_only_the_queries_that_select_it(builder, name, bad):
    bias = "normal" if name == "bias" else None
    made = h.make_inputs("random", F32, B=1, S=6, G=1, S_kv=30, n=5, bias=bias, device=str(builder.device))
    if name in ("q", "bias"):
        made[name][0, 2, 0, 1] = bad
        touched = torch.arange(6) == 2
    else:
        key = int(made["indices"][0, 0, 0, 0])
        made[name][0, 0, key] = bad
        touched = (made["indices"][0, :, 0] == key).any(-1).cpu()
    assert 0 < touched.sum() < 6
    got = planned(builder, made, h.upstream(made, ("o",)), 0.3)
    for n in ("o", "dq"):
        finite = got[n][0].flatten(1).isfinite().all(-1).cpu()
        assert finite[~touched].all()
    assert not got["o"][0].flatten(1).isfinite().all(-1).cpu()[touched].any()
    reached = torch.zeros(30, dtype=torch.bool)
    reached[made["indices"][0, touched.to(builder.device), 0].flatten().long().cpu()] = True
    for n in ("dk", "dv"):
        assert got[n][0, 0].isfinite().all(-1).cpu()[~reached].all()


@pytest.mark.parametrize("bias", [None, "normal"])
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"n": 4096}, None), ({"n": 4097}, "n = 4097 keys a query are above 4096"), ({"Dk": 577}, "D = 577 is above 576"),
     ({"h": 129}, "h = 129 heads a group are above 128"), ({"dtype": torch.float64}, "dtype torch.float64 has no kernel")],
)  # fmt: skip
def test_what_runs_the_reference(builder, bias, sizes, reason):
    made = h.make_inputs(**{"dtype": F32, "S": 1, "bias": bias, **sizes})
    assert why_not(h.name_of(made), h.arguments(made, 0.3), builder) == reason


@pytest.mark.parametrize("bias", [None, "normal"])
def test_nothing(builder, bias):
    for case in ({"S": 0, "S_kv": 4}, {"S": 3, "S_kv": 0}, {"S": 2, "S_kv": 5, "n": 0}, {"B": 0}):
        run(builder, kind="none", sink=True, bias=bias, **case)
