# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask: opcheck, gradients, fills, validation, vmap, autocast, compilation."""

from __future__ import annotations

import functools

import pytest
import torch

import mhc_inductor
from mhc_inductor.reference import selection
from tests.oracles import lists as h
from tests.oracles.masks import KINDS, make_inputs
from tests.oracles.samples import VARIANTS as SAMPLED
from tests.oracles.selection import error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIN = torch.finfo(F32).min
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.4


VARIANTS = SAMPLED["selection_mask_attention"]


def run(made, ups, attention=OPS.selection_mask_attention, scale=SCALE):
    return h.run(attention, made, ups, scale)


@pytest.mark.parametrize("names", [("o",), ("lse",), h.OUTPUTS], ids="-".join)
@pytest.mark.parametrize("case", [v for v in VARIANTS if VARIANTS[v].get("dtype") is None])
def test_gradients_against_fp64(case, names):
    made = make_inputs(**{"dtype": F32, **VARIANTS[case]})
    ups = h.upstream(made, names)
    h.check(run(made, ups), made, ups, SCALE)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind, dtype):
    made = make_inputs(kind, dtype, S=9, S_kv=30, shared=kind in ("biased", "window"), sink=kind != "fills")
    ups = h.upstream(made)
    h.check(run(made, ups), made, ups, SCALE)


def written_out(q, k, v, mask, sink, scale):
    """Returns what a model computes that adds its mask in fp32."""
    t = torch.einsum("bsghd,bgtd->bsght", q, k) * scale + mask.unsqueeze(3)
    if sink is not None:
        t = torch.cat((t, sink[None, None, :, :, None].expand(*t.shape[:4], 1)), -1)
    return torch.einsum("bsght,bgtd->bsghd", t.softmax(-1)[..., : k.shape[2]], v)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fill", [MIN, torch.finfo(BF16).min, torch.finfo(F16).min, -1e9, -1e4, -30.0])
def test_finite_fills_are_as_eager_code_rounds_them(fill, sink):
    made = make_inputs("fills", F32, S=9, S_kv=14, sink=sink, Dv=5)
    made["mask"] = made["mask"].clamp(min=fill)
    assert (made["mask"] < 0).all(-1).any()
    # Scores of few bits: a rounding before the sum of score and fill would change the weights below -1e9.
    made["q"], made["k"] = made["q"].mul(4).round() / 4, made["k"].mul(4).round() / 4
    ups = h.upstream(made, ("o",))
    got = run(made, ups, scale=0.5)
    leaf = {n: made[n].detach().requires_grad_() for n in h.WANTED if made[n] is not None}
    o = written_out(leaf["q"], leaf["k"], leaf["v"], made["mask"], leaf.get("sink"), 0.5)
    want = dict(zip((f"d{n}" for n in leaf), torch.autograd.grad(o, leaf.values(), ups["o"]), strict=True))
    assert error(got["o"], o.detach()) < 2e-6
    assert all(error(got[n], want[n]) < 1e-5 for n in want)


@pytest.mark.parametrize("shape", [{"h": 129}, {"Dk": 577}])
def test_any_size(shape):
    made = make_inputs("random", F32, **{"S": 2, "G": 1, "B": 1, "S_kv": 20, **shape})
    ups = h.upstream(made)
    h.check(run(made, ups, scale=0.1), made, ups, 0.1)


@pytest.mark.parametrize("kind", ["random", "biased"])
def test_chunks_give_what_one_chunk_gives(kind, monkeypatch):
    made = make_inputs(kind, F32, S=7, S_kv=11, shared=True, Dv=5, sink=True)
    ups = h.upstream(made)
    want = run(made, ups)
    monkeypatch.setattr(selection, "CHUNK", 70)
    got = run(made, ups)
    assert all(error(got[n], want[n]) < 1e-6 for n in want)


def test_nan_in_hidden_keys_does_not_leak():
    made = make_inputs("random", F32, B=1, S=4, G=1, S_kv=20)
    made["mask"][..., :7] = False
    for name in "kv":
        made[name][0, 0, :7] = float("nan")
    got = run(made, h.upstream(made, ("o",)))
    assert all(t[..., 7:, :].isfinite().all() for n, t in got.items() if n in ("dk", "dv"))
    assert got["o"].isfinite().all() and got["dq"].isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_that_needs_a_gradient_is_refused_never_dropped(compiled, fresh):
    made = make_inputs("biased", F32)
    made["mask"].requires_grad_()
    attend = OPS.selection_mask_attention
    attend = torch.compile(lambda *a: OPS.selection_mask_attention(*a)) if compiled else attend
    with pytest.raises(Exception, match=r"mask must not require a gradient, got one that does; pass mask.detach\(\)"):
        attend(*h.arguments(made, SCALE))
    with torch.no_grad():
        attend(*h.arguments(made, SCALE))


# --- compilation --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- the public function ------------------------------------------------------------------------------------


def test_a_mask_with_indices_says_which_of_them_count():
    made = make_inputs("random", F64, S_kv=11, shared_mask="G")
    indices = h.make_indices("odd", (2, 5, 2, 9), 11, torch.int64, torch.Generator().manual_seed(3))
    listed = torch.zeros(2, 5, 2, 12, dtype=torch.bool)
    listed.scatter_(-1, torch.where((indices >= 0) & (indices < 11), indices, 11), True)
    both = {**made, "mask": made["mask"] & listed[..., :11]}
    attend = functools.partial(mhc_inductor.selection_attention, indices=indices, return_lse=True)
    h.check(dict(zip(h.OUTPUTS, attend(made["q"], made["k"], made["v"], mask=made["mask"]), strict=True)), both)
    none, _ = attend(made["q"], made["k"][:, :, :0], made["v"][:, :, :0], mask=made["mask"][..., :0])
    assert (none == 0).all()


ONES = torch.ones(2, 5, 2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"ranges": torch.zeros(2, 5, 2, 1, 2, dtype=torch.int32)}, ValueError, "mask must be given alone, .* got ranges too"),
        ({"segments_q": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, "mask must be given alone, .* got segments_q"),
        ({"indices": torch.zeros(2, 5, 2, 1, dtype=torch.int32), "cu_seqlens_q": torch.zeros(2)}, ValueError, "got cu_seqlens_q"),
        ({"indices": torch.zeros(2, 5, 2, 1, dtype=torch.int32), "mask": ONES.float()}, ValueError, "mask must be bool, got torch.float32"),
        ({"indices": torch.zeros(2, 5, 2, 1, dtype=torch.int32), "mask": ONES[:1, :3]}, ValueError, "mask must have shape"),
        ({"mask": [True]}, TypeError, "mask must be a tensor, got list"),
        ({"mask": ONES.int()}, TypeError, "mask must be bool or floating"),
    ],
)  # fmt: skip
def test_bad_arguments_of_the_public_function_are_named(given, kind, message):
    made = make_inputs("random", F32)
    with pytest.raises(kind, match="selection_attention: .*" + message):
        mhc_inductor.selection_attention(made["q"], made["k"], made["v"], **{"mask": ONES, **given})
