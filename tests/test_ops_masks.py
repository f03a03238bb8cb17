# SPDX-License-Identifier: Apache-2.0
"""Selection attention under a mask: opcheck, gradients, fills, validation, vmap, autocast, compilation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.ops import registry
from mhc_inductor.reference import selection
from mhc_inductor.reference import selection_masks as reference
from tests.oracles import lists as h
from tests.oracles.masks import KINDS, make_inputs
from tests.oracles.op_contract import check_outputs, check_vmap, op, strided
from tests.oracles.selection import error
from tests.tools.deterministic import deterministic_algorithms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MIN = torch.finfo(F32).min
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.4


def attention_sample(**kwargs):
    return h.arguments(make_inputs(**{"dtype": F32, "h": 2, "Dk": 4, **kwargs}), SCALE)


def backward_sample(drop=(), **kwargs):
    args = attention_sample(**kwargs)
    o, lse = OPS.selection_mask_attention(*args)
    ups = [None if k in drop else torch.randn_like(o if k == 0 else lse) for k in range(2)]
    return (*ups, *args[:-2], o, lse, *args[-2:])


VARIANTS = {
    "plain": {},
    "sink": {"sink": True, "kind": "random", "shared_mask": "G"},
    "shared": {"shared": True, "Dv": 3, "strided": True, "shared_mask": "B"},
    "fp64": {"dtype": F64, "sink": True, "kind": "biased", "shared_mask": "BG"},
    "bf16": {"dtype": BF16, "sink": True, "kind": "fills", "shared": True, "mask_dtype": BF16},
    "biased": {"kind": "biased", "S_kv": 9},
    "fills": {"kind": "fills", "S_kv": 9, "sink": True, "shared_mask": "BG"},
    "view": {"kind": "causal", "shared_mask": "BGS"},
    "one_head": {"h": 1, "kind": "fills", "Dv": 3},
    "one_query": {"S": 1, "S_kv": 9},
    "no_keys_shown": {"S_kv": 0},
}
SAMPLES = [
    *[pytest.param("selection_mask_attention", attention_sample, v, id=f"forward-{k}") for k, v in VARIANTS.items()],
    *[
        pytest.param("selection_mask_attention_backward", backward_sample, v, id=f"backward-{k}")
        for k, v in {**VARIANTS, "no_do": {"drop": (0,)}, "no_dlse": {"drop": (1,), "shared": True}}.items()
    ],
]


def trainable(args):
    """Returns the forward's arguments, all but the mask requiring a gradient."""
    return tuple(
        a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and k != 3 else a
        for k, a in enumerate(args)
    )


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    # The backward op raises when differentiated, by design.
    opcheck(op(name), args if name.endswith("_backward") else trainable(args))


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    check_outputs(name, sample(**variant), error)


def test_every_op_is_sampled():
    assert {p.values[0] for p in SAMPLES} == {name for name in registry.REFERENCE if name.startswith("selection_mask")}


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["empty", "biased"])
def test_gradcheck_of_the_reference(kind, shared):
    made = make_inputs(kind, B=1, S=2, h=2, Dk=3, S_kv=4, sink=True, shared=shared)
    args = trainable(h.arguments(made, SCALE))
    assert torch.autograd.gradcheck(lambda *a: reference.selection_mask_attention(*a)[0], args)


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


def test_double_backward_is_refused_never_zero():
    made = make_inputs(sink=True)
    made["q"].requires_grad_()
    o = OPS.selection_mask_attention(*h.arguments(made, SCALE))[0]
    (first,) = torch.autograd.grad(o.square().sum(), made["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        first.square().sum().backward()


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


BATCHED = {
    "all": lambda k: True,
    "inputs": lambda k: k < 4,
    "odd": lambda k: k % 2 == 1,
    "q": lambda k: k in (0, 2),
    "mask": lambda k: k in (3, 5),
}


@pytest.mark.parametrize("which", BATCHED)
@pytest.mark.parametrize(("name", "sample", "variant"), [p for p in SAMPLES if p.id.rpartition("-")[2] in
                         ("plain", "fp64", "shared", "view", "no_dlse")])  # fmt: skip
def test_vmap_equals_a_loop(name, sample, variant, which):
    check_vmap(name, [list(sample(**{**variant, "seed": k})) for k in range(3)], BATCHED[which], error)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast_inserts_no_casts(dtype):
    made = make_inputs("biased", dtype, sink=True, shared=True)
    ups = h.upstream(made)
    plain = run(made, ups)
    with torch.autocast("cpu", BF16):
        cast = run(made, ups)
    assert all(plain[k].dtype is cast[k].dtype and torch.equal(plain[k], cast[k]) for k in plain)


def test_equal_inputs_give_equal_bits_and_are_not_written():
    made = make_inputs("fills", BF16, S=40, h=8, sink=True)
    kept = {k: t.clone() for k, t in made.items() if isinstance(t, torch.Tensor)}
    ups = h.upstream(made)
    with deterministic_algorithms():
        one, two = run(made, ups), run(made, ups)
    assert all(torch.equal(one[k], two[k]) for k in one) and all(torch.equal(made[k], kept[k]) for k in kept)


def test_arguments_may_be_strided():
    made = make_inputs("biased", F32, sink=True)
    ups = h.upstream(made)
    want = run(made, ups)
    got = run({k: strided(t) for k, t in made.items()}, ups)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


# --- validation ---------------------------------------------------------------------------------------------

SHAPE = r"mask must have shape \[B or 1, S, G or 1, S_kv\], with \[B, S, G, S_kv\] = \[2, 5, 2, 5\], got "
BAD = {
    "mask of integers": ({"mask": torch.ones(2, 5, 2, 5, dtype=torch.int32)}, TypeError, "mask must be bool or floating, got torch.int32"),
    "mask of fp64": ({"mask": torch.ones(2, 5, 2, 5, dtype=F64)}, TypeError, "mask may be float64 only where q is"),
    "rank": ({"mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, SHAPE + r"\[5, 5\]"),
    "queries": ({"mask": torch.ones(2, 1, 2, 5, dtype=torch.bool)}, ValueError, SHAPE + r"\[2, 1, 2, 5\]"),
    "keys": ({"mask": torch.ones(2, 5, 2, 1, dtype=torch.bool)}, ValueError, SHAPE),
    "groups": ({"mask": torch.ones(2, 5, 3, 5, dtype=torch.bool)}, ValueError, SHAPE),
    "k dtype": ({"k": torch.zeros(2, 2, 5, 8, dtype=F16)}, TypeError, "k must have q's dtype"),
    "v rows": ({"v": torch.zeros(2, 2, 6, 8)}, ValueError, "v must have shape"),
    "v_width": ({"v": None, "v_width": 9}, ValueError, "v_width must be at most Dk = 8, got 9"),
    "sink": ({"sink": torch.zeros(3, 2)}, ValueError, "sink must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, fake):
    change, kind, message = BAD[case]
    made = {**make_inputs("random", F32), **change}
    args = [t.to("meta") if fake and isinstance(t, torch.Tensor) else t for t in h.arguments(made, SCALE)]
    with pytest.raises(kind, match="selection_attention: .*" + message):
        OPS.selection_mask_attention(*args)


# --- compilation --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["plain", "shared", "bf16", "fills"])
def test_compiled_equals_eager(case, fresh):
    made = make_inputs(**{"dtype": F32, **VARIANTS[case]})
    ups = h.upstream(made)
    attention = torch.compile(lambda *a: OPS.selection_mask_attention(*a), backend="mhc_inductor", fullgraph=True)
    h.check(run(made, ups, attention), made, ups, SCALE)


def test_dynamic_sizes_compile_once(fresh):
    attention = torch.compile(lambda *a: OPS.selection_mask_attention(*a), fullgraph=True, dynamic=True)
    for n, (S, S_kv) in enumerate(((6, 20), (9, 31), (17, 40))):
        made = make_inputs("biased", F32, S=S, S_kv=S_kv, shared_mask="B")
        ups = h.upstream(made)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            h.check(run(made, ups, attention), made, ups, SCALE)


# --- the public function ------------------------------------------------------------------------------------


def public(q, k, v, mask, sink, scale, v_width):
    given = {"v": k, "v_width": v_width} if v is None else {"v": v}
    return mhc_inductor.selection_attention(q, k, **given, mask=mask, sink=sink, scale=scale, return_lse=True)


@pytest.mark.parametrize("case", ["sink", "shared", "fp64", "no_keys_shown", "view"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_public_function(case, compiled, fresh):
    made = make_inputs(**{"dtype": F32, **VARIANTS[case]})
    ups = h.upstream(made)
    h.check(run(made, ups, torch.compile(public, fullgraph=True) if compiled else public), made, ups, SCALE)


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
