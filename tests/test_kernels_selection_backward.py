# SPDX-License-Identifier: Apache-2.0
"""Gradients of selection attention through the backward's launch plan, with poisoned buffers, against the fp64 loop.

The kernels run compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from conftest import GPU, some

import mhc_inductor  # noqa: F401
from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.kernels.selection import backward_plan
from mhc_inductor.reference import selection as reference
from tests.oracles import selection as h
from tests.oracles.poisoned import Poisoned

if not GPU:
    from tests.tools.interpreter_fixes import fix_dot, fix_sort

    fix_dot()
    fix_sort()

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Four programs: their runs end inside key tiles, and hold several of them.
SMALL = DeviceProps(2, "cuda", 90)


@pytest.fixture(autouse=True)
def builder(monkeypatch, device):
    """Makes the helpers call the backward's launch plan after the reference's forward."""
    made = Poisoned(torch.device(device), SMALL, integers=1)  # a query that no list holds alone
    ops = types.SimpleNamespace(
        selection_attention=reference.selection_attention,
        selection_attention_backward=lambda *args: backward_plan.plan_selection_attention_backward(made, *args),
    )
    monkeypatch.setattr(h, "OPS", ops)
    # Makes small shapes test the kernels for many queries; the fixture ``few`` tests those for few.
    monkeypatch.setattr(backward_plan, "FEW_QUERIES", 0)
    return made


@pytest.fixture
def few(monkeypatch):
    """Makes up to 128 queries run ``few.py``, and yields its calls."""
    calls = []

    def counted(*args, plan=backward_plan.plan_dkv_few):
        calls.append(args)
        return plan(*args)

    monkeypatch.setattr(backward_plan, "FEW_QUERIES", 128)
    monkeypatch.setattr(backward_plan, "plan_dkv_few", counted)
    yield calls
    assert calls


def run(device, kind="odd", dtype=F32, *, up=h.OUTPUTS, scale=None, tolerance=None, **made):
    inputs = h.make_inputs(kind, dtype, device=device, **made)
    ups = h.upstream(inputs, up)
    got = h.run(inputs, ups, scale)
    h.check(got, inputs, ups, scale=scale, tolerance=tolerance)
    return inputs, ups, got


@pytest.mark.parametrize("heads", some([1, 4, 6, 16, 64, 128], [1, 6, 64, 128]))
def test_heads(device, heads):
    """Tests several queries in a row of heads, padded heads, and more heads than an iteration has rows."""
    run(device, B=1, S=some(40, 12), S_kv=some(100, 70), h=heads, Dk=16, G=2 if heads < 16 else 1, sink=True)


@pytest.mark.parametrize(
    ("Dk", "Dv", "dtype"),
    some(
        [(*d, t) for d in ((16, 16), (80, 80), (128, 128), (24, 40), (192, 128), (64, 300)) for t in (BF16, F32)],
        [(80, 80, F32), (24, 40, BF16), (192, 128, BF16), (64, 300, F32)],
    ),
)
def test_widths(device, Dk, Dv, dtype):
    run(device, dtype=dtype, B=1, S=some(18, 9), G=1, S_kv=70, h=4, Dk=Dk, Dv=Dv, r=3)


def test_widest_heads(device):
    run(device, dtype=BF16, B=1, S=6, G=1, S_kv=40, h=2, Dk=512, r=2)


@pytest.mark.parametrize(("dtype", "few_queries"), [(BF16, 0), (F32, 0), (BF16, 16)])
def test_widest_heads_of_latent_attention(device, monkeypatch, dtype, few_queries):
    monkeypatch.setattr(backward_plan, "FEW_QUERIES", few_queries)
    run(device, dtype=dtype, B=1, S=4, G=1, S_kv=40, h=20, Dk=576, Dv=512, r=2, sink=True)


@pytest.mark.parametrize(
    ("up", "sink", "dtype"),
    some(
        [*itertools.product([("o",), ("lse",), h.OUTPUTS], [False, True], [F32, BF16, F16])],
        [
            (("o",), True, F32),
            (("o",), False, BF16),
            (("lse",), False, F32),
            (("lse",), True, BF16),
            (h.OUTPUTS, False, F16),
            (h.OUTPUTS, True, F32),
        ],
    ),
)
def test_upstream(device, up, sink, dtype):
    run(device, dtype=dtype, B=1, S=some(20, 9), S_kv=some(70, 40), h=4, Dk=16, up=up, sink=sink)


@pytest.mark.parametrize("name", h.MISTAKES)
def test_mistakes_made_before(device, name):
    case = {"h": 3, "Dk": 16, **h.MISTAKES[name]}
    run(device, dtype=F32, **case)


@pytest.mark.parametrize("kind", some(["corr", "rand"], ["corr"]))
def test_blocks(device, kind):
    """Tests whole key tiles, and partial ones at the diagonal."""
    run(device, kind, BF16, B=1, S=some(150, 80), S_kv=some(170, 150), G=1, h=4, Dk=16, size=64, r=3)


@pytest.mark.parametrize("cap", some([16, 64], [16]))
def test_many_queries_on_few_keys(device, cap, monkeypatch):
    """Tests one unit shared by all programs, and rounds of few listed queries."""
    monkeypatch.setattr(backward_plan, "CAP", cap)
    S = some(140, 70)
    run(device, "all", B=1, S=S, S_kv=50, G=1, h=8, Dk=16, sink=True)
    run(device, "odd", B=1, S=S, S_kv=70, G=1, h=8, Dk=16)


def test_rounds_within_a_unit_of_both_kinds(device, monkeypatch):
    monkeypatch.setattr(backward_plan, "CAP", 16)
    run(device, "corr", BF16, B=1, S=some(150, 100), S_kv=some(150, 100), G=1, h=16, Dk=16, size=64, r=2)


def test_more_bitmap_words_than_are_read_at_once(device, monkeypatch):
    monkeypatch.setattr(backward_plan, "WORDS", 2)
    run(device, B=1, S=some(140, 70), S_kv=70, G=1, h=some(16, 4), Dk=16)


@pytest.mark.parametrize("multiprocessors", [1, 50])
def test_programs(device, multiprocessors, builder):
    """Tests many units per program, and many programs without work."""
    builder._props = DeviceProps(multiprocessors, "cuda", 90)
    run(device, B=some(2, 1), S=20, S_kv=140, h=4, Dk=16)


@pytest.mark.parametrize("dtype", some([BF16, F32], [BF16]))
def test_many_ranges(device, dtype):
    run(device, "token", dtype, B=1, S=some(20, 9), S_kv=140, G=1, h=4, Dk=16, r=100)


@pytest.mark.parametrize("ranges", some([33, 64], [33]))
def test_more_ranges_than_are_held_at_once(device, ranges):
    run(device, "token", B=1, S=20, S_kv=140, G=1, h=4, Dk=16, r=ranges)


def test_few_queries_by_the_kernels_of_many(device):
    run(device, S=2, S_kv=140, h=4, Dk=16, sink=True)


@pytest.mark.parametrize(
    ("heads", "dtype"), some([*itertools.product([1, 4, 16, 33, 64], [BF16, F16, F32])], [(4, BF16), (33, F32)])
)
def test_heads_of_few_queries(device, few, heads, dtype):
    run(device, dtype=dtype, S=3, S_kv=100, h=heads, Dk=16, sink=True)


@pytest.mark.parametrize("up", [("o",), ("lse",), h.OUTPUTS])
def test_upstream_of_few_queries(device, few, up):
    run(device, dtype=BF16, S=1, S_kv=70, h=4, Dk=16, up=up)


@pytest.mark.parametrize(
    ("Dk", "Dv", "dtype"),
    some(
        [(*d, t) for d in ((80, 80), (128, 128), (24, 40), (192, 128), (64, 300), (512, 512)) for t in (BF16, F32)],
        [(24, 40, BF16), (192, 128, F32)],
    ),
)
def test_widths_of_few_queries(device, few, Dk, Dv, dtype):
    run(device, dtype=dtype, B=1, S=2, G=1, S_kv=70, h=4, Dk=Dk, Dv=Dv, r=3)


@pytest.mark.parametrize(("S", "r"), some([*itertools.product([1, 2, 32, 33, 128], [100, 600])], [(1, 600), (34, 70)]))
def test_many_ranges_of_few_queries(device, few, S, r):
    """Tests every bit of a word, the sign included, several words, and more ranges than one step takes."""
    run(device, "token", BF16, B=1, S=S, S_kv=1500 if r > 512 else 140, G=1, h=4, Dk=16, r=r)


def test_strides_and_packed_sequences_of_few_queries(device, few):
    run(device, B=1, S=9, S_kv=9, h=4, Dk=16, lengths=(3, 0, 5, 1))
    run(device, S=4, S_kv=70, h=4, Dk=16, strided=True, scale=-0.7)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_segments_of_few_queries(device, few, index):
    run(device, B=2, S=5, S_kv=90, r=5, size=40, h=4, Dk=16, segments="mixed", segment_dtype=index, sink=True)


@pytest.mark.parametrize("S", [5, 40])
def test_nan_in_keys_of_other_segments_does_not_leak(device, monkeypatch, S):
    monkeypatch.setattr(backward_plan, "FEW_QUERIES", 16)
    inputs = h.make_inputs("odd", F32, B=1, S=S, S_kv=90, r=4, size=60, Dk=16, segments="mixed", device=device)
    inputs["segments_q"][inputs["segments_q"] == 2] = 1
    unseen = inputs["segments_k"] == 2
    ups, results = h.upstream(inputs), []
    for bad in (1.0, math.nan):
        for name in ("k", "v"):
            inputs[name] = torch.where(unseen[:, None, :, None], bad, inputs[name])
        results.append(h.run(inputs, ups))
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])
    assert not results[0]["dk"][:, :, unseen[0]].any() and results[0]["dk"].any()


@pytest.mark.parametrize("sizes", [{"S": 0}, {"B": 0}, {"r": 0}, {"S_kv": 0}, {"kind": "none"}])
def test_empty_inputs_of_few_queries(device, few, sizes):
    made = {"kind": "all", "dtype": F32, "S": 5, "S_kv": 70, "h": 4, "Dk": 16, "sink": True, **sizes}
    inputs = h.make_inputs(**made, device=device)
    got = h.run(inputs, h.upstream(inputs))
    for n in h.WANTED:
        assert torch.equal(got[f"d{n}"], torch.zeros_like(inputs[n])), n


def test_nan_in_one_of_few_queries_reaches_only_its_keys(device, few):
    """Puts NaN into one query and its gradient, where other queries select the same tiles."""
    inputs = h.make_inputs("odd", BF16, B=1, S=6, S_kv=70, G=1, h=4, Dk=16, device=device)
    ups = h.upstream(inputs)
    want = h.run(inputs, ups)
    ups["o"][0, 2] = math.nan
    inputs["q"][0, 2] = math.nan
    got = h.run(inputs, ups)
    keys = set(h.selection_of(inputs, 0, 2, 0))
    assert 0 < len(keys) < 70
    for x in range(70):
        for n in ("dk", "dv"):
            bad, good = got[n][0, 0, x], want[n][0, 0, x]
            assert bad.isnan().all() if x in keys else torch.equal(bad, good), (n, x)


@pytest.mark.parametrize(
    ("S", "r", "chosen"), [(1, 16, True), (16, 16, True), (17, 16, False), (256, 65, True), (257, 65, False)]
)
def test_the_kernel_follows_from_the_shape(monkeypatch, S, r, chosen):
    """Checks which shapes run the kernel for few queries.

    Not those whose neighbours share key tiles, nor more queries than it reads bitmap words for.
    """
    monkeypatch.undo()
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


def test_packed_sequences(device):
    run(device, B=1, S=45, S_kv=45, h=4, Dk=16, lengths=(20, 0, 19, 3))
    run(device, B=1, S=33, S_kv=80, h=4, Dk=16, lengths=(20, 13), key_lengths=(30, 50))


def test_strided_keys(device):
    inputs, ups, got = run(device, S=some(20, 9), S_kv=70, h=4, Dk=16, strided=True)
    assert all(got[f"d{n}"].is_contiguous() for n in "qkv")
    inputs |= {n: inputs[n].contiguous() for n in "kv"}
    again = h.run(inputs, ups)
    assert all(torch.equal(got[n], again[n]) for n in got)


def test_any_strides_of_queries_and_gradients(device):
    inputs, ups, got = run(device, S=some(20, 9), S_kv=70, h=4, Dk=16)
    inputs["q"] = inputs["q"].transpose(1, 3).contiguous().transpose(1, 3)
    ups = {n: t.mT.contiguous().mT for n, t in ups.items()}
    again = h.run(inputs, ups)
    assert all(torch.equal(got[n], again[n]) for n in got)


@pytest.mark.parametrize(
    ("value", "heads"),
    some([*itertools.product([math.nan, math.inf], [4, 16])], [(math.nan, 4), (math.nan, 16), (math.inf, 16)]),
)
def test_what_is_not_selected_does_not_leak(device, value, heads):
    """Puts NaN or infinity into keys and values that no query selects, in tiles that all queries read."""
    inputs = h.make_inputs("odd", BF16, B=1, S=20, S_kv=70, G=1, h=heads, Dk=16, device=device)
    ups = h.upstream(inputs)
    unseen = torch.ones(70, dtype=torch.bool)
    for s in range(20):
        unseen[h.selection_of(inputs, 0, s, 0)] = False
    unseen[::7] = True  # and some keys are taken from every query
    rows = inputs["ranges"].cpu()
    for at in unseen.nonzero()[:, 0].tolist():
        hit = (rows[..., 0] <= at) & (at < rows[..., 1])
        rows[..., 1] = torch.where(hit, torch.full_like(rows[..., 1], at), rows[..., 1])
    inputs["ranges"] = rows.to(device)
    want = h.run(inputs, ups)
    for n in "kv":
        inputs[n][:, :, unseen] = value
    got = h.run(inputs, ups)
    assert unseen.sum() >= 10
    for n in ("dq", "dk", "dv"):
        assert got[n].isfinite().all(), n
        assert torch.allclose(got[n].double(), want[n].double(), rtol=0.02, atol=0.02), n


def test_a_nan_reaches_only_those_that_select_it(device):
    inputs = h.make_inputs("odd", BF16, B=1, S=20, S_kv=70, G=1, h=4, Dk=16, device=device)
    ups = h.upstream(inputs, ("o",))
    inputs["k"][0, 0, 33] = math.nan
    got = h.run(inputs, ups)
    touched = [33 in h.selection_of(inputs, 0, s, 0) for s in range(20)]
    assert any(touched) and not all(touched)
    for s, nan in enumerate(touched):
        assert bool(got["dq"][0, s].isnan().any()) == nan, s


def test_equal_bits_twice(device):
    inputs, ups, got = run(
        device, dtype=BF16, B=1, S=some(100, 40), S_kv=some(150, 70), G=some(2, 1), h=4, Dk=16, sink=True
    )
    again = h.run(inputs, ups)
    assert all(torch.equal(got[n], again[n]) for n in got)


@pytest.mark.parametrize("sizes", [{"S": 0}, {"B": 0}, {"r": 0}, {"S_kv": 0}, {"kind": "none"}])
def test_empty_inputs(device, sizes):
    inputs = h.make_inputs(
        **{"kind": "all", "dtype": F32, "S": 20, "S_kv": 70, "h": 4, "Dk": 16, "sink": True, **sizes}, device=device
    )
    got = h.run(inputs, h.upstream(inputs))
    for n in h.WANTED:
        assert got[f"d{n}"].shape == inputs[n].shape
        assert torch.equal(got[f"d{n}"], torch.zeros_like(inputs[n])), n


@pytest.mark.parametrize("sink", some([-200.0, 200.0, -math.inf], [200.0, -math.inf]))
def test_sinks_far_from_the_scores(device, sink):
    inputs = h.make_inputs("odd", F32, B=1, S=some(20, 9), S_kv=70, h=4, Dk=16, sink=True, device=device)
    inputs["sink"].fill_(sink)
    ups = h.upstream(inputs, ("o",))
    h.check(h.run(inputs, ups), inputs, ups)


def test_scores_far_apart(device):
    run(device, dtype=F16, B=1, S=40, S_kv=100, h=4, Dk=16, spread=24.0)


@pytest.mark.parametrize("scale", some([0.3, -0.7, 0.0], [-0.7, 0.0]))
def test_scale(device, scale):
    run(device, B=some(2, 1), S=some(20, 9), S_kv=70, h=4, Dk=16, scale=scale)


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
