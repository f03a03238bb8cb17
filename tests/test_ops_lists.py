# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys, with and without a bias per entry: opcheck, gradients, validation, vmap, ..."""

from __future__ import annotations

import pytest
import torch

import mhc_inductor
from tests.oracles import lists as h
from tests.oracles.op_contract import op
from tests.oracles.samples import VARIANTS
from tests.oracles.selection import error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.4
CASES = {
    f"{kind}-{case}": {**({"bias": "rows"} if kind == "entry" else {}), **variant}
    for kind in ("list", "entry")
    for case, variant in VARIANTS[f"selection_{kind}_attention"].items()
    if "dtype" not in variant
}


def run(made, ups, attention=None, scale=SCALE):
    return h.run(attention or op(h.name_of(made)), made, ups, scale)


@pytest.mark.parametrize("names", [("o",), ("lse",), h.OUTPUTS], ids="-".join)
@pytest.mark.parametrize("case", CASES)
def test_gradients_against_fp64(case, names):
    made = h.make_inputs(**{"dtype": F32, "kind": "odd", **CASES[case]})
    ups = h.upstream(made, names)
    h.check(run(made, ups), made, ups, SCALE)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shared", [False, True])
def test_low_precision(dtype, shared):
    made = h.make_inputs("random", dtype, S=9, S_kv=30, n=20, shared=shared, sink=True)
    ups = h.upstream(made)
    h.check(run(made, ups), made, ups, SCALE)


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


# --- compilation --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
