# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys, with and without a bias per entry, or under a mask: gradients, fills, NaN, ..."""

from __future__ import annotations

import functools

import pytest
import torch

import mhc_inductor
from mhc_inductor.reference import selection
from tests.oracles import lists as h
from tests.oracles import masks
from tests.oracles.op_contract import op
from tests.oracles.samples import MADE, VARIANTS
from tests.oracles.selection import error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.4


def run(made, ups, attention=None, scale=SCALE):
    return h.run(attention or op(h.name_of(made)), made, ups, scale)


def check(made, names=h.OUTPUTS, scale=SCALE):
    ups = h.upstream(made, names)
    h.check(run(made, ups, scale=scale), made, ups, scale)


@pytest.mark.parametrize("names", [("o",), ("lse",), h.OUTPUTS], ids="-".join)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (kind, case)
        for kind in ("list", "entry", "mask")
        for case, variant in VARIANTS[f"selection_{kind}_attention"].items()
        if "dtype" not in variant
    ],
)
def test_gradients_against_fp64(kind, case, names):
    name = f"selection_{kind}_attention"
    check(MADE[name](**{"kind": "empty" if kind == "mask" else "odd", "h": 3, "Dk": 8, **VARIANTS[name][case]}), names)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shared", [False, True])
def test_low_precision(dtype, shared):
    check(h.make_inputs("random", dtype, S=9, S_kv=30, n=20, shared=shared, sink=True))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", masks.KINDS)
def test_low_precision_under_a_mask(kind, dtype):
    check(masks.make_inputs(kind, dtype, S=9, S_kv=30, shared=kind in ("biased", "window"), sink=kind != "fills"))


@pytest.mark.parametrize("make", [h.make_inputs, masks.make_inputs])
@pytest.mark.parametrize("shape", [{"h": 129}, {"Dk": 577}, {"n": 4097, "S_kv": 50}])
def test_any_size(shape, make):
    if make is h.make_inputs or "n" not in shape:
        kind = "odd" if make is h.make_inputs else "random"
        check(make(kind, F32, **{"S": 2, "G": 1, "B": 1, "S_kv": 20, **shape}), scale=0.1)


def test_duplicates_and_order_do_not_matter():
    made = h.make_inputs("sorted", F64, S_kv=12, n=8)
    want = OPS.selection_list_attention(*h.arguments(made, SCALE))
    mixed = torch.cat((made["indices"].flip(-1), made["indices"][..., 2:5]), -1)
    got = OPS.selection_list_attention(*h.arguments({**made, "indices": mixed}, SCALE))
    assert all(error(g, w) < 1e-12 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("hidden", ["segments", "mask"])
def test_nan_in_hidden_keys_does_not_leak(hidden):
    made = {"segments": h, "mask": masks}[hidden].make_inputs(
        "random", F32, B=1, S=4, G=1, S_kv=20, **{"n": 5} if hidden == "segments" else {}
    )
    if hidden == "mask":
        made["mask"][..., :7] = False
    else:
        made["segments_q"], made["segments_k"] = (torch.zeros(1, n, dtype=torch.int64) for n in (4, 20))
        made["segments_k"][0, :7] = 2**40
    for name in "kv":
        made[name][0, 0, :7] = float("nan")
    got = run(made, h.upstream(made, ("o",)))
    seen = [t[..., 7:, :] if n in ("dk", "dv") else t for n, t in got.items() if n != "lse"]
    assert all(t.isfinite().all() for t in seen)


# --- what a bias per entry means: absent entries, repeated keys, rows of the lowest bias, no gradient ---------

ENTRY = op("selection_entry_attention")


def attended(made):
    return run(made, h.upstream(made))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_bias_of_zero_is_attention_over_the_list(repeats):
    made = h.make_inputs("random", F64, S_kv=20, sink=True)
    want = attended(made)
    got = attended({**made, "bias": torch.zeros(made["indices"].shape, dtype=F64), "repeats": repeats})
    assert all(error(got[name], want[name]) < 1e-12 for name in want)


@pytest.mark.parametrize("repeats", [False, True])
def test_repeated_keys(repeats):
    """Each entry counts, or the first whose bias is not -inf."""
    made = h.make_inputs("random", F64, B=1, S=1, G=1, S_kv=3, n=5)
    made["indices"] = torch.tensor([1, 2, 1, 1, 2], dtype=torch.int32).view(1, 1, 1, 5)
    made["bias"] = torch.tensor([-torch.inf, 0.5, 0.25, -2.0, 1.0], dtype=F64).view(1, 1, 1, 5)
    o, lse = ENTRY(*h.arguments({**made, "repeats": repeats}, SCALE))
    logits = SCALE * made["q"][0, 0, 0] @ made["k"][0, 0].T
    per_key = {1: [0.25, -2.0], 2: [0.5, 1.0]}
    sums = [
        sum(torch.tensor(b, dtype=F64).exp() for b in (found if repeats else found[:1])) for found in per_key.values()
    ]
    weights = logits[:, 1:].exp() * torch.stack(sums)
    assert error(o[0, 0, 0], weights / weights.sum(-1, keepdim=True) @ made["v"][0, 0, 1:]) < 1e-12
    assert error(lse[0, 0, 0], weights.sum(-1).log()) < 1e-12


def eager(made, scale=SCALE):
    """Returns the formula as models write it, in the inputs' dtype: the listed keys' scores, plus the bias, and softmax."""
    b, g = (torch.arange(n).view(shape) for n, shape in ((2, (2, 1, 1, 1)), (2, (1, 1, 2, 1))))
    at = made["indices"].long()

    def attention(q, k, v, indices, bias, sink, scale, v_width, repeats):
        t = torch.einsum("bsghd,bsgnd->bsghn", q, k[b, g, at]) * scale + bias.unsqueeze(3)
        return torch.einsum("bsghn,bsgnd->bsghd", t.softmax(-1), v[b, g, at]), h.logsumexp(t)

    return run(made, h.upstream(made), attention, scale)


@pytest.mark.parametrize("low", [h.LOWEST, h.LOWEST / 2, -1e9, -1e4, -100.0])
@pytest.mark.parametrize("all_rows", [False, True])
def test_rows_of_low_biases_are_as_eager_rounds_them(low, all_rows):
    made = h.make_inputs("random", F32, S_kv=20, bias="normal", repeats=True)
    made["bias"] = torch.where((made["bias"] > -0.5) | all_rows, low, made["bias"])
    got, want = attended(made), eager(made)
    for name in want:
        # Each score may be rounded to the next number of the sum's precision.
        assert error(got[name], want[name]) < 2e-5, name
        assert got[name].isfinite().all()


def test_rows_of_nothing_give_exactly_zero():
    made = h.make_inputs("random", F32, S_kv=20, sink=True, bias="normal")
    made["bias"][:, ::2] = -torch.inf
    got = attended(made)
    for name in ("o", "dq"):
        assert not got[name][:, ::2].any() and got[name][:, 1::2].abs().amin((-1, -2)).gt(0).all()
    assert got["lse"][:, ::2].eq(-torch.inf).all() and all(t.isfinite().all() for n, t in got.items() if n != "lse")


def test_nan_behind_a_bias_of_minus_inf_does_not_leak():
    made = h.make_inputs("random", F32, B=1, S=4, G=1, S_kv=20, n=9, bias="normal")
    made["bias"][made["indices"] < 7] = -torch.inf
    made["k"][:, :, :7] = made["v"][:, :, :7] = torch.nan
    got = attended(made)
    assert all(t.isfinite().all() for n, t in got.items() if n in ("o", "lse", "dq"))
    assert not got["dk"][:, :, :7].any() and not got["dv"][:, :, :7].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_give_nan_in_their_row(bad):
    made = h.make_inputs("random", F32, S_kv=20, bias="normal")
    made["bias"][0, 1, 0, 2] = bad
    o, lse = ENTRY(*h.arguments(made, SCALE))
    assert (
        o[0, 1, 0].isnan().all() and not o[1].isnan().any() and not o[0, 2:].isnan().any() and lse[1].isfinite().all()
    )


@pytest.mark.parametrize("repeats", [False, True])
def test_a_bias_of_nan_gives_its_score_no_gradient(repeats):
    """A row whose scores are all filled with -inf: weights of NaN, and gradients that a fill stops."""
    made = h.make_inputs("random", F32, S_kv=20, bias="normal", repeats=repeats)
    made["bias"][0, 1] = torch.nan
    listed = made["indices"][0, 1, 0]
    got = attended(made)
    assert got["o"][0, 1].isnan().all() and not got["dq"][0, 1].any() and got["dk"].isfinite().all()
    seen = torch.zeros(20, dtype=torch.bool).scatter(0, listed[listed >= 0].long(), True)
    assert torch.equal(got["dv"][0, 0].isnan().all(-1), seen) and got["dv"][1].isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        ("bias", h.make_inputs("random", F32, bias="normal"), "no gradient for bias"),
        ("mask", masks.make_inputs("biased", F32), "mask must not require a gradient, got one that does"),
    ],
)
def test_a_bias_or_mask_that_needs_a_gradient_is_refused_never_dropped(name, made, said, compiled, fresh):
    made = {**made, name: made[name].clone().requires_grad_()}
    call = op(h.name_of(made))
    attend = torch.compile(lambda *a: call(*a), backend="aot_eager") if compiled else call
    with pytest.raises((RuntimeError, ValueError), match=rf"{said}; pass {name}\.detach\(\)"):
        attend(*h.arguments(made, SCALE))
    with torch.no_grad():
        assert attend(*h.arguments(made, SCALE))[0].isfinite().all()
    given = {n: made[n] for n in ("q", "k", "v", "indices", name) if n in made}
    with pytest.raises(RuntimeError, match=said):
        torch.compile(lambda: mhc_inductor.selection_attention(**given), backend="aot_eager")()


# --- masks --------------------------------------------------------------------------------------------------


def written_out(q, k, v, mask, sink, scale):
    """Returns what a model computes that adds its mask in fp32."""
    t = torch.einsum("bsghd,bgtd->bsght", q, k) * scale + mask.unsqueeze(3)
    if sink is not None:
        t = torch.cat((t, sink[None, None, :, :, None].expand(*t.shape[:4], 1)), -1)
    return torch.einsum("bsght,bgtd->bsghd", t.softmax(-1)[..., : k.shape[2]], v)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("fill", [h.LOWEST, torch.finfo(BF16).min, torch.finfo(F16).min, -1e9, -1e4, -30.0])
def test_finite_fills_are_as_eager_code_rounds_them(fill, sink):
    made = masks.make_inputs("fills", F32, S=9, S_kv=14, sink=sink, Dv=5)
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


@pytest.mark.parametrize("kind", ["random", "biased"])
def test_chunks_give_what_one_chunk_gives(kind, monkeypatch):
    made = masks.make_inputs(kind, F32, S=7, S_kv=11, shared=True, Dv=5, sink=True)
    ups = h.upstream(made)
    want = run(made, ups)
    monkeypatch.setattr(selection, "CHUNK", 70)
    got = run(made, ups)
    assert all(error(got[n], want[n]) < 1e-6 for n in want)


def test_a_mask_with_indices_says_which_of_them_count():
    made = masks.make_inputs("random", F64, S_kv=11, shared_mask="G")
    indices = h.make_indices("odd", (2, 5, 2, 9), 11, torch.int64, torch.Generator().manual_seed(3))
    listed = torch.zeros(2, 5, 2, 12, dtype=torch.bool)
    listed.scatter_(-1, torch.where((indices >= 0) & (indices < 11), indices, 11), True)
    both = {**made, "mask": made["mask"] & listed[..., :11]}
    attend = functools.partial(mhc_inductor.selection_attention, indices=indices, return_lse=True)
    h.check(dict(zip(h.OUTPUTS, attend(made["q"], made["k"], made["v"], mask=made["mask"]), strict=True)), both)
    none, _ = attend(made["q"], made["k"][:, :, :0], made["v"][:, :, :0], mask=made["mask"][..., :0])
    assert (none == 0).all()


# --- the public function ------------------------------------------------------------------------------------


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


ONES = torch.ones(2, 5, 2, 5, dtype=torch.bool)
MASKED = {"mask": ONES}
LISTED = {"indices": torch.zeros(2, 5, 2, 3, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({}, TypeError, "ranges must be a tensor, got NoneType, and no indices"),
        ({"indices": 0, "ranges": 0}, ValueError, "one of ranges and indices must be given, got both"),
        ({"indices": torch.zeros(2, 5, 2, 3)}, TypeError, "indices must be int32 or int64, got torch.float32"),
        ({**LISTED, "v_width": 9}, ValueError, "v_width must be from 1 to"),
        ({**LISTED, "bias": torch.zeros(2, 5, 2, 4)}, ValueError, "bias must have shape indices' shape"),
        ({**LISTED, "repeats": True}, ValueError, "repeats must be False without bias"),
        ({"ranges": 0, "bias": torch.zeros(2, 5, 2, 3)}, ValueError, "bias must be None with ranges"),
        (
            {**MASKED, "ranges": torch.zeros(2, 5, 2, 1, 2).int()},
            ValueError,
            "mask must be given alone, .* got ranges too",
        ),
        ({**MASKED, "segments_q": torch.zeros(2, 5).int()}, ValueError, "mask must be given alone, .* got segments_q"),
        ({**MASKED, **LISTED, "cu_seqlens_q": torch.zeros(2)}, ValueError, "got cu_seqlens_q"),
        ({**LISTED, "mask": ONES.float()}, ValueError, "mask must be bool, got torch.float32"),
        ({**LISTED, "mask": ONES[:1, :3]}, ValueError, "mask must have shape"),
        ({"mask": ONES.int()}, TypeError, "mask must be bool or floating"),
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
