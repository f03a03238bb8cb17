# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC: the reference against fp64 autograd, the registered ops, the module, compiled graphs, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import mhc_inductor
from mhc_inductor.nn import HyperConnection, expand
from mhc_inductor.nn.mhc import _options
from mhc_inductor.ops import derived, single_pass
from mhc_inductor.ops.registry import call
from tests.oracles import mhc as h
from tests.oracles import single_pass as one
from tests.oracles.mhc import OPS, PRE_OPTIONS, compare, relative, upstream

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = 1e-12
OPTIONS = {**PRE_OPTIONS, "sinkhorn_iters": 2}


# --- the specification --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("transpose_res", [False, True], ids=["R", "RT"])
@pytest.mark.parametrize("made", [{}, {"residual": False}, {"full": False}, {"gamma": False}], ids=str)
def test_gradients_against_fp64_autograd(n, transpose_res, made):
    inputs = one.make_inputs((3,), n, 20, **made)
    options = {"sinkhorn_iters": 0 if "full" in made else 2}
    out = one.run(inputs, transpose_res, None, options)
    up = upstream({k: out[k] for k in one.UP if out[k].numel()})
    got = one.run(inputs, transpose_res, up, options)
    errors = compare(got, one.oracle(inputs, transpose_res, out["x_out"], up, options), EXACT)
    assert {f"d{k}" for k, t in inputs.items() if t is not None} <= errors.keys()


@pytest.mark.parametrize("missing", [("x_out",), ("h_in",), ("next_pre",), one.UP[2:], one.UP[:2]], ids=str)
def test_a_gradient_of_none_counts_as_zero(missing):
    inputs = one.make_inputs((3,), 4, 16)
    out = one.run(inputs, True, None, OPTIONS)
    up = upstream({k: out[k] for k in one.UP if k not in missing})
    compare(one.run(inputs, True, up, OPTIONS), one.oracle(inputs, True, out["x_out"], up, OPTIONS), EXACT)


def test_every_constant_off_its_default():
    options = {
        "norm_eps": 0.3, "hc_eps": 0.07, "post_mult": 3.1, "post_eps": 0.4, "sinkhorn_iters": 3, "sinkhorn_eps": 0.01,
        "sinkhorn_form": "exp",
    }  # fmt: skip
    inputs = one.make_inputs((4,), 3, 20)
    out = one.run(inputs, False, None, options)
    up = upstream({k: out[k] for k in one.UP})
    compare(one.run(inputs, False, up, options), one.oracle(inputs, False, out["x_out"], up, options), EXACT)
    alone = h.make_inputs((4,), 3, 20)
    up = upstream({k: v for k, v in one.run_coefficients(alone, None, options).items() if k in one.COEFFICIENTS[:3]})
    got = one.run_coefficients(alone, up, options, torch.ones_like(alone["x"]))
    want = one.oracle_coefficients(alone, up, options)
    compare({**got, "dx": got["dx"] - 1}, want, EXACT)


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


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda *a: outputs(a)[:5], leaves((2,), 2, 16), fast_mode=True)
    values = [t.requires_grad_() for t in h.make_inputs((2,), 2, 16).values()]
    assert torch.autograd.gradcheck(
        lambda *a: mhc_inductor.mhc_coefficients(*a, sinkhorn_iters=2), values, fast_mode=True
    )
    values = [values[0], torch.randn(2, 2, dtype=F64, requires_grad=True)]
    assert torch.autograd.gradcheck(mhc_inductor.mhc_collapse, values, fast_mode=True)


def test_gradients_of_some_outputs_and_for_some_inputs():
    values = leaves((3,), 4, 16)
    inputs = dict(zip((*one.SITE, *one.PARAMS), values, strict=True))
    out = outputs(values)
    for k, name in enumerate(one.UP):
        up = {name: torch.ones_like(out[k])}
        got = torch.autograd.grad(out[k].sum(), values, retain_graph=True, allow_unused=True)
        want = one.oracle(inputs, True, out[0].detach(), up, OPTIONS)
        for g, key in zip(got, inputs, strict=True):
            error = want[f"d{key}"] if g is None else g - want[f"d{key}"]
            assert float(error.norm()) < EXACT * (1 + float(want[f"d{key}"].norm())), (name, key)
            # As between separate ops: what an output does not read has no gradient, not zeros.
            unread = key in one.PARAMS if name in one.UP[:2] else False
            assert (g is None) == (unread or (key == "h_pre" and name != "h_in")), (name, key)
    for position in range(len(values)):
        alone = [t.detach() for t in values]
        alone[position].requires_grad_()
        (g,) = torch.autograd.grad(sum(t.sum() for t in outputs(alone)), [alone[position]])
        every = torch.autograd.grad(sum(t.sum() for t in outputs(values)), values)
        assert torch.equal(g, every[position])


def test_internal_outputs_carry_no_gradient():
    *_, h_mix, inv_rms = outputs(leaves((2,), 4, 16))
    assert not (h_mix.requires_grad or inv_rms.requires_grad)
    with pytest.raises(RuntimeError, match="mhc_single_pass has no gradient for its output h_mix"):
        single_pass._single_pass_grad(None, None, None, None, None, None, h_mix, None)
    with pytest.raises(RuntimeError, match="mhc_coefficients has no gradient for its output inv_rms"):
        derived.gradient("mhc_coefficients")[1](None, None, None, None, None, inv_rms)


@pytest.mark.parametrize("name", ["mhc_single_pass", "mhc_coefficients", "mhc_collapse"])
def test_double_backward_is_refused_never_zero(name):
    x, *rest = leaves((2,), 4, 16)
    out = {
        "mhc_single_pass": lambda: outputs([x, *rest])[1],
        "mhc_coefficients": lambda: mhc_inductor.mhc_coefficients(x, *rest[4:])[0],
        "mhc_collapse": lambda: mhc_inductor.mhc_collapse(x, rest[3]),
    }[name]()
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        first.square().sum().backward()


def loss(*values):
    out = outputs(values)
    return sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in out[:5])


@pytest.mark.parametrize("which", ["x", "phi", "both"])
def test_grad_under_vmap_equals_a_loop(which):
    args = list(one.make_inputs((2,), 4, 16).values())
    dims = [None] * len(args)
    for at, name in ((0, "x"), (5, "phi")):
        if which in (name, "both"):
            args[at], dims[at] = torch.randn(3, *args[at].shape, dtype=F64) * 0.1, 0
    got = vmap(grad(loss, argnums=tuple(range(len(args)))), in_dims=tuple(dims))(*args)
    for k in range(3):
        each = [(a if d is None else a[k]).detach().requires_grad_() for a, d in zip(args, dims, strict=True)]
        for g, w in zip(got, torch.autograd.grad(loss(*each), each), strict=True):
            assert relative(g[k], w) < EXACT


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast_inserts_no_casts(dtype):
    values = leaves((4,), 4, 32, dtype)

    def run():
        out = outputs(values)
        return *out, *torch.autograd.grad(sum(t.float().sum() for t in out[:5]), values)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("lead", [(0,), (1,), (), (2, 0), (1, 1, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_token_one_token_any_leading_dimensions(lead, dtype):
    inputs = one.make_inputs(lead, 4, 16, dtype)
    out = one.run(inputs, True)
    up = upstream({k: out[k] for k in one.UP})
    got = one.run(inputs, True, up)
    compare(got, one.oracle(inputs, True, out["x_out"], up), 2e-5)
    if 0 in lead:
        assert all((got[k] == 0).all() and got[k].numel() for k in ("dphi", "dalpha", "dbias", "dgamma"))


def test_one_trace_serves_every_token_count():
    traces = []

    def backend(module, example):
        traces.append(module)
        return module

    rest = list(one.make_inputs((1,), 4, 16, F32).values())[5:]
    fn = torch.compile(lambda *site: outputs([*site, *rest]), backend=backend, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 64, 100):
        site = list(one.make_inputs((2, tokens), 4, 16, F32).values())[:5]
        assert all(torch.equal(a, b) for a, b in zip(fn(*site), outputs([*site, *rest]), strict=True))
    # Batch 2 and T 2 may share one symbol at first: at most one more trace.
    assert len(traces) <= 2


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


# --- bad input ----------------------------------------------------------------------------------------------

BAD = {
    "x_rank": ("x", lambda t: t[0, 0], ValueError, r"x must have shape \[..., n, D\]"),
    "f_out": ("f_out", lambda t: t[:2], ValueError, r"f_out must have shape .*\[3, 16\], got \[2, 16\]"),
    "h_post": ("h_post", lambda t: t[:, :2], ValueError, r"h_post must have shape .*\[3, 4\], got \[3, 2\]"),
    "h_res": ("h_res", lambda t: t.flatten(-2), ValueError, r"h_res must have shape .*\[3, 4, 4\], got \[3, 16\]"),
    "h_pre": ("h_pre", lambda t: t[:, :3], ValueError, r"h_pre must have shape .*\[3, 4\], got \[3, 3\]"),
    "h_pre_kind": ("h_pre", lambda t: t.int(), TypeError, "h_pre must be .* got torch.int32"),
    "h_pre_wide": ("h_pre", lambda t: t.double(), TypeError, "h_pre may be float64 only where x is"),
    "phi": ("phi", lambda t: t[:3], ValueError, r"phi must have shape .*got \[3, 64\]"),
    "gamma": ("gamma", lambda t: t.flatten(), ValueError, r"gamma must have shape .*\[4, 16\], got \[64\]"),
    "devices": ("h_pre", lambda t: t.to("meta"), ValueError, "h_pre must be on x's device cpu, got meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    key, change, error, message = BAD[case]
    inputs = one.make_inputs((3,), 4, 16, F32)
    inputs[key] = change(inputs[key])
    with pytest.raises(error, match=f"mhc_single_pass: {message}"):
        outputs(list(inputs.values()))


@pytest.mark.parametrize(
    ("position", "change", "error", "message"),
    [
        (0, lambda t: t[:1], ValueError, r"dx_out must have shape x's = \[3, 4, 16\], got \[1, 4, 16\]"),
        (1, lambda t: t[..., :8], ValueError, r"dh_in must have shape .*got \[3, 8\]"),
        (2, lambda t: t[:1], ValueError, r"dnext_pre must have shape .*got \[1, 4\]"),
        (4, lambda t: t[..., 0], ValueError, r"dnext_res must have shape .*got \[3, 4\]"),
        (9, lambda t: t[..., None], ValueError, r"h_pre must have shape .*got \[3, 4, 1\]"),
        (11, lambda t: t.half(), TypeError, "x_out must have x's dtype torch.float32, got torch.float16"),
        (16, lambda t: t[:1], ValueError, r"next_pre must have shape .*got \[1, 4\]"),
        (17, lambda t: t[:1], ValueError, r"next_post must have shape .*got \[1, 4\]"),
    ],
)
def test_bad_input_of_the_backward_op(position, change, error, message):
    inputs = one.make_inputs((3,), 4, 16, F32)
    out = one.run(inputs, True)
    values = list(inputs.values())
    saved = [out[k] for k in ("next_pre", "next_post", "h_mix", "inv_rms")]
    args = [*(out[k] for k in one.UP), *values[:5], True, out["x_out"], *values[5:], *saved, *PRE_OPTIONS.values()]
    OPS.mhc_single_pass_backward(*args)
    args[position] = change(args[position])
    with pytest.raises(error, match=f"mhc_single_pass_backward: {message}"):
        OPS.mhc_single_pass_backward(*args)


def test_bad_input_of_the_parts():
    x, h_pre = torch.ones(3, 4, 16), torch.ones(3, 4)
    for args, error, message in [
        ((x, h_pre[:2]), ValueError, r"h_pre must have shape .*\[3, 4\], got \[2, 4\]"),
        ((x[0, 0], h_pre), ValueError, r"x must have shape \[..., n, D\]"),
        ((x, None), TypeError, "h_pre must be a tensor, got NoneType"),
        ((x, h_pre.double()), TypeError, "h_pre may be float64 only where x is"),
    ]:
        with pytest.raises(error, match=f"mhc_collapse: {message}"):
            mhc_inductor.mhc_collapse(*args)
    with pytest.raises(ValueError, match="mhc_collapse_backward: dh_in must have shape"):
        OPS.mhc_collapse_backward(x[..., 0], x, h_pre)
    values = list(h.make_inputs((3,), 4, 16, F32).values())
    with pytest.raises(ValueError, match="mhc_coefficients: post_mult must be above 0"):
        mhc_inductor.mhc_coefficients(*values, post_mult=0.0)


def test_bad_input_is_named_at_trace_time():
    values = list(one.make_inputs((3,), 4, 16, F32).values())
    fn = torch.compile(lambda w: outputs([*values[:4], w, *values[5:]])[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"mhc_single_pass: h_pre must have shape .*\[3, 4\].*got \[3, 3\]"):
        fn(values[4][:, :3])
