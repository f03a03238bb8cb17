# SPDX-License-Identifier: Apache-2.0
"""Kernel parity with the fp64 oracle, through the launch plans, with every buffer poisoned.

The kernels run on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import types

import pytest
import torch
from conftest import GPU

from mhc_inductor.kernels import tuned
from mhc_inductor.kernels.eager import plan_of
from mhc_inductor.kernels.launch import DeviceProps
from mhc_inductor.kernels.mhc import config, plan
from mhc_inductor.tuning import table
from tests.oracles import mhc as h
from tests.oracles.poisoned import Poisoned

ROUNDINGS = 1.05
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Few multiprocessors give the interpreter few programs to run.
SMALL = DeviceProps(4, "cuda", 90)


def _kernel(name: str):
    def call(*args):
        device = next(a for a in args if isinstance(a, torch.Tensor)).device
        return plan_of(name)(Poisoned(device, None if GPU else SMALL), *args)

    return call


NAMES = [
    f"mhc_{op}{suffix}"
    for op in ("pre", "head", "post", "sinkhorn", "post_pre", "post_head") for suffix in ("", "_backward")
]  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Makes the helpers call the launch plans in place of the registered ops."""
    monkeypatch.setattr(h, "OPS", types.SimpleNamespace(**{name: _kernel(name) for name in NAMES}))


def check_pre(device, lead, n, width, dtype, tolerance=2e-6, iters=0, form="softmax", **made):
    inputs = h.make_inputs(lead, n, width, dtype, device=device, **made)
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form}
    outputs = h.run_pre(inputs, None, options)
    up = h.upstream({k: outputs[k] for k in ("h_in", "h_post", "h_res")})
    if not outputs["h_res"].numel():
        del up["h_res"]
    got = h.run_pre(inputs, up, options)
    h.compare(got, h.oracle_pre(inputs, up, options), tolerance, ROUNDINGS)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("iters, form", [(0, "softmax"), (3, "softmax"), (2, "exp"), (2, "exp_eps")])
def test_pre(device, dtype, iters, form):
    check_pre(device, (2, 5), 4, 128, dtype, iters=iters, form=form)


OUTSIDE = {"norm_eps": 0.1, "norm_form": "outside"}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("made", [{}, {"full": False, "gamma": False}, {"x_scale": 1e-4}], ids=str)
def test_pre_with_eps_outside_the_root(device, dtype, made):
    inputs = h.make_inputs((5,), 4, 48, dtype, device=device, **made)
    inputs["x"][2] = 0
    options = {**OUTSIDE, "sinkhorn_iters": 0 if "full" in made else 2}
    out = h.run_pre(inputs, None, options)
    up = h.upstream({k: out[k] for k in ("h_in", "h_post", "h_res") if out[k].numel()})
    got, want = h.run_pre(inputs, up, options), h.oracle_pre(inputs, up, options)
    h.compare(got, want, 2e-6, ROUNDINGS)
    h.compare({"dx": got["dx"][2]}, {"dx": want["dx"][2]}, 2e-6, ROUNDINGS)


def test_head_with_eps_outside_the_root(device):
    inputs = h.make_inputs((2, 3), 4, 48, F32, head=True, device=device)
    up = h.upstream({"h_in": h.run_head(inputs)["h_in"]})
    h.compare(h.run_head(inputs, up, OUTSIDE), h.oracle_head(inputs, up, OUTSIDE), 2e-6, ROUNDINGS)


def test_pre_twenty_iterations(device):
    check_pre(device, (5,), 4, 40, BF16, iters=20)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 8])
def test_pre_other_n(device, n):
    check_pre(device, (3,), n, 24, BF16, iters=2)


@pytest.mark.parametrize("width", [16, 17, 100, 3000] if GPU else [16, 17, 100])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_pre_odd_widths(device, width, dtype):
    check_pre(device, (3,), 4, width, dtype)


@pytest.mark.parametrize("param", [BF16, F16])
@pytest.mark.parametrize("gamma", [True, False])
def test_pre_low_precision_parameters(device, param, gamma):
    inputs = h.make_inputs((6,), 4, 32, BF16, gamma=gamma, param_dtype=param, device=device)
    up = h.upstream({k: v for k, v in h.run_pre(inputs).items() if k in ("h_in", "h_post", "h_res")})
    h.compare(h.run_pre(inputs, up), h.oracle_pre(inputs, up), 2e-6, ROUNDINGS)


def test_pre_without_residual_rows(device):
    check_pre(device, (7,), 4, 48, BF16, full=False)


@pytest.mark.parametrize("missing", [("h_in",), ("h_post",), ("h_res",), ("h_in", "h_post"), ("h_post", "h_res")])
def test_pre_backward_without_some_gradients(device, missing):
    inputs = h.make_inputs((5,), 4, 32, BF16, device=device)
    options = {"sinkhorn_iters": 2}
    outputs = h.run_pre(inputs, None, options)
    up = h.upstream({k: outputs[k] for k in ("h_in", "h_post", "h_res") if k not in missing})
    h.compare(h.run_pre(inputs, up, options), h.oracle_pre(inputs, up, options), 2e-6, ROUNDINGS)


def test_dx_acc_is_added_before_the_one_rounding(device):
    inputs = h.make_inputs((5,), 4, 32, BF16, device=device)
    out = h.run_pre(inputs)
    up = h.upstream({k: out[k] for k in ("h_in", "h_post", "h_res")})
    acc = h.upstream({"x": inputs["x"]}, seed=7)["x"]
    saved = [out[k] for k in ("h_pre", "h_post", "h_mix", "inv_rms")]
    dx = h.OPS.mhc_pre_backward(*up.values(), *inputs.values(), *saved, acc, *h.PRE_OPTIONS.values())[0]
    want = h.oracle_pre(inputs, up)["dx"] + acc.double().cpu()
    h.compare({"dx": dx}, {"dx": want}, 2e-6, ROUNDINGS)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_head(device, dtype):
    inputs = h.make_inputs((2, 3), 4, 48, dtype, head=True, device=device)
    up = h.upstream({"h_in": h.run_head(inputs)["h_in"]})
    h.compare(h.run_head(inputs, up), h.oracle_head(inputs, up), 2e-6, ROUNDINGS)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("transpose_res", [False, True])
def test_post(device, dtype, transpose_res):
    inputs = h.make_post_inputs((2, 3), 4, 100, dtype, device=device)
    up = h.upstream({"x": inputs["x"]})["x"]
    h.compare(h.run_post(inputs, transpose_res, up), h.oracle_post(inputs, transpose_res, up), 1e-6, ROUNDINGS)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_post_other_n_and_dtypes(device, n):
    inputs = h.make_post_inputs((3,), n, 40, BF16, f_dtype=F32, h_dtype=BF16, device=device)
    up = h.upstream({"x": inputs["x"]})["x"]
    h.compare(h.run_post(inputs, True, up), h.oracle_post(inputs, True, up), 1e-6, ROUNDINGS)


@pytest.mark.parametrize("run", ["pre", "post"])
def test_sizes_that_a_tuned_table_may_choose_change_no_bit(device, run):
    """Forward: a program's columns of elements that no sum joins."""
    pre, post = h.make_inputs((3,), 4, 300, BF16, device=device), h.make_post_inputs((3,), 4, 300, BF16, device=device)

    def results():
        found = h.run_pre(pre) if run == "pre" else h.run_post(post, True)
        return {k: v.clone() for k, v in found.items()}

    with tuned.recorded() as asked:
        want = results()
    (key,) = (k for k in asked if k.startswith(f"mhc.{run}("))
    tried = [{f: v} for f in ("BD", "WK") for v in asked[key].choices.get(f, ()) if v != getattr(asked[key].default, f)]
    assert len(tried) >= 4
    for values in tried:
        with table.use({key: values}):
            got = results()
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want), values


def test_post_without_residual_matrix(device):
    inputs = h.make_post_inputs((3,), 4, 40, BF16, residual=False, device=device)
    up = h.upstream({"x": inputs["x"]})["x"]
    h.compare(h.run_post(inputs, False, up), h.oracle_post(inputs, False, up), 1e-6, ROUNDINGS)


@pytest.mark.parametrize("n", [2, 4, 5])
@pytest.mark.parametrize(
    "iters, form",
    [(1, "softmax"), (6, "softmax"), (1, "exp"), (6, "exp"), (0, "softmax"), (1, "exp_eps"), (6, "exp_eps")],
)
def test_sinkhorn(device, n, iters, form):
    logits = h.upstream({"h": torch.empty(9, n, n)}, seed=3)["h"].to(device)
    grad = h.upstream({"h": torch.empty(9, n, n)}, seed=4)["h"].to(device)
    got = {
        "h_res": h.OPS.mhc_sinkhorn(logits, iters, 1e-6, form),
        "dh_res": h.OPS.mhc_sinkhorn_backward(grad, logits, iters, 1e-6, form),
    }
    h.compare(got, h.oracle_sinkhorn(logits, iters, 1e-6, form, grad), 2e-6)


@pytest.mark.parametrize("name", sorted(h.MISTAKES))
def test_mistakes_made_before(device, name):
    case = dict(h.MISTAKES[name])
    if not GPU and case["width"] > 1000:
        case["lead"] = (1,)
    if not GPU and case["lead"][0] > 100:
        case["lead"] = (70,)
    check_pre(device, case.pop("lead"), case.pop("n"), case.pop("width"), F32, 5e-6, **case)


@pytest.mark.parametrize("lead", [(0,), (1,), (1, 1), (0, 3)])
def test_no_token_and_one_token(device, lead):
    inputs = h.make_inputs(lead, 4, 32, BF16, device=device)
    out = h.run_pre(inputs, None, {"sinkhorn_iters": 2})
    up = h.upstream({k: out[k] for k in ("h_in", "h_post", "h_res")})
    got = h.run_pre(inputs, up, {"sinkhorn_iters": 2})
    assert all(torch.isfinite(v).all() for v in got.values())
    h.compare(got, h.oracle_pre(inputs, up, {"sinkhorn_iters": 2}), 2e-6, ROUNDINGS)


def test_strided_inputs(device):
    inputs = h.make_inputs((6,), 4, 32, BF16, device=device)
    want = h.run_pre(inputs)
    strided = dict(inputs)
    strided["x"] = inputs["x"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["phi"] = inputs["phi"].T.contiguous().T
    got = h.run_pre(strided)
    assert not strided["x"].is_contiguous()
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_equal_bits_in_two_runs_and_in_any_batch(device):
    tokens = config.SMALL_T + 3 if GPU else 130
    inputs = h.make_inputs((tokens,), 4, 64, BF16, device=device)
    options = {"sinkhorn_iters": 3}
    whole, again = h.run_pre(inputs, None, options), h.run_pre(inputs, None, options)
    one = h.run_pre({**inputs, "x": inputs["x"][77:78].clone()}, None, options)
    for key, value in whole.items():
        assert torch.equal(value, again[key]), key
        assert torch.equal(value[77:78], one[key]), key


def test_bits_do_not_depend_on_the_sections_per_program(device, monkeypatch):
    """Checks equal bits if a program runs one section of K, as in decoding, or GROUP sections, as in a full batch."""
    inputs = h.make_inputs((3,), 4, 96, BF16, device=device)
    few = h.run_pre(inputs)
    monkeypatch.setattr(plan, "SMALL_T", 1)
    many = h.run_pre(inputs)
    assert all(torch.equal(few[k], many[k]) for k in few)


# --- post fused with the pre or head of its result ----------------------------------------------------------

UP = ("x_out", "h_in", "next_post", "next_res")


def check_fused(device, lead, n, width, dtype, *, iters=2, transpose_res=True, missing=(), **made):
    given = made.pop("options", {})
    inputs = h.make_fused_inputs(lead, n, width, dtype, device=device, **made)
    options = {**given, **({} if made.get("head") else {"sinkhorn_iters": iters})}
    out = h.run_fused(inputs, transpose_res, None, options)
    up = h.upstream({k: out[k] for k in UP if k in out and k not in missing and out[k].numel()})
    got = h.run_fused(inputs, transpose_res, up, options)
    want = h.oracle_fused(inputs, transpose_res, out["x_out"], up, options)
    # The gradient of x_out is rounded to x's dtype once, as between two ops; everything computed from it has that
    # error.
    once = ROUNDINGS * h.rounding(dtype) if dtype in (BF16, F16) else 0.0
    through = {k: got.pop(k) for k in ("dx", "df", "dh_post", "dh_res") if k in got}
    h.compare(got, want, 2e-6, ROUNDINGS)
    h.compare(through, want, 2e-6 + once, ROUNDINGS)
    apart = h.OPS.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), transpose_res)
    assert torch.equal(out["x_out"], apart)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("transpose_res", [False, True])
def test_post_pre(device, dtype, transpose_res):
    check_fused(device, (2, 5), 4, 128, dtype, transpose_res=transpose_res)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_post_pre_other_n(device, n):
    check_fused(device, (3,), n, 24, BF16)


@pytest.mark.parametrize("width", [16, 17, 100, 1100, 3000] if GPU else [16, 17, 100, 1100])
def test_post_pre_odd_widths(device, width):
    check_fused(device, (3,), 4, width, BF16, iters=0)


@pytest.mark.parametrize("missing", [UP[:1], UP[1:2], UP[2:], UP[:2]])
def test_post_pre_backward_without_some_gradients(device, missing):
    check_fused(device, (5,), 4, 48, BF16, missing=missing)


@pytest.mark.parametrize("made", [{"residual": False}, {"full": False, "iters": 0}, {"gamma": False}])
def test_post_pre_variants(device, made):
    check_fused(device, (5,), 4, 48, BF16, **made)


@pytest.mark.parametrize("head", [False, True])
def test_fused_with_eps_outside_the_root(device, head):
    check_fused(device, (5,), 4, 48, BF16, head=head, options=OUTSIDE)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("missing", [(), UP[:1]])
def test_post_head(device, dtype, missing):
    check_fused(device, (2, 3), 4, 48, dtype, head=True, missing=missing)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("lead", [(0,), (1,), (0, 3)])
def test_post_pre_of_no_token_and_one_token(device, lead, dtype):
    inputs = h.make_fused_inputs(lead, 4, 32, dtype, device=device)
    out = h.run_fused(inputs, True)
    up = h.upstream({k: out[k] for k in UP})
    got = h.run_fused(inputs, True, up)
    assert all(torch.isfinite(v).all() for v in got.values())
    want = h.oracle_fused(inputs, True, out["x_out"], up)
    h.compare({k: v for k, v in got.items() if k not in ("dh_post", "dh_res")}, want, 2e-6, ROUNDINGS)


def test_post_pre_of_strided_inputs(device):
    inputs = h.make_fused_inputs((6,), 4, 32, BF16, device=device)
    up = h.upstream({k: v for k, v in h.run_fused(inputs, True).items() if k in UP})
    strided = dict(inputs)
    for key in ("x", "h_res", "phi"):
        strided[key] = inputs[key].transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not strided[key].is_contiguous()
    want, got = h.run_fused(inputs, True, up), h.run_fused(strided, True, up)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_post_pre_equal_bits_in_two_runs_and_in_any_batch(device):
    """Includes the gradients of a token, whose sums over D have a fixed order."""
    tokens = config.SMALL_T + 3 if GPU else 130
    inputs = h.make_fused_inputs((tokens,), 4, 64, BF16, device=device)
    options = {"sinkhorn_iters": 3}
    up = h.upstream({k: v for k, v in h.run_fused(inputs, False, None, options).items() if k in UP})
    whole, again = (h.run_fused(inputs, False, up, options) for _ in range(2))
    alone = {k: t if k in ("phi", "alpha", "bias", "gamma") else t[77:78].clone() for k, t in inputs.items()}
    one = h.run_fused(alone, False, {k: t[77:78].clone() for k, t in up.items()}, options)
    for key, value in whole.items():
        assert torch.equal(value, again[key]), key
        if key not in ("dphi", "dalpha", "dbias", "dgamma"):
            assert torch.equal(value[77:78], one[key]), key


def test_post_pre_bits_do_not_depend_on_the_sections_per_program(device, monkeypatch):
    inputs = h.make_fused_inputs((3,), 4, 1100, BF16, device=device)
    few = h.run_fused(inputs, True)
    monkeypatch.setattr(plan, "SMALL_T", 1)
    many = h.run_fused(inputs, True)
    assert all(torch.equal(few[k], many[k]) for k in few)
