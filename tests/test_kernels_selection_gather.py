# SPDX-License-Identifier: Apache-2.0
"""Parity of the gather path's kernels with the fp64 loop, with every buffer poisoned.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from conftest import GPU, some

import mhc_inductor  # noqa: F401
from mhc_inductor.kernels.launch import DeviceProps
from mhc_inductor.kernels.selection import gather_plan, pieces_plan
from tests.oracles import selection as h
from tests.oracles.poisoned import Poisoned

if not GPU:
    from tests.tools.interpreter_fixes import fix_dot, fix_sort

    fix_dot()
    fix_sort()

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter's casts to bf16 and fp16 truncate where a GPU rounds to nearest.
ROUNDINGS = 1.05 if GPU else 2.1
PARTS = (1, 3)  # splits of a query's keys


@pytest.fixture
def builder(device):
    return Poisoned(torch.device(device), None if GPU else DeviceProps(1, "cuda", 90))


def ids_of(builder, inputs):
    return pieces_plan.plan_segments(builder, *(inputs.get(k) for k in h.SEGMENTS))


def forward(builder, inputs, NS=None, scale=None, config=None):
    args = [inputs[k] for k in h.NAMES]
    scale = inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    o, lse = gather_plan.plan_gather(builder, *args, scale, config, NS, ids_of(builder, inputs))
    assert o.dtype == inputs["q"].dtype and lse.dtype == F32 and o.is_contiguous() and lse.is_contiguous()
    return {"o": o, "lse": lse}


def dq_of(builder, inputs, up, got, NS=None, scale=None):
    """Computes dq, with delta by its definition."""
    q, k, v, ranges, sink, cu_q, cu_k = (inputs[n] for n in h.NAMES)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse = got["o"].float(), got["lse"]
    total = lse if sink is None else torch.logaddexp(lse, sink.float())
    delta = (up["o"].float() * o).sum(-1) if "o" in up else torch.zeros_like(lse)
    if "lse" in up:
        delta = delta - torch.where(lse.isinf(), 0.0, up["lse"] * (total - lse).exp())
    lse2 = torch.where(lse.isinf(), torch.inf, total / 0.6931471805599453)
    return gather_plan.plan_gather_dq(
        builder, up.get("o"), q, k, v, ranges, cu_q, cu_k, lse2, delta, scale, None, NS, None, ids_of(builder, inputs)
    )  # fmt: skip


def run(builder, *, parts=PARTS, scale=None, up=h.OUTPUTS, **made):
    """Checks o, lse and dq against fp64, for each number of splits."""
    inputs = h.make_inputs(device=str(builder.device), **{"B": 1, **made})
    dtype = inputs["q"].dtype
    ups = h.upstream(inputs, up)
    want = h.oracle(inputs, ups, scale=scale)
    plain = h.oracle(inputs, ups, F32, scale=scale)
    for NS in parts:
        got = forward(builder, inputs, NS, scale)
        got["dq"] = dq_of(builder, inputs, ups, got, NS, scale)
        for key, base in (("o", 1e-6), ("lse", 1e-6), ("dq", 2e-5)):
            # bf16 weights are multiplied, and the result is rounded once; dq's delta is computed from the rounded o.
            low = 0.0 if dtype == F32 or key == "lse" else (1 + (key == "dq")) * ROUNDINGS * h.rounding(dtype)
            error = h.error(got[key], want[key])
            allowed = max(base, 2 * h.error(plain[key], want[key])) + low
            assert error <= allowed, f"{key}, {NS} splits: {error:.3g} above {allowed:.3g}"
        empty = want["lse"] == -torch.inf
        assert (got["o"][empty] == 0).all() and (got["dq"][empty] == 0).all()
    return inputs, ups, got


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_dtypes(builder, dtype):
    run(builder, kind="odd", dtype=dtype, B=1, S=3, S_kv=40, sink=True)


@pytest.mark.parametrize("kind", ["rand", "twice", "empty", "token", "all", "none"])
def test_kinds_of_ranges(builder, kind):
    run(builder, kind=kind, dtype=BF16, B=1, S=3, S_kv=40, sink=kind == "empty", parts=PARTS[1:])


@pytest.mark.parametrize("r", [3, 70])
def test_segments(builder, r):
    """Tests ranges that programs make disjoint themselves and pieces, and NaN in keys of no query's segment."""
    inputs, ups, got = run(builder, kind="odd", dtype=F32, S=4, S_kv=90, r=r, size=30, segments="mixed", sink=True)
    unseen = inputs["segments_k"] == 2
    inputs["segments_q"][inputs["segments_q"] == 2] = 1
    results = []
    for bad in (1.0, float("nan")):
        for name in ("k", "v"):
            inputs[name] = torch.where(unseen[:, None, :, None], bad, inputs[name])
        got = forward(builder, inputs, 2)
        results.append({**got, "dq": dq_of(builder, inputs, ups, got, 2)})
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


@pytest.mark.parametrize("name", h.MISTAKES)
def test_mistakes_made_before(builder, name):
    case = {"B": 1, "S": 4, **h.MISTAKES[name], "dtype": F32}
    if not GPU and "lengths" not in case:
        case["S"] = min(case["S"], 4)
    run(builder, parts=PARTS[1:], **case)


@pytest.mark.parametrize("r", some([1, 16, 40, 100], [1, 40, 100]))
def test_numbers_of_ranges(builder, r):
    run(builder, kind="odd", dtype=F32, B=1, S=2, G=1, S_kv=some(600, 300), r=r, size=5, sink=True)


def test_token_level(builder):
    run(
        builder,
        kind="token",
        dtype=BF16,
        B=1,
        S=1,
        G=2,
        h=16,
        Dk=16,
        S_kv=some(2000, 500),
        r=some(512, 130),
        parts=(1, 5),
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_widest_heads_of_latent_attention(builder, dtype):
    """Tests Dk = 576, which is several tiles of columns and a part of one, with Dv = 512."""
    run(
        builder, dtype=dtype, B=1, S=1, G=1, h=20, Dk=576, Dv=512, S_kv=40, parts=PARTS[1:], up=("o",), segments="mixed"
    )


@pytest.mark.parametrize("heads", some([1, 4, 6, 16, 64, 128], [1, 6, 64, 128]))
def test_heads(builder, heads):
    run(builder, dtype=F32, B=1, S=2, h=heads, S_kv=30, sink=True)


@pytest.mark.parametrize(
    ("Dk", "Dv", "dtype"),
    some(
        [(*d, t) for d in ((16, 16), (80, 80), (128, 64), (24, 512), (512, 16)) for t in (F32, BF16)],
        [(80, 80, F32), (128, 64, BF16), (24, 512, F32), (512, 16, BF16)],
    ),
)
def test_widths(builder, Dk, Dv, dtype):
    run(builder, dtype=dtype, B=1, S=2, h=2, Dk=Dk, Dv=Dv, S_kv=30)


def test_more_heads_than_a_program_takes(builder):
    run(builder, dtype=BF16, B=1, S=1, G=1, h=20, Dk=512, Dv=512, S_kv=30, sink=True)


@pytest.mark.parametrize("r", [3, 70])
def test_packed_sequences(builder, r):
    run(builder, dtype=F32, B=1, S=6, S_kv=6, r=r, lengths=(2, 0, 3), parts=PARTS[:1])
    run(
        builder,
        dtype=F32,
        B=1,
        S=4,
        S_kv=40,
        r=r,
        lengths=(2, 0, 2),
        key_lengths=(20, 3, 12),
        sink=True,
        parts=PARTS[1:],
    )


@pytest.mark.parametrize("scale", some([0.0, -0.7, 2.5], [0.0, -0.7]))
def test_scales(builder, scale):
    run(builder, dtype=F32, B=1, S=3, scale=scale, sink=True)


@pytest.mark.parametrize("up", [("o",), ("lse",)])
def test_one_gradient_only(builder, up):
    run(builder, dtype=F32, S=3, sink=True, up=up)


def test_strided_keys_and_queries(builder):
    inputs, _, got = run(builder, dtype=BF16, B=2, S=2, Dk=16, strided=True, sink=True)
    inputs["q"] = inputs["q"].permute(3, 2, 1, 0, 4).contiguous().permute(3, 2, 1, 0, 4)
    assert torch.equal(forward(builder, inputs, PARTS[-1])["o"], got["o"])
    for name in "qkv":
        inputs[name] = inputs[name].mT.contiguous().mT
    assert torch.equal(forward(builder, inputs, PARTS[-1])["o"], got["o"])


def test_strides_that_no_vector_load_fits(builder):
    run(builder, dtype=BF16, B=2, S=2, Dk=19, Dv=7, strided=True)


def test_large_logits_in_fp16(builder):
    """Uses logits with standard deviation 24: without a row's true maximum, fp16 or exp overflows."""
    _, _, got = run(builder, dtype=F16, S=3, Dk=64, S_kv=200, kind="all", r=1, spread=24.0)
    assert all(got[k].isfinite().all() for k in ("o", "lse", "dq"))


@pytest.mark.parametrize(
    ("r", "bad"),
    some([(r, b) for r in (2, 70) for b in (float("nan"), float("inf"))], [(2, float("nan")), (70, float("inf"))]),
)
def test_what_is_not_selected_does_not_matter(builder, r, bad):
    inputs = h.make_inputs("odd", BF16, S=2, S_kv=25 * r, r=r, size=3, sink=True, device=str(builder.device))
    ups = h.upstream(inputs)
    want = forward(builder, inputs)
    want_dq = dq_of(builder, inputs, ups, want)
    chosen = torch.zeros(inputs["k"].shape[:3], dtype=torch.bool)
    for b in range(2):
        for s in range(2):
            for g in range(2):
                chosen[b, g, h.selection_of(inputs, b, s, g)] = True
    assert not chosen.all()
    for name in "kv":
        inputs[name][~chosen] = bad
    got = forward(builder, inputs)
    assert torch.equal(got["o"], want["o"]) and torch.equal(got["lse"], want["lse"])
    assert torch.equal(dq_of(builder, inputs, ups, got), want_dq)


def test_nan_that_one_query_selects_stays_with_it(builder):
    inputs = h.make_inputs("all", F32, B=1, S=3, G=1, S_kv=20, r=2, device=str(builder.device))
    inputs["ranges"][:] = torch.tensor([[0, 10], [3, 4]])
    inputs["ranges"][0, 1] = torch.tensor([[0, 5], [12, 16]])
    inputs["v"][0, 0, 13] = float("nan")
    inputs["k"][0, 0, 14] = float("nan")
    for NS in PARTS:
        got = forward(builder, inputs, NS)
        assert got["o"][0, 1].isnan().all() and got["lse"][0, 1].isnan().all()
        assert got["o"][0, [0, 2]].isfinite().all() and got["lse"][0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("value", some([-torch.inf, -1e30, 1e30], [-torch.inf, 1e30]))
def test_sinks_far_from_the_logits(builder, value):
    inputs = h.make_inputs("odd", F32, S=3, sink=True, device=str(builder.device))
    inputs["sink"].fill_(value)
    for NS in PARTS:
        got, want = forward(builder, inputs, NS), h.oracle(inputs)
        assert h.error(got["o"], want["o"]) < 1e-6 and h.error(got["lse"], want["lse"]) < 1e-6


@pytest.mark.parametrize(
    ("B", "S", "S_kv", "r"), [(0, 2, 9, 2), (2, 0, 9, 2), (2, 2, 0, 2), (2, 2, 9, 0), (1, 1, 0, 100)]
)
def test_empty_inputs(builder, B, S, S_kv, r):
    inputs = h.make_inputs("odd", BF16, B=B, S=S, S_kv=S_kv, r=r, sink=True, device=str(builder.device))
    for NS in (*PARTS, None):
        got = forward(builder, inputs, NS)
        assert got["o"].shape == (B, S, 2, 3, 8) and (got["o"] == 0).all() and (got["lse"] == -torch.inf).all()
        assert (dq_of(builder, inputs, h.upstream(inputs), got, NS) == 0).all()


def test_equal_bits_twice_and_splits_by_shape_alone(builder):
    inputs, ups, _ = run(builder, dtype=BF16, S=2, S_kv=60, parts=(None,))
    one, other = forward(builder, inputs), forward(builder, inputs)
    assert torch.equal(one["o"], other["o"]) and torch.equal(one["lse"], other["lse"])
    assert torch.equal(dq_of(builder, inputs, ups, one), dq_of(builder, inputs, ups, one))


def test_splits(builder):
    sms = builder.device_props().sm_count
    splits = [gather_plan.splits(builder, rows, 4) for rows in (0, 1, 2, sms, 2 * sms, 4 * sms, 4 * sms + 1, 10**9)]
    most = min(gather_plan.MAX_SPLITS, 4 * sms)
    assert splits == [most, most, min(most, 2 * sms), 4, 2, 1, 1, 1]
