# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys, with and without a bias per entry: opcheck, gradients, validation, vmap, ..."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.ops import registry
from tests.oracles import lists as h
from tests.oracles.op_contract import check_outputs, check_vmap, op, strided, trainable
from tests.oracles.selection import error
from tests.tools.deterministic import deterministic_algorithms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.4
PACKED = {"B": 1, "S": 9, "S_kv": 9, "lengths": (4, 0, 3)}


def attention_sample(**kwargs):
    return h.arguments(h.make_inputs(**{"kind": "empty", "dtype": F32, "h": 2, "Dk": 4, **kwargs}), SCALE)


def backward_sample(drop=(), **kwargs):
    args = attention_sample(**kwargs)
    o, lse = op(named(kwargs))(*args)
    ups = [None if k in drop else torch.randn_like(o if k == 0 else lse) for k in range(2)]
    return h.backward_arguments(ups, args, o, lse)


def named(variant):
    return "selection_entry_attention" if variant.get("bias") else "selection_list_attention"


VARIANTS = {
    "plain": {},
    "sink": {"sink": True, "kind": "odd"},
    "shared": {"shared": True, "Dv": 3, "strided": True},
    "fp64": {"dtype": F64, "sink": True, "segments": True},
    "bf16_int64": {"dtype": BF16, "sink": True, "index_dtype": torch.int64, "segments": True, "shared": True},
    "packed": PACKED,
    "packed_keys": {**PACKED, "S_kv": 11, "key_lengths": (6, 1, 4), "sink": True, "segments": True},
    "Dk_not_Dv": {"Dv": 3},
    "one_query": {"S": 1, "S_kv": 9},
    "no_keys_listed": {"n": 0},
    "no_keys": {"S_kv": 0},
    "bias": {"bias": "rows", "sink": True, "kind": "odd"},
    "bias_repeats": {"bias": "rows", "repeats": True, "kind": "odd", "shared": True, "Dv": 3, "strided": True},
    "bias_fp64": {"bias": "rows", "dtype": F64, "sink": True, "kind": "odd", "repeats": True},
    "bias_bf16": {"bias": "rows", "dtype": BF16, "bias_dtype": BF16, "index_dtype": torch.int64, "kind": "odd"},
    "bias_no_keys": {"bias": "normal", "S_kv": 0},
    "bias_no_keys_listed": {"bias": "normal", "n": 0},
}
SAMPLES = [
    *[pytest.param(named(v), attention_sample, v, id=f"forward-{k}") for k, v in VARIANTS.items()],
    *[
        pytest.param(f"{named(v)}_backward", backward_sample, v, id=f"backward-{k}")
        for k, v in {
            **VARIANTS,
            "no_do": {"drop": (0,)},
            "no_dlse": {"drop": (1,), "shared": True},
            "bias_no_do": {"drop": (0,), "bias": "rows"},
        }.items()
    ],
]


def leaves(name, args):
    """Returns the arguments as leaves, but for a bias, which has no gradient."""
    return tuple(args[i] if registry._NAMES[name][i] == "bias" else a for i, a in enumerate(trainable(args)))


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    # The backward op raises when differentiated, by design.
    opcheck(op(name), args if name.endswith("_backward") else leaves(name, args))


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    check_outputs(name, sample(**variant), error)


def test_every_op_is_sampled():
    assert {p.values[0] for p in SAMPLES} == {
        name for name in registry.REFERENCE if name.startswith(("selection_list", "selection_entry"))
    }


def run(made, ups, attention=None, scale=SCALE):
    return h.run(attention or op(h.name_of(made)), made, ups, scale)


@pytest.mark.parametrize("names", [("o",), ("lse",), h.OUTPUTS], ids="-".join)
@pytest.mark.parametrize("case", [v for v in VARIANTS if VARIANTS[v].get("dtype") is None])
def test_gradients_against_fp64(case, names):
    made = h.make_inputs(**{"dtype": F32, "kind": "odd", **VARIANTS[case]})
    ups = h.upstream(made, names)
    h.check(run(made, ups), made, ups, SCALE)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shared", [False, True])
def test_low_precision(dtype, shared):
    made = h.make_inputs("random", dtype, S=9, S_kv=30, n=20, shared=shared, sink=True)
    ups = h.upstream(made)
    h.check(run(made, ups), made, ups, SCALE)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("more", [{"segments": True}, {"bias": "normal"}, {"bias": "normal", "repeats": True}], ids=str)
def test_gradcheck_of_the_reference(shared, more):
    made = h.make_inputs("odd", B=1, S=2, h=2, Dk=3, S_kv=4, n=3, sink=True, shared=shared, **more)
    name = h.name_of(made)
    attention = registry.REFERENCE[name]
    args = leaves(name, h.arguments(made, SCALE))
    assert torch.autograd.gradcheck(lambda *a: attention(*a)[0], args)


@pytest.mark.parametrize("shape", [{"h": 129}, {"Dk": 577}, {"n": 4097, "S_kv": 50}])
def test_any_size(shape):
    made = h.make_inputs("odd", F32, **{"S": 2, "G": 1, "B": 1, "S_kv": 20, **shape})
    ups = h.upstream(made)
    h.check(run(made, ups, scale=0.1), made, ups, 0.1)


def test_duplicates_and_order_do_not_matter():
    made = h.make_inputs("sorted", F64, S_kv=12, n=8)
    want = OPS.selection_list_attention(*h.arguments(made, SCALE))
    mixed = torch.cat((made["indices"].flip(-1), made["indices"][..., 2:5]), -1)
    got = OPS.selection_list_attention(*h.arguments({**made, "indices": mixed}, SCALE))
    assert all(error(g, w) < 1e-12 for g, w in zip(got, want, strict=True))


def test_nan_in_unselected_keys_and_other_segments_does_not_leak():
    made = h.make_inputs("random", F32, B=1, S=4, G=1, S_kv=20, n=5)
    made["segments_q"], made["segments_k"] = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 20, dtype=torch.int64)
    made["segments_k"][0, :7] = 2**40
    for name in "kv":
        made[name][0, 0, :7] = float("nan")
    ups = h.upstream(made, ("o",))
    assert all(
        t[..., 7:, :].isfinite().all() if n in ("dk", "dv") else t.isfinite().all()
        for n, t in run(made, ups).items()
        if n != "lse"
    )


@pytest.mark.parametrize("bias", [None, "rows"])
def test_double_backward_is_refused_never_zero(bias):
    made = h.make_inputs("odd", sink=True, bias=bias)
    made["q"].requires_grad_()
    o = op(h.name_of(made))(*h.arguments(made, SCALE))[0]
    (first,) = torch.autograd.grad(o.square().sum(), made["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        first.square().sum().backward()


BATCHED = {"all": lambda k: True, "inputs": lambda k: k < 4, "odd": lambda k: k % 2 == 1, "q": lambda k: k in (0, 2)}


@pytest.mark.parametrize("which", BATCHED)
@pytest.mark.parametrize(
    ("name", "sample", "variant"), [p for p in SAMPLES if "fp64" in p.id or "shared" in p.id or "packed" in p.id]
)
def test_vmap_equals_a_loop(name, sample, variant, which):
    check_vmap(name, [list(sample(**{**variant, "seed": k})) for k in range(3)], BATCHED[which], error)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bias", [None, "rows"])
def test_autocast_inserts_no_casts(dtype, bias):
    made = h.make_inputs("odd", dtype, sink=True, shared=True, bias=bias)
    ups = h.upstream(made)
    plain = run(made, ups)
    with torch.autocast("cpu", BF16):
        cast = run(made, ups)
    assert all(plain[k].dtype is cast[k].dtype and torch.equal(plain[k], cast[k]) for k in plain)


@pytest.mark.parametrize("bias", [None, "rows"])
def test_equal_inputs_give_equal_bits_and_are_not_written(bias):
    made = h.make_inputs("odd", BF16, S=40, h=8, n=20, sink=True, bias=bias, repeats=True)
    kept = {k: t.clone() for k, t in made.items() if isinstance(t, torch.Tensor)}
    ups = h.upstream(made)
    with deterministic_algorithms():
        one, two = run(made, ups), run(made, ups)
    assert all(torch.equal(one[k], two[k]) for k in one) and all(torch.equal(made[k], kept[k]) for k in kept)


@pytest.mark.parametrize("more", [{"segments": True}, {"bias": "rows"}], ids=str)
def test_arguments_may_be_strided(more):
    made = h.make_inputs("odd", F32, sink=True, **more)
    ups = h.upstream(made)
    want = run(made, ups)
    got = run({k: strided(t) for k, t in made.items()}, ups)
    assert all(error(got[k], want[k]) < 1e-5 for k in want)


# --- validation ---------------------------------------------------------------------------------------------

BAD = {
    "indices of floats": ({"indices": torch.zeros(2, 5, 2, 9)}, TypeError, "indices must be int32 or int64, got torch.float32"),
    "indices of bools": ({"indices": torch.zeros(2, 5, 2, 9, dtype=torch.bool)}, TypeError, "indices must be int32 or int64"),
    "rank": ({"indices": torch.zeros(2, 5, 9, dtype=torch.int32)}, ValueError, r"indices must have shape \[B, S, G, k\], got \[2, 5, 9\]"),
    "groups": ({"indices": torch.zeros(2, 5, 3, 9, dtype=torch.int32)}, ValueError, "indices must have shape"),
    "q": ({"q": torch.zeros(2, 5, 3, 8)}, ValueError, r"q must have shape \[B, S, G, h, Dk\]"),
    "k dtype": ({"k": torch.zeros(2, 2, 5, 8, dtype=F16)}, TypeError, "k must have q's dtype"),
    "v rows": ({"v": torch.zeros(2, 2, 6, 8)}, ValueError, "v must have shape"),
    "v_width": ({"v": None, "v_width": 9}, ValueError, "v_width must be at most Dk = 8, got 9"),
    "no v_width": ({"v": None, "v_width": 0}, ValueError, "Dv of at least 1"),
    "one of the segments": ({"segments_q": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, "segments_k must be given where segments_q is"),
    "segments of floats": ({"segments_q": torch.zeros(2, 5), "segments_k": torch.zeros(2, 5)}, TypeError, "segments_q must be int32 or int64"),
    "sink": ({"sink": torch.zeros(3, 2)}, ValueError, "sink must have shape"),
    "bias of integers": ({"bias": torch.zeros(2, 5, 2, 9, dtype=torch.int32)}, TypeError, "bias must be bfloat16, float16"),
    "bias of doubles": ({"bias": torch.zeros(2, 5, 2, 9, dtype=F64)}, TypeError, "bias may be float64 only where q is"),
    "bias of other entries": ({"bias": torch.zeros(2, 5, 2, 8)}, ValueError, "bias must have shape indices' shape"),
    "packed batch": ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, ValueError, "batch of 1"),
}  # fmt: skip


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, fake):
    change, kind, message = BAD[case]
    made = {**h.make_inputs("odd", F32), **change}
    args = [t.to("meta") if fake and isinstance(t, torch.Tensor) else t for t in h.arguments(made, SCALE)]
    with pytest.raises(kind, match="selection_attention: .*" + message):
        op(h.name_of(made))(*args)


# --- compilation --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["plain", "packed_keys", "bf16_int64", "bias", "bias_repeats"])
def test_compiled_equals_eager(case, fresh):
    made = h.make_inputs(**{"kind": "odd", "dtype": F32, **VARIANTS[case]})
    ups = h.upstream(made)
    attention = torch.compile(op(h.name_of(made)), backend="mhc_inductor", fullgraph=True)
    h.check(run(made, ups, attention), made, ups, SCALE)


@pytest.mark.parametrize("bias", [None, "rows"])
def test_dynamic_sizes_compile_once(fresh, bias):
    name = named({"bias": bias})
    attention = torch.compile(lambda *a: op(name)(*a), fullgraph=True, dynamic=True)
    for n, (S, S_kv, keys) in enumerate(((6, 20, 9), (9, 31, 12), (17, 40, 33))):
        made = h.make_inputs("odd", F32, S=S, S_kv=S_kv, n=keys, bias=bias)
        ups = h.upstream(made)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            h.check(run(made, ups, attention), made, ups, SCALE)


# --- the public function ------------------------------------------------------------------------------------


def public(q, k, v, *args):
    given = {}
    if isinstance(args[-1], bool):
        *args, given["repeats"] = args
    *rest, scale, v_width = args
    given |= zip(h.ENTRIES[3:] if given else [n for n in h.NAMES[3:] if n != "mask"], rest, strict=True)
    values = k if v is None else v
    width = v_width if v is None else None
    return mhc_inductor.selection_attention(q, k, values, **given, scale=scale, v_width=width, return_lse=True)


@pytest.mark.parametrize("case", ["sink", "shared", "fp64", "packed_keys", "no_keys", "bias", "bias_repeats"])
def test_the_public_function(case):
    made = h.make_inputs(**{"dtype": F32, "kind": "odd", **VARIANTS[case]})
    ups = h.upstream(made)
    h.check(run(made, ups, public), made, ups, SCALE)


def test_values_in_the_keys_memory_are_read_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mhc_inductor.api.selection.call", lambda name, *args: seen.append(args[2] is None) or (None, None)
    )
    made = h.make_inputs("odd", F32)
    attend = lambda k, v, **kw: mhc_inductor.selection_attention(made["q"], k, v, indices=made["indices"], **kw)  # noqa: E731
    k = made["k"]
    for v, width, shared in ((k, None, True), (k, 5, True), (k[..., :5], None, True), (k[..., 1:6], None, False),
                             (k.clone(), None, False), (k.detach(), None, True)):  # fmt: skip
        attend(k, v, v_width=width)
        assert seen.pop() == shared
    leaf = k.clone().requires_grad_()
    for v, shared in ((leaf, True), (leaf[..., :5], False), (leaf.detach(), False)):
        attend(leaf, v)
        assert seen.pop() == shared, "autograd treats a view as a tensor of its own"


def test_a_detached_view_of_the_keys_gets_no_gradient():
    made = h.make_inputs("random", F64)
    k = made["k"].requires_grad_()
    for v in (k.detach(), made["k"].detach().clone()):
        o = mhc_inductor.selection_attention(made["q"], k, v, indices=made["indices"])
        (got,) = torch.autograd.grad(o.square().sum(), k)
        want = h.oracle({**made, "v": v.detach(), "k": k.detach()}, {"o": 2 * o.detach()})["dk"]
        assert error(got, want) < 1e-12


LISTED = {"indices": torch.zeros(2, 5, 2, 3, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({}, TypeError, "ranges must be a tensor, got NoneType, and no indices"),
        ({"indices": 0, "ranges": 0}, ValueError, "one of ranges and indices must be given, got both"),
        ({"indices": torch.zeros(2, 5, 2, 3)}, TypeError, "indices must be int32 or int64, got torch.float32"),
        ({**LISTED, "v_width": 9}, ValueError, "v_width must be from 1 to"),
        ({**LISTED, "v_width": 2.0}, TypeError, "v_width must be an int"),
        ({"indices": [1]}, TypeError, "indices must be a tensor, got list"),
        ({**LISTED, "bias": torch.zeros(2, 5, 2, 4)}, ValueError, "bias must have shape indices' shape"),
        ({**LISTED, "bias": [1]}, TypeError, "bias must be a tensor, got list"),
        ({**LISTED, "repeats": True}, ValueError, "repeats must be False without bias"),
        ({**LISTED, "bias": torch.zeros(2, 5, 2, 3), "repeats": 1}, TypeError, "repeats must be a bool, got int"),
        ({"ranges": 0, "bias": torch.zeros(2, 5, 2, 3)}, ValueError, "bias must be None with ranges"),
        *(
            (
                {**LISTED, "bias": torch.zeros(2, 5, 2, 3), name: torch.zeros(2, 5).int()},
                ValueError,
                f"{name} must be None with bias",
            )
            for name in h.NAMES[6:]
        ),
    ],
)
def test_bad_arguments_of_the_public_function_are_named(given, kind, message):
    made = h.make_inputs("odd", F32)
    with pytest.raises(kind, match="selection_attention: .*" + message):
        mhc_inductor.selection_attention(made["q"], made["k"], made["v"], **given)


def test_the_public_function_compiles_with_shared_values(fresh):
    made = h.make_inputs("odd", F32, shared=True, Dv=5, sink=True)
    ups = h.upstream(made)
    h.check(run(made, ups, torch.compile(public, fullgraph=True)), made, ups, SCALE)
