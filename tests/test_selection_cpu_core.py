# SPDX-License-Identifier: Apache-2.0
"""The C++ of selection attention on a CPU: widths and heads, lists of keys, segments, NaN and inf, threads, no compiler."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import mhc_inductor
from mhc_inductor import compat, log
from mhc_inductor.kernels.cpu import selection as selection_cpu
from mhc_inductor.kernels.cpu import selection_core as core
from mhc_inductor.reference import selection as reference
from tests.oracles.selection import OUTPUTS, check, error, make_inputs, run, upstream

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def always(monkeypatch):
    """Makes calls of every size run the C++."""
    monkeypatch.setattr(core, "LEAST", 0)
    q = torch.ones((1, 1, 1, 1, 1))
    assert core.usable(q, q[0]), "no C++ compiler"


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 70])
@pytest.mark.parametrize(("Dk", "Dv"), [(1, 1), (16, 16), (17, 5), (64, 80), (600, 130)])
def test_heads_and_widths(always, heads, Dk, Dv):
    inputs = make_inputs("odd", F64, B=1, S=3, S_kv=70, size=30, h=heads, Dk=Dk, Dv=Dv, sink=True, seed=heads)
    up = upstream(inputs)
    check(run(inputs, up, form=selection_cpu), inputs, up, 1e-12)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_many_keys(always, dtype):
    inputs = make_inputs("odd", dtype, B=1, S=8, S_kv=3000, size=900, h=4, Dk=32)
    up = upstream(inputs)
    check(run(inputs, up, form=selection_cpu), inputs, up)


@pytest.mark.parametrize("S", [1, 130, 700])
def test_any_number_of_parts(always, S):
    inputs = make_inputs("rand", F32, B=2, S=S, S_kv=700, h=2, Dk=20, Dv=33, strided=True)
    up = upstream(inputs)
    got, want = run(inputs, up, form=selection_cpu), run(inputs, up, form=reference)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


def test_ascending_entries_equal_shuffled_ones(always):
    inputs = make_inputs("token", F32, S=20, S_kv=200, r=40)
    start = torch.stack([torch.randperm(200)[:40] for _ in range(80)]).view(2, 20, 2, 40).int()
    pairs = [torch.stack((t, t + 1), -1) for t in (start, start.sort(-1).values)]
    up = upstream(inputs)
    one, two = (run({**inputs, "ranges": ranges}, up, form=selection_cpu) for ranges in pairs)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_ranges_may_be_expanded(always):
    inputs = make_inputs("odd", F32, S=7, G=2)
    inputs["ranges"] = inputs["ranges"][:1, :, :1].expand(2, -1, 2, -1, -1)
    whole = {**inputs, "ranges": inputs["ranges"].contiguous()}
    up = upstream(inputs)
    one, two = (run(given, up, form=selection_cpu) for given in (inputs, whole))
    assert all(torch.equal(one[k], two[k]) for k in one)


# --- lists of keys and segments -----------------------------------------------------------------------------


def core_run(inputs, up, selected):
    """Returns the outputs and gradients of the C++ for keys that no range describes, under the oracle's names."""
    q, k, v, scale = *(inputs[n] for n in "qkv"), inputs["q"].shape[-1] ** -0.5
    o, lse = core.attention(q, k, v, selected, inputs["sink"], scale)
    row, dsink = reference.backward_rows(up["o"], up["lse"], inputs["sink"], o, lse)
    dq, dk, dv = core.backward(row, True, q, k, v, selected, scale)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("packed", [False, True])
def test_lists_of_single_keys(always, dtype, packed):
    lengths = {"B": 1, "lengths": (5, 0, 4, 3)} if packed else {}
    inputs = make_inputs("odd", F64, S=12, S_kv=12, sink=True, **lengths)
    index = torch.randint(-3, 16, (inputs["q"].shape[0], 12, 2, 9), dtype=dtype)
    index[:, 4] = torch.iinfo(dtype).min
    index[:, 5] = torch.iinfo(dtype).max
    inputs["ranges"] = torch.stack((index, torch.where(index < 0, index, index.long() + 1).long()), -1).long()
    inputs["ranges"] = torch.where((index > 99)[..., None], 0, inputs["ranges"])
    up = upstream(inputs)
    bounds = reference.key_bounds(inputs["q"], inputs["k"], inputs["cu_seqlens_q"], inputs["cu_seqlens_k"])
    check(core_run(inputs, up, core.Selected(index, bounds)), inputs, up, 1e-12)


def test_segments_filter_the_keys(always):
    inputs = make_inputs("odd", F64, S=12, S_kv=40, r=3, sink=True)
    own, ids = torch.randint(0, 3, (2, 12)), torch.randint(0, 4, (2, 40))
    ids[:, ::5] = -(2**31)
    bounds = reference.key_bounds(inputs["q"], inputs["k"], None, None)
    mask = reference.selected(*reference.clipped(inputs["ranges"], bounds), 40)
    mask &= ((ids[:, None] == own[:, :, None]) | (ids[:, None] == -(2**31)))[:, None]
    assert bool((~mask).any()) and bool(mask.any())
    up = upstream(inputs)
    got = core_run(inputs, up, core.Selected(inputs["ranges"], bounds, (own.int(), ids.int())))
    key = torch.where(mask, torch.arange(40), -1).transpose(1, 2)
    inputs["ranges"] = torch.stack((key, key + (key >= 0)), -1)
    check(got, inputs, up, 1e-12)


# --- NaN and inf --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("heads", [1, 3, 4, 6])
def test_nan_and_inf_anywhere_as_in_the_reference(always, heads, seed):
    """Checks that the same results are NaN and inf; the sum of one row's NaN and inf decides what it poisons."""
    torch.manual_seed(seed)
    inputs = make_inputs("odd", F64, B=1, S=9, S_kv=30, h=heads, Dk=5, Dv=6, sink=True, seed=seed)
    up = upstream(inputs)
    for t in (inputs["q"], inputs["k"], inputs["v"], up["o"], up["lse"]):
        if torch.rand(()) < 0.6:
            flat = t.view(-1)
            where = torch.randint(0, len(flat), (2,))
            flat[where] = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(0, 3, (2,))].to(F64)
    got, want = run(inputs, up, form=selection_cpu), run(inputs, up, form=reference)
    assert {k: error(got[k], want[k]) < 1e-12 for k in want} == dict.fromkeys(want, True)


def test_inf_in_a_value_of_weight_zero_counts(always):
    inputs = make_inputs("all", F32, B=1, S=3, S_kv=8, r=1)
    inputs["k"][:, :, 2] = 1000 * inputs["q"].sign().mean((1, 3)).unsqueeze(0)
    inputs["v"][:, :, 5] = math.inf
    got, want = (run(inputs, form=form) for form in (selection_cpu, reference))
    assert (want["o"] == math.inf).all() and torch.equal(got["o"], want["o"])


# --- threads, size, compiler --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_number_of_threads_does_not_change_a_bit(always, dtype):
    inputs = make_inputs("corr", dtype, S=300, S_kv=300, h=5, Dk=24, sink=True)
    up = upstream(inputs)
    want = run(inputs, up, form=selection_cpu)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        got = run(inputs, up, form=selection_cpu)
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize(("S", "calls"), [(512, 0), (513, 2)])
def test_large_calls_run_the_c(monkeypatch, S, calls):
    count = []
    for name in ("attention", "backward"):
        call = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *args, call=call: count.append(1) or call(*args))
    inputs = make_inputs("rand", F32, B=1, S=S, S_kv=S, G=1, h=4, size=32)
    leaves = {k: inputs[k].requires_grad_() for k in "qkv"}
    o = mhc_inductor.selection_attention(**{**inputs, **leaves})
    o.sum().backward()
    assert len(count) == calls
    want = run(inputs, {"o": torch.ones_like(o)}, form=reference)
    assert error(o.detach(), want["o"]) < 1e-5
    assert all(error(leaves[k].grad, want[f"d{k}"]) < 1e-5 for k in "qkv")


def test_without_a_compiler_the_formula_runs(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no compiler\nwas found")

    monkeypatch.setattr(compat.kernels, "compiled_cpp", fail)
    monkeypatch.setattr(core, "LEAST", 0)
    monkeypatch.setattr(log, "_said", set())
    core._library.cache_clear()
    inputs = make_inputs("odd", F32)
    up = upstream(inputs, OUTPUTS)
    try:
        with caplog.at_level(logging.WARNING, "mhc_inductor"):
            check(run(inputs, up), inputs, up)
            check(run(inputs, up), inputs, up)
    finally:
        core._library.cache_clear()
    assert [r.getMessage().count("(RuntimeError: no compiler)") for r in caplog.records] == [1]


def test_memory_that_runs_out_is_an_error(always, monkeypatch):
    library = core._library_of(torch.ones((1, 1, 1, 1, 1)))

    class Full:
        lanes = library.lanes

        @staticmethod
        def selection(_):
            return 1

    monkeypatch.setattr(core, "_library_of", lambda q: Full)
    with pytest.raises(MemoryError, match="selection attention"):
        run(make_inputs("odd", F32), form=selection_cpu)
