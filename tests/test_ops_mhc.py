# SPDX-License-Identifier: Apache-2.0
"""The ops of mHC: absent outputs, fused ops and single-pass mHC as the separate ops they stand for, the single-pass module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mhc_inductor
from mhc_inductor.nn import HyperConnection, expand
from mhc_inductor.nn.mhc import _options
from mhc_inductor.ops import registry
from mhc_inductor.ops.dims import results
from mhc_inductor.ops.registry import call
from tests.oracles import single_pass as one
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    OPS,
    PRE_OPTIONS,
    make_fused_inputs,
    make_inputs,
    make_post_inputs,
    oracle_fused,
    relative,
    run_fused,
    upstream,
)
from tests.oracles.samples import sample, trainable

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UP = one.FUSED_UP
OPTIONS = {**PRE_OPTIONS, "sinkhorn_iters": 3}


def test_mhc_pre_returns_none_without_residual_rows():
    h_in, h_post, h_res = mhc_inductor.mhc_pre(*make_inputs((2, 3), 4, 16, full=False).values())
    assert (h_in.shape, h_post.shape, h_res) == ((2, 3, 16), (2, 3, 4), None)
    x = torch.randn(2, 3, 4, 16, dtype=F64)
    out = mhc_inductor.mhc_post(x, h_in, h_post, None, transpose_res=False)
    assert torch.allclose(out, x + h_post[..., None] * h_in[..., None, :])


def test_jacrev():
    x, phi, *rest = make_inputs((2,), 4, 16).values()
    jac = torch.func.jacrev(lambda a: mhc_inductor.mhc_pre(x, phi, a, *rest[1:])[1])(rest[0])
    assert jac.shape == (2, 4, 3) and float(jac[..., 0].norm()) == 0 and float(jac[..., 1].norm()) > 0


def test_transpose_res_has_no_default():
    with pytest.raises(TypeError, match="transpose_res"):
        mhc_inductor.mhc_post(*make_post_inputs((3,), 4, 16, F32).values())


# --- fused ops ----------------------------------------------------------------------------------------------


def apart(inputs, transpose_res, head=False):
    """Returns the outputs of the two separate ops, through autograd, under the fused op's names."""
    x, f_out, h_post, h_res, *params = inputs.values()
    x_out = OPS.mhc_post(x, f_out, h_post, h_res, transpose_res)
    after = (
        OPS.mhc_head(x_out, *params, *HEAD_OPTIONS.values()) if head else OPS.mhc_pre(x_out, *params, *OPTIONS.values())
    )
    names = ("h_in", "h_pre", "h_mix", "inv_rms") if head else ("h_in", *UP[2:], "h_pre", "h_mix", "inv_rms")
    return {"x_out": x_out, **dict(zip(names, after, strict=True))}


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("transpose_res", [False, True], ids=["R", "RT"])
def test_equal_bits_to_the_two_separate_ops(head, dtype, transpose_res):
    inputs = make_fused_inputs((2, 3), 4, 40, dtype, head=head)
    got = run_fused(inputs, transpose_res, None, None if head else OPTIONS)
    want = apart(inputs, transpose_res, head)
    assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_no_less_accurate_than_the_two_ops(dtype, head):
    """Compares errors: the two separate ops round the gradient of x_out between them, the fused op does not."""
    inputs = make_fused_inputs((64,), 4, 64, dtype, head=head)
    leaf = {k: t.detach().requires_grad_() for k, t in inputs.items()}
    want = apart(leaf, True, head)
    up = upstream({k: t for k, t in want.items() if k in UP})
    grads = torch.autograd.grad([want[k] for k in up], list(leaf.values()), list(up.values()))
    options = None if head else OPTIONS
    exact = oracle_fused(inputs, True, want["x_out"].detach(), up, options)
    got = run_fused(inputs, True, up, options)
    for (key, t), other in zip(inputs.items(), grads, strict=True):
        mine, theirs = (relative(g, exact[f"d{key}"]) for g in (got[f"d{key}"], other))
        assert mine <= 1.05 * theirs + 2e-6, key
        if dtype is not F32 and key in ("h_post", "h_res"):
            assert mine < 0.01 * theirs, key
        assert got[f"d{key}"].dtype is t.dtype


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_of_a_fused_op(dynamic):
    values = [t.requires_grad_() for t in make_fused_inputs((5,), 4, 16, F32).values()]

    def step(*args):
        return call("mhc_post_pre", *args[:4], True, *args[4:], *OPTIONS.values())[:4]

    compiled = torch.compile(step, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    results = []
    for fn in (step, compiled):
        out = fn(*values)
        results.append([*out, *torch.autograd.grad(sum(t.square().sum() for t in out), values)])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 2e-6


UNREAD = {
    ("mhc_post_pre", "x_out"): one.PARAMS,
    ("mhc_post_head", "x_out"): one.PARAMS,
    ("mhc_single_pass", "x_out"): ("h_pre", *one.PARAMS),
    ("mhc_single_pass", "h_in"): one.PARAMS,
    **{("mhc_single_pass", f"next_{name}"): ("h_pre",) for name in ("pre", "post", "res")},
    **{("mhc_post_pre", name): () for name in UP[1:]},
    ("mhc_post_head", "h_in"): (),
}


@pytest.mark.parametrize(("name", "output"), UNREAD)
def test_what_an_output_does_not_read_has_no_gradient(name, output):
    """As between separate ops: None, not zeros."""
    given = dict(zip(registry.argument_names(name), trainable(name, sample(name, iters=2)), strict=False))
    leaves = {k: t for k, t in given.items() if isinstance(t, torch.Tensor)}
    out = dict(zip(results(name), call(name, *given.values()), strict=True))
    grads = torch.autograd.grad(out[output].sum(), list(leaves.values()), allow_unused=True)
    assert tuple(k for k, g in zip(leaves, grads, strict=True) if g is None) == UNREAD[name, output]


# --- single-pass mHC ----------------------------------------------------------------------------------------


def test_single_pass_is_post_then_collapse_and_coefficients():
    inputs = one.make_inputs((5,), 4, 24, BF16)
    got = one.run(inputs, True, None, OPTIONS)
    x_out = OPS.mhc_post(*(inputs[k] for k in ("x", "f_out", "h_post", "h_res")), True)
    rest = OPS.mhc_coefficients(x_out, *(inputs[k] for k in one.PARAMS), *OPTIONS.values())
    for a, b in zip(got.values(), (x_out, OPS.mhc_collapse(x_out, inputs["h_pre"]), *rest), strict=True):
        assert torch.equal(a, b)


def test_coefficients_and_collapse_are_pre():
    inputs = make_inputs((5,), 4, 24, BF16)
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = OPS.mhc_pre(*inputs.values(), *OPTIONS.values())
    got = OPS.mhc_coefficients(*inputs.values(), *OPTIONS.values())
    assert all(torch.equal(a, b) for a, b in zip(got, (h_pre, h_post, h_res, h_mix, inv_rms), strict=True))
    assert torch.equal(OPS.mhc_collapse(inputs["x"], h_pre), h_in)


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
def test_the_module_computes_the_specification_and_gradients_reach_every_parameter(kwargs):
    model, x = scrambled(**kwargs), torch.randn(5, 4, 16, dtype=F64, requires_grad=True)
    out = model(x)
    assert relative(out, plain(model, x)) < 1e-12
    out.square().sum().backward()
    for name, p in [*model.named_parameters(), ("x", x)]:
        assert p.grad is not None and float(p.grad.norm()) > 0, name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_on_the_cpu(dynamic):
    model, x = scrambled(sinkhorn_iters=3).float(), torch.randn(5, 4, 16)
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
