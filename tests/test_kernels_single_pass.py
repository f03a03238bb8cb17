# SPDX-License-Identifier: Apache-2.0
"""Kernel parity of single-pass mHC with the fp64 oracle, through the launch plans, with every buffer poisoned.

The kernels run on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import types

import pytest
import torch
from conftest import GPU
from test_kernels_mhc import BF16, F16, F32, OUTSIDE, ROUNDINGS, _kernel

from mhc_inductor.kernels.mhc import config, plan
from tests.oracles import mhc as h
from tests.oracles import single_pass as one

NAMES = [f"mhc_{op}{suffix}" for op in ("coefficients", "collapse", "single_pass") for suffix in ("", "_backward")]
NAMES += ["mhc_post", "mhc_pre"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Makes the helpers call the launch plans in place of the registered ops."""
    monkeypatch.setattr(h, "OPS", types.SimpleNamespace(**{name: _kernel(name) for name in NAMES}))


def check_dalpha(got, want, of_tokens, n, tolerance):
    """Compares dalpha with the fp64 oracle's, relative to the sizes of its terms where there are tokens."""
    if of_tokens:
        one.compare_dalpha(got["dalpha"], want["dalpha"], one.dalpha_terms(of_tokens, n), tolerance, ROUNDINGS)
    else:
        assert not got["dalpha"].any()


def check(device, lead, n, width, dtype, *, iters=2, form="softmax", transpose_res=True, missing=(), more=None, **made):
    inputs = one.make_inputs(lead, n, width, dtype, device=device, **made)
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form, **(more or {})}
    out = one.run(inputs, transpose_res, None, options)
    up = h.upstream({k: out[k] for k in one.UP if k not in missing and (out[k].numel() or 0 in lead)})
    got = one.run(inputs, transpose_res, up, options)
    want = one.oracle(inputs, transpose_res, out["x_out"], up, options)
    # The gradient of x_out is rounded to x's dtype once; everything computed from it has that error. dh_pre is computed
    # from x_out, which the backward computes again: a GPU's compiler may choose other fused multiply-adds there, so that
    # an element rounds the other way.
    once = ROUNDINGS * h.rounding(dtype) if dtype in (BF16, F16) else 0.0
    # Sums over D of rounded products may cancel a little: of one token, dh_post was 1.012 roundings apart on a GPU.
    errors = {"dx": once, "df_out": once, "dh_post": 2 * once if GPU else once, "dh_res": 2 * once if GPU else once}
    errors["dh_pre"] = 3 * once if GPU else 0.0
    for key in got.keys() - {"dalpha"}:
        h.compare({key: got[key]}, want, 2e-6 + errors.get(key, 0.0), ROUNDINGS)
    tokens = zip(one.alone({**inputs, "x_out": out["x_out"]}, lead), one.alone(up, lead), strict=True)
    terms = (one.oracle(t, transpose_res, t.pop("x_out"), u, options) for t, u in tokens)
    check_dalpha(got, want, list(terms), n, 2e-6 + once)
    apart = h.OPS.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), transpose_res)
    assert h.relative(out["x_out"], apart) <= 2 * once + 1e-6 if GPU else torch.equal(out["x_out"], apart)
    return got


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("transpose_res", [False, True])
def test_single_pass(device, dtype, transpose_res):
    check(device, (2, 5), 4, 128, dtype, transpose_res=transpose_res)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_other_n(device, n):
    check(device, (3,), n, 24, BF16)


@pytest.mark.parametrize("width", [16, 17, 100, 1100, 3000] if GPU else [16, 17, 100, 1100])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_odd_widths(device, width, dtype):
    check(device, (3,), 4, width, dtype, iters=0)


@pytest.mark.parametrize("missing", [one.UP[:1], one.UP[1:2], one.UP[2:], one.UP[2:3], one.UP[:2]], ids=str)
def test_backward_without_some_gradients(device, missing):
    got = check(device, (5,), 4, 48, BF16, missing=missing)
    assert bool((got["dh_pre"] == 0).all()) == ("h_in" in missing)


@pytest.mark.parametrize(
    "made",
    [{"residual": False}, {"full": False, "iters": 0}, {"gamma": False}, {"form": "exp"}, {"form": "exp_eps"}],
    ids=str,
)
def test_variants(device, made):
    check(device, (5,), 4, 48, BF16, **made)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_eps_outside_the_root(device, dtype):
    check(device, (5,), 4, 48, dtype, more=OUTSIDE)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("lead", [(0,), (1,), (0, 3)])
def test_no_token_and_one_token(device, lead, dtype):
    got = check(device, lead, 4, 32, dtype)
    assert all(torch.isfinite(v).all() for v in got.values())


def test_low_precision_weights(device):
    inputs = one.make_inputs((5,), 4, 48, BF16, device=device)
    for key in ("h_post", "h_res", "h_pre"):
        inputs[key] = inputs[key].bfloat16()
    out = one.run(inputs, True)
    up = h.upstream({k: out[k] for k in one.UP})
    got, want = one.run(inputs, True, up), one.oracle(inputs, True, out["x_out"], up)
    assert all(got[f"d{k}"].dtype is BF16 for k in ("h_post", "h_res", "h_pre"))
    h.compare(got, want, 2e-6 + ROUNDINGS * h.rounding(BF16), ROUNDINGS)


def test_strided_inputs(device):
    inputs = one.make_inputs((6,), 4, 32, BF16, device=device)
    up = h.upstream({k: v for k, v in one.run(inputs, True).items() if k in one.UP})
    strided = dict(inputs)
    for key in ("x", "h_res", "phi"):
        strided[key] = inputs[key].transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not strided[key].is_contiguous()
    want, got = one.run(inputs, True, up), one.run(strided, True, up)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_equal_bits_in_two_runs_and_in_any_batch(device):
    tokens = config.SMALL_T + 3 if GPU else 130
    inputs = one.make_inputs((tokens,), 4, 64, BF16, device=device)
    options = {"sinkhorn_iters": 3}
    up = h.upstream({k: v for k, v in one.run(inputs, False, None, options).items() if k in one.UP})
    whole, again = (one.run(inputs, False, up, options) for _ in range(2))
    alone = {k: t if k in one.PARAMS else t[77:78].clone() for k, t in inputs.items()}
    single = one.run(alone, False, {k: t[77:78].clone() for k, t in up.items()}, options)
    for key, value in whole.items():
        assert torch.equal(value, again[key]), key
        if key not in ("dphi", "dalpha", "dbias", "dgamma"):
            assert torch.equal(value[77:78], single[key]), key


def test_bits_do_not_depend_on_the_sections_per_program(device, monkeypatch):
    inputs = one.make_inputs((3,), 4, 1100, BF16, device=device)
    few = one.run(inputs, True)
    monkeypatch.setattr(plan, "SMALL_T", 1)
    many = one.run(inputs, True)
    assert all(torch.equal(few[k], many[k]) for k in few)


def check_coefficients(device, lead, n, width, dtype, iters=2, form="softmax", missing=(), more=None, **made):
    inputs = h.make_inputs(lead, n, width, dtype, device=device, **made)
    options = {"sinkhorn_iters": iters, "sinkhorn_form": form, **(more or {})}
    out = one.run_coefficients(inputs, None, options)
    up = h.upstream({k: out[k] for k in one.COEFFICIENTS[:3] if k not in missing and (out[k].numel() or 0 in lead)})
    got = one.run_coefficients(inputs, up, options)
    want = one.oracle_coefficients(inputs, up, options)
    h.compare({k: t for k, t in got.items() if k != "dalpha"}, want, 2e-6, ROUNDINGS)
    tokens = zip(one.alone(inputs, lead), one.alone(up, lead), strict=True)
    check_dalpha(got, want, [one.oracle_coefficients(t, u, options) for t, u in tokens], n, 2e-6)
    whole = h.OPS.mhc_pre(*inputs.values(), *{**h.PRE_OPTIONS, **options}.values())
    for key, want in zip(("h_post", "h_res", "h_pre", "h_mix", "inv_rms"), whole[1:], strict=True):
        assert torch.equal(got[key], want), f"{key} of mhc_pre has other bits"


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("iters, form", [(0, "softmax"), (3, "softmax"), (2, "exp"), (2, "exp_eps")])
def test_coefficients(device, dtype, iters, form):
    check_coefficients(device, (2, 5), 4, 128, dtype, iters, form)


def test_coefficients_with_eps_outside_the_root(device):
    check_coefficients(device, (5,), 4, 48, F32, more=OUTSIDE)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_coefficients_of_other_n(device, n):
    check_coefficients(device, (3,), n, 40, BF16)


@pytest.mark.parametrize("made", [{"full": False, "iters": 0}, {"gamma": False}, {"param_dtype": BF16}], ids=str)
@pytest.mark.parametrize("missing", [(), ("h_pre",), ("h_post", "h_res")], ids=str)
def test_coefficients_variants(device, made, missing):
    check_coefficients(device, (5,), 4, 48, BF16, missing=missing, **made)


@pytest.mark.parametrize("lead", [(0,), (1,), (0, 3)])
def test_coefficients_of_no_token_and_one_token(device, lead):
    check_coefficients(device, lead, 4, 32, BF16)


def test_dx_acc_is_added_before_the_one_rounding(device):
    inputs = h.make_inputs((5,), 4, 32, BF16, device=device)
    up = h.upstream({k: v for k, v in one.run_coefficients(inputs).items() if k in one.COEFFICIENTS[:3]})
    acc = h.upstream({"x": inputs["x"]}, seed=7)["x"]
    got = one.run_coefficients(inputs, up, None, acc)["dx"]
    want = one.oracle_coefficients(inputs, up)["dx"] + acc.double().cpu()
    h.compare({"dx": got}, {"dx": want}, 2e-6, ROUNDINGS)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("lead", [(2, 3), (0,), (1,)])
def test_collapse(device, dtype, lead):
    inputs = one.make_inputs(lead, 4, 100, dtype, device=device)
    dh_in = h.upstream({"f": inputs["f_out"]})["f"]
    args = inputs["x"], inputs["h_pre"], dh_in
    h.compare(one.run_collapse(*args), one.oracle_collapse(*args), 1e-6, ROUNDINGS)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("width", [16, 17, 1100])
def test_collapse_of_other_sizes(device, n, width):
    inputs = one.make_inputs((3,), n, width, BF16, device=device)
    args = inputs["x"].transpose(-1, -2).contiguous().transpose(-1, -2), inputs["h_pre"].bfloat16(), inputs["f_out"]
    h.compare(one.run_collapse(*args), one.oracle_collapse(*args), 1e-6, ROUNDINGS)
