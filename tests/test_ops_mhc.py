# SPDX-License-Identifier: Apache-2.0
"""The registered ops and the public functions: opcheck, gradients, validation, vmap, autocast, odd shapes."""

from __future__ import annotations

import pytest
import torch

import mhc_inductor
from tests.oracles.mhc import (
    OPS,
    compare,
    make_inputs,
    make_post_inputs,
    oracle_post,
    oracle_pre,
    oracle_sinkhorn,
    run_post,
    run_pre,
    upstream,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ACCURATE = 2e-5  # parameter gradients against fp64


# --- gradients ----------------------------------------------------------------------------------------------


# --- shapes, dtypes, strides --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("param_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("iters", [0, 20])
def test_pre_dtypes(dtype, param_dtype, iters):
    inputs = make_inputs((16,), 4, 64, dtype, param_dtype=param_dtype)
    options = {"sinkhorn_iters": iters}
    up = upstream({k: t for k, t in run_pre(inputs, None, options).items() if k in ("h_in", "h_post", "h_res")})
    got = run_pre(inputs, up, options)
    compare(got, oracle_pre(inputs, up, options), ACCURATE)
    wide = F64 if dtype is F64 else F32
    assert got["h_in"].dtype is dtype and got["dx"].dtype is dtype
    assert all(got[k].dtype is wide for k in ("h_post", "h_res", "h_pre", "h_mix", "inv_rms"))
    assert all(got[k].dtype is param_dtype for k in ("dphi", "dalpha", "dbias", "dgamma"))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("f_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("h_dtype", [F32, BF16])
def test_post_dtypes(dtype, f_dtype, h_dtype):
    inputs = make_post_inputs((5,), 4, 24, dtype, f_dtype=f_dtype, h_dtype=h_dtype)
    up = torch.randn(inputs["x"].shape).to(dtype)
    got = run_post(inputs, False, up)
    compare(got, oracle_post(inputs, False, up), 1e-6)
    assert [t.dtype for t in got.values()] == [dtype, dtype, f_dtype, h_dtype, h_dtype]


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_sinkhorn_dtypes(dtype):
    logits = torch.randn(6, 4, 4).to(dtype)
    g = torch.randn(6, 4, 4).to(dtype)
    got = {"h_res": OPS.mhc_sinkhorn(logits, 5, 1e-6, "softmax")}
    got["dh_res"] = OPS.mhc_sinkhorn_backward(g, logits, 5, 1e-6, "softmax")
    assert all(t.dtype is dtype for t in got.values())
    compare(got, oracle_sinkhorn(logits, 5, 1e-6, "softmax", g), 1e-12 if dtype is F64 else 1e-5)


def test_mhc_pre_returns_none_without_residual_rows():
    h_in, h_post, h_res = mhc_inductor.mhc_pre(*make_inputs((2, 3), 4, 16, full=False).values())
    assert (h_in.shape, h_post.shape, h_res) == ((2, 3, 16), (2, 3, 4), None)
    x = torch.randn(2, 3, 4, 16, dtype=F64)
    out = mhc_inductor.mhc_post(x, h_in, h_post, None, transpose_res=False)
    assert torch.allclose(out, x + h_post[..., None] * h_in[..., None, :])


# --- transforms ---------------------------------------------------------------------------------------------


def test_jacrev():
    x, phi, *rest = make_inputs((2,), 4, 16).values()
    jac = torch.func.jacrev(lambda a: mhc_inductor.mhc_pre(x, phi, a, *rest[1:])[1])(rest[0])
    assert jac.shape == (2, 4, 3) and float(jac[..., 0].norm()) == 0 and float(jac[..., 1].norm()) > 0


# --- bad input ----------------------------------------------------------------------------------------------


def test_transpose_res_has_no_default():
    with pytest.raises(TypeError, match="transpose_res"):
        mhc_inductor.mhc_post(*make_post_inputs((3,), 4, 16, F32).values())
