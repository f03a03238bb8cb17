# SPDX-License-Identifier: Apache-2.0
"""The plain-PyTorch reference of selection attention and its CPU form, against an independent fp64 loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mhc_inductor  # noqa: F401  (registers the ops)
from mhc_inductor.kernels.cpu import selection as selection_cpu
from mhc_inductor.kernels.cpu import selection_core as selection_cpu_core
from mhc_inductor.reference import selection as reference
from tests.oracles.selection import (
    MISTAKES,
    OUTPUTS,
    WANTED,
    check,
    error,
    make_inputs,
    oracle,
    run,
    selection_of,
    upstream,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = 1e-12
pytestmark = pytest.mark.usefixtures("one_thread")


class Fused:
    """Runs the formula that Inductor gets, for any size."""

    selection_attention = staticmethod(selection_cpu.fused_attention)
    selection_attention_backward = staticmethod(selection_cpu.fused_attention_backward)


class Core:
    """Runs the C++ of the CPU form, which only large calls get, for any size."""

    @staticmethod
    def selection_attention(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selection_cpu_core, "LEAST", 0)
            assert selection_cpu_core.usable(*args[:2]), "no C++ compiler"
            return selection_cpu.selection_attention(*args)

    @staticmethod
    def selection_attention_backward(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selection_cpu_core, "LEAST", 0)
            return selection_cpu.selection_attention_backward(*args)


FORMS = {"reference": reference, "cpu": selection_cpu, "core": Core, "fused": Fused}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


# --- values and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_made_before(form, case, dtype):
    inputs = make_inputs(dtype=dtype, **MISTAKES[case])
    up = upstream(inputs)
    check(run(inputs, up, form=form), inputs, up, EXACT if dtype is F64 else None)


@pytest.mark.parametrize("names", [("o",), ("lse",), OUTPUTS], ids="-".join)
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("kind", ["corr", "rand", "odd", "token", "twice", "empty", "all", "none"])
def test_kinds_of_ranges(form, kind, sink, names):
    inputs = make_inputs(kind, S=19, S_kv=23, h=2, Dv=5, r=5, sink=sink, strided=True)
    up = upstream(inputs, names)
    check(run(inputs, up, form=form), inputs, up, EXACT)


@pytest.mark.parametrize("key_lengths", [None, (3, 4, 0, 9)], ids=["same", "other"])
@pytest.mark.parametrize("lengths", [(5, 0, 4, 3), (1, 1, 1, 1), (0, 0, 0, 12)], ids=str)
def test_packed_sequences(form, lengths, key_lengths):
    S = 14 if key_lengths else 16  # queries beyond the last boundary select nothing
    inputs = make_inputs(
        "odd", B=1, S=S, S_kv=16, lengths=lengths, key_lengths=key_lengths, r=3, sink=True, range_dtype=torch.int64
    )
    up = upstream(inputs)
    got = run(inputs, up, form=form)
    check(got, inputs, up, EXACT)
    assert not got["o"][:, sum(lengths) :].any() and (got["lse"][:, sum(lengths) :] == -math.inf).all()


@pytest.mark.parametrize("values", [[9, -4, 7, 99], [0, 2**40, -(2**40), 5], [3], [5, 5, 5]], ids=str)
def test_senseless_boundaries_read_nothing_outside(form, values):
    inputs = make_inputs("all", B=1, S=12, S_kv=12)
    inputs["cu_seqlens_q"] = torch.tensor(values)
    got = run(inputs, upstream(inputs), form=form)
    assert all(t[t != -math.inf].isfinite().all() for t in got.values())


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.5])
def test_any_scale(form, scale):
    inputs = make_inputs(sink=True)
    up = upstream(inputs)
    check(run(inputs, up, scale, form=form), inputs, up, EXACT, scale)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_scores_with_a_standard_deviation_of_24(form, dtype):
    inputs = make_inputs("odd", dtype, S=12, S_kv=70, size=30, Dk=64, spread=24.0)
    up = upstream(inputs)
    got = run(inputs, up, form=form)
    assert all(t[t != -math.inf].isfinite().all() for t in got.values())
    check(got, inputs, up)


def test_a_sink_far_above_and_below_the_scores(form):
    for value in (300.0, -300.0, -math.inf):
        inputs = make_inputs("empty", F32, sink=True)
        inputs["sink"] = torch.full_like(inputs["sink"], value)
        up = upstream(inputs)
        got = run(inputs, up, form=form)
        assert all(got[k].isfinite().all() for k in got if k != "lse")
        if math.isfinite(value):
            check(got, inputs, up)
        else:
            plain = run({**inputs, "sink": None}, up, form=form)
            assert all(error(got[k], plain[k]) < 1e-6 for k in plain)


def test_a_row_without_keys_is_zero_and_so_are_its_gradients(form):
    inputs = make_inputs("empty", F32, S=20, sink=True)
    up = upstream(inputs)
    got = run(inputs, up, form=form)
    gone = got["lse"] == -math.inf
    assert 0 < int(gone.sum()) < gone.numel()
    assert not got["o"][gone].any() and not got["dq"][gone].any()
    # Gradients that arrive at empty rows reach no input.
    up["o"][gone], up["lse"][gone] = math.nan, math.nan
    again = run(inputs, up, form=form)
    assert all(torch.equal(got[k].nan_to_num(), again[k].nan_to_num()) for k in got)
    assert all(again[k].isfinite().all() for k in ("dq", "dk", "dv", "dsink"))


@pytest.mark.parametrize(
    "sizes", [{"S": 0}, {"B": 0}, {"S_kv": 0}, {"r": 0}, {"G": 0}, {"S": 0, "S_kv": 0, "r": 0}], ids=str
)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_sizes_of_zero(name, sizes):
    inputs = make_inputs("none", F32, sink=True, **{"S_kv": 4, **sizes})
    got = run(inputs, upstream(inputs), form=FORMS[name])
    assert not any(got[k].any() for k in ("o", "dq", "dk", "dv", "dsink"))
    assert (got["lse"] == -math.inf).all()
    assert all(got[f"d{k}"].shape == inputs[k].shape for k in WANTED)


@pytest.mark.parametrize("case", ["odd", "twice", "wide"])
def test_the_union_by_the_definition(case):
    inputs = make_inputs(case, S=15, S_kv=40, r=6, range_dtype=torch.int64)
    bounds = reference.key_bounds(inputs["q"], inputs["k"], None, None)
    mask = reference.selected(*reference.clipped(inputs["ranges"], bounds), 40)
    for b in range(2):
        for g in range(2):
            for s in range(15):
                assert mask[b, g, s].nonzero().flatten().tolist() == selection_of(inputs, b, s, g)


# --- NaN and inf affect only the queries that select them ---------------------------------------------------


def even_keys(S=6, S_kv=10, **options):
    """Returns inputs where even queries select even keys, and odd queries odd keys."""
    inputs = make_inputs("odd", F32, S=S, S_kv=S_kv, G=1, r=S_kv // 2, **options)
    start = torch.arange(0, S_kv, 2)[None, :] + torch.arange(S)[:, None] % 2
    inputs["ranges"] = torch.stack((start, start + 1), -1)[None, :, None].expand(2, -1, -1, -1, -1).contiguous()
    return inputs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "k and v"])
def test_what_no_query_selects_does_not_leak(form, where, value):
    inputs = make_inputs("odd", F32, S=9, S_kv=20, sink=True)
    inputs["ranges"] = inputs["ranges"].clamp(3, 15)
    up = upstream(inputs)
    want = run(inputs, up, form=form)
    for name in where.split(" and "):
        inputs[name] = inputs[name].clone()
        inputs[name][:, :, :3] = value
        inputs[name][:, :, 15:] = value
    got = run(inputs, up, form=form)
    assert all(torch.equal(got[k], want[k]) or error(got[k], want[k]) < 1e-6 for k in got)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_neighbours_select_does_not_leak(form, where, value):
    inputs = even_keys()
    up = upstream(inputs)
    want = run(inputs, up, form=form)
    inputs[where][:, :, 4] = value  # an even key
    got = run(inputs, up, form=form)
    for key in ("o", "lse", "dq"):
        assert error(got[key][:, 1::2], want[key][:, 1::2]) < 1e-6
    for key in ("dk", "dv"):
        assert error(got[key][:, :, 1::2], want[key][:, :, 1::2]) < 1e-6
    if where == "v":
        assert (got["o"][:, ::2] == value).all() or (math.isnan(value) and got["o"][:, ::2].isnan().all())
    elif not math.isinf(value):
        assert got["o"][:, ::2].isnan().all() and got["dq"][:, ::2].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "do", "dlse"])
def test_a_query_poisons_the_gradients_of_its_own_keys_only(form, where, value):
    inputs = even_keys()
    up = upstream(inputs)
    want = run(inputs, up, form=form)
    bad = inputs["q"] if where == "q" else up["o" if where == "do" else "lse"]
    bad[:, 2] = value
    got = run(inputs, up, form=form)
    for key in ("dk", "dv"):
        assert error(got[key][:, :, 1::2], want[key][:, :, 1::2]) < 1e-6
    others = [0, 1, 3, 4, 5]
    for key in ("o", "lse", "dq"):
        assert error(got[key][:, others], want[key][:, others]) < 1e-6
    assert not (got["dv"] if where == "do" else got["dk"])[:, :, ::2].isfinite().any()


# --- memory -------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not t._is_view()]
        self.numel = max(self.numel, *made, 0)
        return out


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("width", [8, 600])
def test_memory_is_bounded(name, width, monkeypatch):
    """Checks that tensors hold at most a chunk of scores, and that chunks do not change the values."""
    form = FORMS[name]
    inputs = make_inputs("rand", F32, S=90, S_kv=300, Dk=width, r=5, sink=True)
    up = upstream(inputs)
    want = run(inputs, up, form=form)
    monkeypatch.setattr(reference, "CHUNK", 4000)  # out of 2 * 2 * 3 * 90 * 300 = 324000 scores
    with Largest() as largest:
        got = run(inputs, up, form=form)
    held = max(t.numel() for t in (*inputs.values(), *got.values()) if t is not None)
    assert largest.numel <= max(held, 2 * 4000)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


def test_one_query_may_be_more_than_a_chunk(monkeypatch):
    inputs = make_inputs("odd", F32, S=5, S_kv=50, h=4)
    want = run(inputs, upstream(inputs), form=reference)
    monkeypatch.setattr(reference, "CHUNK", 60)
    for form in (reference, selection_cpu):
        got = run(inputs, upstream(inputs), form=form)
        assert all(error(got[k], want[k]) < 1e-5 for k in want)


def test_chunks_cover_everything_once(monkeypatch):
    inputs = make_inputs(B=3, S=7, G=4, h=2, S_kv=9)
    q, k = inputs["q"], inputs["k"]
    for size in (1, 40, 130, 10**3, 10**4):
        monkeypatch.setattr(reference, "CHUNK", size)
        count = torch.zeros(3, 7, 4)
        for in_b, in_g, queries in reference.chunks(q, k):
            for in_s in queries:
                count[in_b, in_s, in_g] += 1
                assert count[in_b, in_s, in_g].numel() * 2 * 9 <= max(size, 18)
        assert (count == 1).all()


def test_the_oracle_detects_another_formula():
    """Checks that the comparison can fail: another formula, without the sink, must differ."""
    inputs = make_inputs("twice", F32, sink=True)
    got = run({**inputs, "sink": None}, form=reference)
    with pytest.raises(AssertionError, match="relative error"):
        check(got, inputs)
    assert oracle(inputs)["o"].dtype is F64
