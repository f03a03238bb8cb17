# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC: the reference against fp64 autograd, the registered ops, the module, compiled graphs, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mhc_inductor
from mhc_inductor.nn import HyperConnection, expand
from mhc_inductor.nn.mhc import _options
from mhc_inductor.ops.registry import call
from tests.oracles import mhc as h
from tests.oracles import single_pass as one
from tests.oracles.mhc import OPS, PRE_OPTIONS, relative

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = 1e-12
OPTIONS = {**PRE_OPTIONS, "sinkhorn_iters": 2}


# --- the specification --------------------------------------------------------------------------------------


def test_single_pass_is_post_then_collapse_and_coefficients():
    inputs = one.make_inputs((5,), 4, 24, BF16)
    got = one.run(inputs, True, None, OPTIONS)
    x_out = OPS.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), True)
    rest = OPS.mhc_coefficients(x_out, *(inputs[k] for k in one.PARAMS), *OPTIONS.values())
    for a, b in zip(got.values(), (x_out, OPS.mhc_collapse(x_out, inputs["h_pre"]), *rest), strict=True):
        assert torch.equal(a, b)


def test_coefficients_and_collapse_are_pre():
    inputs = h.make_inputs((5,), 4, 24, BF16)
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = OPS.mhc_pre(*inputs.values(), *OPTIONS.values())
    got = OPS.mhc_coefficients(*inputs.values(), *OPTIONS.values())
    assert all(torch.equal(a, b) for a, b in zip(got, (h_pre, h_post, h_res, h_mix, inv_rms), strict=True))
    assert torch.equal(OPS.mhc_collapse(inputs["x"], h_pre), h_in)


# --- autograd through the registered ops --------------------------------------------------------------------


def outputs(values, transpose_res=True):
    return call("mhc_single_pass", *values[:5], transpose_res, *values[5:], *OPTIONS.values())


def leaves(*args, **kwargs):
    return [t.requires_grad_() for t in one.make_inputs(*args, **kwargs).values()]


# --- the module ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, depth=3, dim=16, n=4, **kwargs):
        super().__init__()
        sub = lambda: nn.Sequential(nn.Linear(dim, dim), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList(HyperConnection(dim, n, sub(), single_pass=True, **kwargs) for _ in range(depth))

    def forward(self, x):
        h_pre = None
        for block in self.blocks:
            x, h_pre = block((x, h_pre))
        return mhc_inductor.mhc_collapse(x, h_pre)


def plain(model, x):
    """Computes the model as the specification writes it."""
    n = x.shape[-2]
    weights = torch.eye(n, dtype=x.dtype)[0].expand(*x.shape[:-1])
    for b in model.blocks:
        _, h_post, h_res, h_pre, *_ = OPS.mhc_pre(x, b.phi, b.alpha, b.bias, b.gamma, *_options(b).values())
        f_out = b.sublayer(torch.einsum("...i,...id->...d", weights, x))
        r = h_res.mT if b.transpose_res else h_res
        x, weights = h_post[..., None] * f_out[..., None, :] + r @ x, h_pre
    return torch.einsum("...i,...id->...d", weights, x)


def scrambled(**kwargs):
    torch.manual_seed(0)
    model = Model(**kwargs).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.1 if p.dim() > 1 else 1.0))
    return model


@pytest.mark.parametrize("kwargs", [{}, {"gamma": True, "transpose_res": True}], ids=str)
def test_the_module_computes_the_specification(kwargs):
    model, x = scrambled(**kwargs), torch.randn(5, 4, 16, dtype=F64)
    assert relative(model(x), plain(model, x)) < EXACT


def test_gradients_reach_every_parameter():
    model, x = scrambled(gamma=True), torch.randn(5, 4, 16, dtype=F64, requires_grad=True)
    model(x).square().sum().backward()
    for name, p in [*model.named_parameters(), ("x", x)]:
        assert p.grad is not None and float(p.grad.norm()) > 0, name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_on_the_cpu(dynamic):
    model, x = scrambled().float(), torch.randn(5, 4, 16)
    compiled = torch.compile(model, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    results = []
    for fn in (model, compiled):
        out = fn(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 1e-5


def test_single_pass_takes_a_pair():
    block, x = HyperConnection(16, 4, nn.Identity(), single_pass=True), expand(torch.randn(3, 16), 4)
    for wrong in (x, (x,), None):
        with pytest.raises(TypeError, match=r"with single_pass=True x must be a pair \(streams, weights\), got"):
            block(wrong)
    x_out, h_pre = block((x, None))
    assert x_out.shape == x.shape and h_pre.shape == (3, 4)
    assert "single_pass=True" in repr(block)
