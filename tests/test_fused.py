# SPDX-License-Identifier: Apache-2.0
"""The fused ops mhc_post_pre and mhc_post_head: equal to the two separate ops, exact gradients, refusals, one trace."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

import mhc_inductor  # noqa: F401  (registers the ops)
from mhc_inductor.ops import fused
from mhc_inductor.ops.registry import call
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    OPS,
    PRE_OPTIONS,
    compare,
    make_fused_inputs,
    oracle_fused,
    relative,
    run_fused,
    upstream,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UP = ("x_out", "h_in", "next_post", "next_res")
EXACT = 1e-12
OPTIONS = {**PRE_OPTIONS, "sinkhorn_iters": 3}


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


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("transpose_res", [False, True], ids=["R", "RT"])
@pytest.mark.parametrize("residual", [True, False], ids=["res", "none"])
@pytest.mark.parametrize("made", [{}, {"full": False}, {"head": True}, {"gamma": False}], ids=str)
def test_gradients_against_fp64_autograd(n, transpose_res, residual, made):
    inputs = make_fused_inputs((3,), n, 20, residual=residual, **made)
    options = {"sinkhorn_iters": 2} if not {"full", "head"} & made.keys() else None
    out = run_fused(inputs, transpose_res, None, options)
    up = upstream({k: t for k, t in out.items() if k in UP})
    got = run_fused(inputs, transpose_res, up, options)
    errors = compare(got, oracle_fused(inputs, transpose_res, out["x_out"], up, options), EXACT)
    assert {f"d{k}" for k, t in inputs.items() if t is not None} <= errors.keys()


@pytest.mark.parametrize("missing", [("x_out",), ("h_in",), ("next_post", "next_res"), ("x_out", "h_in")], ids=str)
def test_a_gradient_of_none_counts_as_zero(missing):
    inputs = make_fused_inputs((3,), 4, 16)
    out = run_fused(inputs, True, None, OPTIONS)
    up = upstream({k: t for k, t in out.items() if k in UP and k not in missing})
    got = run_fused(inputs, True, up, OPTIONS)
    compare(got, oracle_fused(inputs, True, out["x_out"], up, OPTIONS), EXACT)


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


def test_every_constant_off_its_default():
    options = {
        "norm_eps": 0.3, "hc_eps": 0.07, "post_mult": 3.1, "post_eps": 0.4, "sinkhorn_iters": 3, "sinkhorn_eps": 0.01,
        "sinkhorn_form": "exp",
    }  # fmt: skip
    inputs = make_fused_inputs((4,), 3, 20)
    out = run_fused(inputs, False, None, options)
    up = upstream({k: out[k] for k in UP})
    compare(run_fused(inputs, False, up, options), oracle_fused(inputs, False, out["x_out"], up, options), EXACT)


# --- autograd through the registered op ---------------------------------------------------------------------


def outputs(values, head=False, transpose_res=True):
    tail = HEAD_OPTIONS if head else OPTIONS
    name = "mhc_post_head" if head else "mhc_post_pre"
    return call(name, *values[:4], transpose_res, *values[4:], *tail.values())


def leaves(*args, **kwargs):
    return [t.requires_grad_() for t in make_fused_inputs(*args, **kwargs).values()]


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_gradcheck(head):
    values = leaves((2,), 2, 16, head=head)
    differentiable = 2 if head else 4
    assert torch.autograd.gradcheck(lambda *a: outputs(a, head)[:differentiable], values, fast_mode=True)


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_gradients_of_some_outputs_and_for_some_inputs(head):
    values = leaves((3,), 4, 16, head=head)
    inputs = dict(zip(make_fused_inputs((1,), 4, 16), values, strict=True))
    out = outputs(values, head)
    for k, name in enumerate(UP[: 2 if head else 4]):
        up = {name: torch.ones_like(out[k])}
        got = torch.autograd.grad(out[k].sum(), values, retain_graph=True, allow_unused=True)
        want = oracle_fused(inputs, True, out[0].detach(), up, None if head else OPTIONS)
        for g, key in zip(got, inputs, strict=True):
            error = want[f"d{key}"] if g is None else g - want[f"d{key}"]
            assert float(error.norm()) < EXACT * (1 + float(want[f"d{key}"].norm())), (name, key)
            assert (g is None) == (name == "x_out" and key in ("phi", "alpha", "bias", "gamma"))
    for position in range(len(values)):
        alone = [t.detach() for t in values]
        alone[position].requires_grad_()
        (g,) = torch.autograd.grad(sum(t.sum() for t in outputs(alone, head)), [alone[position]])
        every = torch.autograd.grad(sum(t.sum() for t in outputs(values, head)), values)
        assert torch.equal(g, every[position])


def test_internal_outputs_carry_no_gradient():
    for head in (False, True):
        *_, h_pre, h_mix, inv_rms = outputs(leaves((2,), 4, 16, head=head), head)
        assert not (h_pre.requires_grad or h_mix.requires_grad or inv_rms.requires_grad)
    with pytest.raises(RuntimeError, match="mhc_post_pre has no gradient for its output h_mix"):
        fused.GRADIENTS["mhc_post_pre"][1](None, None, None, None, None, None, h_mix, None)
    with pytest.raises(RuntimeError, match="mhc_post_head has no gradient for its output inv_rms"):
        fused.GRADIENTS["mhc_post_head"][1](None, None, None, None, None, inv_rms)


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_double_backward_is_refused_never_zero(head):
    values = leaves((2,), 4, 16, head=head)
    (first,) = torch.autograd.grad(outputs(values, head)[1].square().sum(), values[0], create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        first.square().sum().backward()


def loss(*values):
    out = outputs(values)
    return sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in out[:4])


@pytest.mark.parametrize("which", ["x", "phi", "both"])
def test_grad_under_vmap_equals_a_loop(which):
    x, *rest = make_fused_inputs((2,), 4, 16).values()
    xs, phis = torch.randn(3, *x.shape, dtype=F64), torch.randn(3, *rest[3].shape, dtype=F64) * 0.1
    args = [xs if which != "phi" else x, *rest]
    args[4] = phis if which != "x" else rest[3]
    dims = [None] * len(args)
    dims[0], dims[4] = (0 if which != "phi" else None), (0 if which != "x" else None)
    got = vmap(grad(loss, argnums=tuple(range(len(args)))), in_dims=tuple(dims))(*args)
    for k in range(3):
        one = [(a if d is None else a[k]).detach().requires_grad_() for a, d in zip(args, dims, strict=True)]
        for g, w in zip(got, torch.autograd.grad(loss(*one), one), strict=True):
            assert relative(g[k], w) < EXACT


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast_inserts_no_casts(dtype):
    values = leaves((4,), 4, 32, dtype)

    def run():
        out = outputs(values)
        return *out, *torch.autograd.grad(sum(t.float().sum() for t in out[:4]), values)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("lead", [(0,), (1,), (), (2, 0), (1, 1, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_no_token_one_token_any_leading_dimensions(lead, dtype, head):
    inputs = make_fused_inputs(lead, 4, 16, dtype, head=head)
    out = run_fused(inputs, True)
    up = upstream({k: t for k, t in out.items() if k in UP})
    got = run_fused(inputs, True, up)
    compare(got, oracle_fused(inputs, True, out["x_out"], up), 2e-5)
    if 0 in lead:
        assert all((got[k] == 0).all() and got[k].numel() for k in ("dphi", "dalpha", "dbias", "dgamma"))


def test_one_trace_serves_every_token_count():
    traces = []

    def backend(module, example):
        traces.append(module)
        return module

    rest = list(make_fused_inputs((1,), 4, 16, F32).values())[4:]
    fn = torch.compile(lambda *post: outputs([*post, *rest]), backend=backend, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 64, 100):
        post = list(make_fused_inputs((2, tokens), 4, 16, F32).values())[:4]
        assert all(torch.equal(a, b) for a, b in zip(fn(*post), outputs([*post, *rest]), strict=True))
    # Batch 2 and T 2 may share one symbol at first: at most one more trace.
    assert len(traces) <= 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_on_the_cpu(dynamic):
    values = leaves((5,), 4, 16, F32)

    def step(*args):
        return outputs(args)[:4]

    compiled = torch.compile(step, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    results = []
    for fn in (step, compiled):
        out = fn(*values)
        results.append([*out, *torch.autograd.grad(sum(t.square().sum() for t in out), values)])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 2e-6


# --- bad input ----------------------------------------------------------------------------------------------

BAD = {
    "x_rank": ("x", lambda t: t[0, 0], ValueError, r"x must have shape \[..., n, D\]"),
    "f_out": ("f_out", lambda t: t[:2], ValueError, r"f_out must have shape .*\[3, 16\], got \[2, 16\]"),
    "h_post": ("h_post", lambda t: t[:, :2], ValueError, r"h_post must have shape .*\[3, 4\], got \[3, 2\]"),
    "h_res": ("h_res", lambda t: t.flatten(-2), ValueError, r"h_res must have shape .*\[3, 4, 4\], got \[3, 16\]"),
    "phi": ("phi", lambda t: t[:3], ValueError, r"phi must have shape .*got \[3, 64\]"),
    "alpha": ("alpha", lambda t: t[:0], ValueError, r"alpha must have shape .*got \[0\]"),
    "bias": ("bias", lambda t: t[1:], ValueError, r"bias must have shape"),
    "gamma": ("gamma", lambda t: t.flatten(), ValueError, r"gamma must have shape .*\[4, 16\], got \[64\]"),
    "integers": ("phi", lambda t: t.int(), TypeError, "phi must be .* got torch.int32"),
    "wide": ("h_res", lambda t: t.double(), TypeError, "h_res may be float64 only where x is"),
    "devices": ("phi", lambda t: t.to("meta"), ValueError, "phi must be on x's device cpu, got meta"),
}


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, head):
    key, change, error, message = BAD[case]
    inputs = make_fused_inputs((3,), 4, 16, F32, head=head)
    inputs[key] = change(inputs[key])
    name = "mhc_post_head" if head else "mhc_post_pre"
    with pytest.raises(error, match=f"{name}: {message}"):
        outputs(list(inputs.values()), head)


@pytest.mark.parametrize(
    ("position", "change", "error", "message"),
    [
        (0, lambda t: t[:1], ValueError, r"dx_out must have shape x's = \[3, 4, 16\], got \[1, 4, 16\]"),
        (1, lambda t: t[..., :8], ValueError, r"dh_in must have shape .*got \[3, 8\]"),
        (2, lambda t: t[:1], ValueError, r"dnext_post must have shape .*got \[1, 4\]"),
        (3, lambda t: t[..., 0], ValueError, r"dnext_res must have shape .*got \[3, 4\]"),
        (9, lambda t: t[:, :2], ValueError, r"x_out must have shape x's = \[3, 4, 16\], got \[3, 2, 16\]"),
        (9, lambda t: t.half(), TypeError, "x_out must have x's dtype torch.float32, got torch.float16"),
        (15, lambda t: t[:1], ValueError, r"next_post must have shape .*got \[1, 4\]"),
    ],
)
def test_bad_input_of_the_backward_op(position, change, error, message):
    inputs = make_fused_inputs((3,), 4, 16, F32)
    out = run_fused(inputs, True)
    values = list(inputs.values())
    saved = [out[k] for k in ("h_pre", "next_post", "h_mix", "inv_rms")]
    args = [*(out[k] for k in UP), *values[:4], True, out["x_out"], *values[4:], *saved, *PRE_OPTIONS.values()]
    OPS.mhc_post_pre_backward(*args)
    args[position] = change(args[position])
    with pytest.raises(error, match=f"mhc_post_pre_backward: {message}"):
        OPS.mhc_post_pre_backward(*args)


def test_bad_input_is_named_at_trace_time():
    values = list(make_fused_inputs((3,), 4, 16, F32).values())
    fn = torch.compile(lambda p: outputs([*values[:4], p, *values[5:]])[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"mhc_post_pre: phi must have shape .*\[24, 64\].*got \[23, 64\]"):
        fn(values[4][:23])
