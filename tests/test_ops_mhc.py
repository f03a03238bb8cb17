# SPDX-License-Identifier: Apache-2.0
"""The registered ops and the public functions: opcheck, gradients, validation, vmap, autocast, odd shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.ops import checks, derived, registry
from mhc_inductor.reference import mhc as reference
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    OPS,
    PRE_OPTIONS,
    compare,
    make_fused_inputs,
    make_inputs,
    make_post_inputs,
    oracle_head,
    oracle_post,
    oracle_pre,
    oracle_sinkhorn,
    relative,
    run_head,
    run_post,
    run_pre,
    upstream,
)
from tests.oracles.op_contract import check_outputs, op, trainable
from tests.tools.deterministic import deterministic_algorithms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ACCURATE = 2e-5  # parameter gradients against fp64


# --- samples of every op ------------------------------------------------------------------------------------


def pre_sample(full=True, gamma=True, iters=0, form="softmax", dtype=F32, lead=(2, 3), n=4, **more):
    inputs = make_inputs(lead, n, 16, dtype, full=full, gamma=gamma, **more)
    options = {**PRE_OPTIONS, "sinkhorn_iters": iters, "sinkhorn_form": form, "post_eps": 0.01}
    return (*inputs.values(), *options.values())


def pre_backward_sample(drop=(), acc=False, **kwargs):
    args = pre_sample(**kwargs)
    h_in, h_post, h_res, h_pre, h_mix, inv_rms = OPS.mhc_pre(*args)
    ups = [None if k in drop else torch.randn_like(t) for k, t in enumerate((h_in, h_post, h_res))]
    dx_acc = torch.randn_like(args[0]) if acc else None
    return (*ups, *args[:5], h_pre, h_post, h_mix, inv_rms, dx_acc, *args[5:])


def head_sample(gamma=True, dtype=F32, **kwargs):
    return (
        *make_inputs((2, 3), 4, 16, dtype, head=True, gamma=gamma, **kwargs).values(),
        *HEAD_OPTIONS.values(),
    )


def head_backward_sample(acc=False, **kwargs):
    args = head_sample(**kwargs)
    h_in, *saved = OPS.mhc_head(*args)
    return (torch.randn_like(h_in), *args[:5], *saved, torch.randn_like(args[0]) if acc else None, *args[5:])


def post_sample(transpose=False, **kwargs):
    return (*make_post_inputs((2, 3), 4, 16, **kwargs).values(), transpose)


def post_backward_sample(**kwargs):
    args = post_sample(**kwargs)
    return (torch.randn_like(args[0]), *args)


def sinkhorn_sample(iters=3, form="softmax", dtype=F32):
    return (torch.randn(2, 3, 4, 4).to(dtype), iters, 1e-6, form)


def sinkhorn_backward_sample(**kwargs):
    args = sinkhorn_sample(**kwargs)
    return (torch.randn_like(args[0]), *args)


def fused_sample(head=False, transpose=True, dtype=F32, iters=0, **kwargs):
    inputs = make_fused_inputs((2, 3), 4, 16, dtype, head=head, **kwargs)
    options = HEAD_OPTIONS if head else {**PRE_OPTIONS, "sinkhorn_iters": iters, "post_eps": 0.01}
    tensors = list(inputs.values())
    return (*tensors[:4], transpose, *tensors[4:], *options.values())


def fused_backward_sample(drop=(), head=False, **kwargs):
    args = fused_sample(head=head, **kwargs)
    x_out, h_in, *rest = (OPS.mhc_post_head if head else OPS.mhc_post_pre)(*args)
    outs = (x_out, h_in) if head else (x_out, h_in, *rest[:2])
    saved = rest if head else (rest[2], rest[0], *rest[3:])
    ups = [None if k in drop else torch.randn_like(t) for k, t in enumerate(outs)]
    return (*ups, *args[:5], x_out, *args[5:9], *saved, *args[9:])


def coefficients_backward_sample(drop=(), acc=False, **kwargs):
    args = pre_sample(**kwargs)
    h_pre, h_post, h_res, h_mix, inv_rms = OPS.mhc_coefficients(*args)
    ups = [None if k in drop else torch.randn_like(t) for k, t in enumerate((h_pre, h_post, h_res))]
    dx_acc = torch.randn_like(args[0]) if acc else None
    return (*ups, *args[:5], h_pre, h_post, h_mix, inv_rms, dx_acc, *args[5:])


def collapse_sample(dtype=F32, h_dtype=None, lead=(2, 3), n=4):
    inputs = make_post_inputs(lead, n, 16, dtype, h_dtype=h_dtype)
    return inputs["x"], inputs["h_post"]


def collapse_backward_sample(**kwargs):
    x, h_pre = collapse_sample(**kwargs)
    return torch.randn_like(x[..., 0, :]), x, h_pre


def single_pass_sample(lead=(2, 3), n=4, **kwargs):
    """Returns a fused sample with the weights of the collapse among the inputs of post."""
    dtype = kwargs.get("dtype", F32)
    weights = torch.rand(*lead, n, dtype=F64).to(F64 if dtype is F64 else F32)
    args = fused_sample(**kwargs)
    return (*args[:4], weights, *args[4:])


def single_pass_backward_sample(drop=(), **kwargs):
    args = single_pass_sample(**kwargs)
    x_out, *outs, h_mix, inv_rms = OPS.mhc_single_pass(*args)
    ups = [None if k in drop else torch.randn_like(t) for k, t in enumerate((x_out, *outs))]
    return (*ups, *args[:6], x_out, *args[6:10], *outs[1:3], h_mix, inv_rms, *args[10:])


FUSED_VARIANTS = {
    "full": {"iters": 2},
    "2n_none": {"full": False, "residual": False, "gamma": False},
    "bf16": {"dtype": BF16, "transpose": False, "gamma": False},
    "fp64": {"dtype": F64, "iters": 2},
}
PRE_VARIANTS = {
    "full": {},
    "plain": {"gamma": False},
    "2n": {"full": False},
    "softmax": {"iters": 3},
    "exp_bf16": {"iters": 3, "form": "exp", "dtype": BF16},
    "exp_eps": {"iters": 3, "form": "exp_eps"},
    "bf16_params": {"dtype": BF16, "param_dtype": BF16, "gamma": False},
    "fp64": {"dtype": F64, "iters": 2},
}
SAMPLES = [
    *[pytest.param("mhc_pre", pre_sample, v, id=f"pre-{k}") for k, v in PRE_VARIANTS.items()],
    *[
        pytest.param("mhc_pre_backward", pre_backward_sample, v, id=f"pre_backward-{k}")
        for k, v in PRE_VARIANTS.items()
    ],
    pytest.param("mhc_pre_backward", pre_backward_sample, {"drop": (0, 2), "acc": True}, id="pre_backward-none-acc"),
    pytest.param("mhc_head", head_sample, {}, id="head"),
    pytest.param("mhc_head", head_sample, {"gamma": False, "dtype": BF16}, id="head-bf16"),
    pytest.param("mhc_head_backward", head_backward_sample, {"acc": True}, id="head_backward"),
    pytest.param("mhc_head_backward", head_backward_sample, {"gamma": False, "dtype": BF16}, id="head_backward-bf16"),
    pytest.param("mhc_post", post_sample, {"dtype": F32}, id="post"),
    pytest.param("mhc_post", post_sample, {"dtype": BF16, "transpose": True}, id="post-bf16"),
    pytest.param("mhc_post", post_sample, {"dtype": F32, "residual": False}, id="post-none"),
    pytest.param("mhc_post_backward", post_backward_sample, {"dtype": F32, "transpose": True}, id="post_backward"),
    pytest.param("mhc_post_backward", post_backward_sample, {"dtype": BF16}, id="post_backward-bf16"),
    pytest.param(
        "mhc_post_backward", post_backward_sample, {"dtype": BF16, "residual": False}, id="post_backward-none"
    ),
    *[
        pytest.param(f"mhc_post_{op}", fused_sample, {**v, "head": op == "head"}, id=f"post_{op}-{k}")
        for op in ("pre", "head")
        for k, v in FUSED_VARIANTS.items()
    ],
    *[
        pytest.param(f"mhc_post_{op}_backward", fused_backward_sample, {**v, "head": op == "head"}, id=f"{op}_grad-{k}")
        for op in ("pre", "head")
        for k, v in {**FUSED_VARIANTS, "no_dx_out": {"drop": (0,)}, "no_dh_in": {"drop": (1,)}}.items()
    ],
    *[pytest.param("mhc_coefficients", pre_sample, v, id=f"coefficients-{k}") for k, v in PRE_VARIANTS.items()],
    *[
        pytest.param("mhc_coefficients_backward", coefficients_backward_sample, v, id=f"coefficients_backward-{k}")
        for k, v in {**PRE_VARIANTS, "none-acc": {"drop": (0, 2), "acc": True}}.items()
    ],
    *[
        pytest.param(f"mhc_collapse{suffix}", sample, {"dtype": dtype, "h_dtype": h_dtype}, id=f"collapse{suffix}-{k}")
        for suffix, sample in (("", collapse_sample), ("_backward", collapse_backward_sample))
        for k, (dtype, h_dtype) in {"fp32": (F32, F32), "bf16": (BF16, F32), "low": (BF16, BF16)}.items()
    ],
    *[pytest.param("mhc_single_pass", single_pass_sample, v, id=f"single_pass-{k}") for k, v in FUSED_VARIANTS.items()],
    *[
        pytest.param("mhc_single_pass_backward", single_pass_backward_sample, v, id=f"single_pass_backward-{k}")
        for k, v in {
            **FUSED_VARIANTS,
            "no_dx_out": {"drop": (0,)},
            "no_dh_in": {"drop": (1,)},
            "dh_in": {"drop": (0, 2, 3, 4)},
        }.items()
    ],
    pytest.param("mhc_sinkhorn", sinkhorn_sample, {}, id="sinkhorn"),
    pytest.param("mhc_sinkhorn", sinkhorn_sample, {"iters": 0}, id="sinkhorn-0"),
    pytest.param("mhc_sinkhorn", sinkhorn_sample, {"form": "exp", "dtype": BF16}, id="sinkhorn-exp-bf16"),
    pytest.param("mhc_sinkhorn_backward", sinkhorn_backward_sample, {}, id="sinkhorn_backward"),
    pytest.param("mhc_sinkhorn_backward", sinkhorn_backward_sample, {"iters": 0}, id="sinkhorn_backward-0"),
    pytest.param("mhc_sinkhorn_backward", sinkhorn_backward_sample, {"form": "exp"}, id="sinkhorn_backward-exp"),
    pytest.param("mhc_sinkhorn", sinkhorn_sample, {"form": "exp_eps"}, id="sinkhorn-exp_eps"),
    pytest.param(
        "mhc_sinkhorn_backward", sinkhorn_backward_sample, {"form": "exp_eps"}, id="sinkhorn_backward-exp_eps"
    ),
]


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    # A backward op raises when differentiated, by design, so only forward ops are checked with gradients.
    opcheck(op(name), args if name.endswith("_backward") else trainable(args))


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    torch.manual_seed(0)  # dalpha is a sum that may cancel: with other inputs each time, one in 40 misses the bound
    check_outputs(name, sample(**variant), relative, 2e-5)


def test_every_op_is_sampled():
    assert {p.values[0] for p in SAMPLES} == {name for name in registry.REFERENCE if name.startswith("mhc_")}


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [True, False], ids=["full", "2n"])
def test_gradcheck_pre(full):
    args = pre_sample(full=full, iters=2 if full else 0, dtype=F64, lead=(2,), n=2)
    options = dict(zip(PRE_OPTIONS, args[5:], strict=True))
    inputs = [t.requires_grad_() for t in args[:5]]

    def fn(*a):
        return tuple(t for t in mhc_inductor.mhc_pre(*a, **options) if t is not None)

    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


def test_gradcheck_post_sinkhorn_head():
    post = [t.requires_grad_() for t in make_post_inputs((2,), 2, 16).values()]
    for transpose in (False, True):
        fn = lambda *a, t=transpose: mhc_inductor.mhc_post(*a, transpose_res=t)  # noqa: E731
        assert torch.autograd.gradcheck(fn, post, fast_mode=True)
    logits = torch.randn(2, 3, 3, dtype=F64, requires_grad=True)
    for form in ("softmax", "exp", "exp_eps"):
        assert torch.autograd.gradcheck(lambda t, f=form: mhc_inductor.mhc_sinkhorn(t, 3, 1e-3, f), [logits])
    head = [t.requires_grad_() for t in make_inputs((2,), 2, 16, head=True).values()]
    assert torch.autograd.gradcheck(lambda *a: mhc_inductor.mhc_head(*a), head, fast_mode=True)


def loss_of(x, phi, alpha, bias, gamma):
    """Computes a layer and a loss in which every output has a different weight."""
    h_in, h_post, h_res = mhc_inductor.mhc_pre(x, phi, alpha, bias, gamma, sinkhorn_iters=2)
    out = mhc_inductor.mhc_post(x, h_in.sin(), h_post, h_res, transpose_res=True)
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def test_gradient_of_a_layer_against_fp64_autograd():
    inputs = make_inputs((3,), 4, 16)
    params = [t.requires_grad_() for t in inputs.values()]
    got = torch.autograd.grad(loss_of(*params), params)
    plain = [t.detach().requires_grad_() for t in params]
    h_in, h_post, h_res = reference.mhc_pre(*plain, *{**PRE_OPTIONS, "sinkhorn_iters": 2}.values())[:3]
    out = reference.mhc_post(plain[0], h_in.sin(), h_post, h_res, True)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=F64).view_as(out)).sum()
    for g, w in zip(got, torch.autograd.grad(loss, plain), strict=True):
        assert relative(g, w) < 1e-12


@pytest.mark.parametrize("position", range(5))
def test_only_the_wanted_gradient(position):
    values = list(make_inputs((3,), 4, 16).values())
    every = torch.autograd.grad(loss_of(*[t.requires_grad_() for t in values]), values)
    values = [t.detach() for t in values]
    values[position].requires_grad_()
    loss_of(*values).backward()
    assert torch.equal(values[position].grad, every[position])
    assert all(t.grad is None for k, t in enumerate(values) if k != position)


def test_gradients_that_do_not_arrive_count_as_zero():
    inputs = make_inputs((3,), 4, 16)
    values = [t.requires_grad_() for t in inputs.values()]
    outputs = mhc_inductor.mhc_pre(*values)
    for k, name in enumerate(("h_in", "h_post", "h_res")):
        got = torch.autograd.grad(outputs[k].sum(), values, retain_graph=True)
        want = oracle_pre(inputs, {name: torch.ones_like(outputs[k])})
        for t, key in zip(got, ("dx", "dphi", "dalpha", "dbias", "dgamma"), strict=True):
            assert float((t - want[key]).norm()) < 1e-12 * (1 + float(want[key].norm()))


def test_internal_outputs_carry_no_gradient():
    *_, h_pre, h_mix, inv_rms = OPS.mhc_pre(*trainable(pre_sample()))
    assert not (h_pre.requires_grad or h_mix.requires_grad or inv_rms.requires_grad)
    ctx = type("Ctx", (), {"needs_input_grad": (True,)})()
    with pytest.raises(RuntimeError, match="mhc_pre has no gradient for its output h_mix"):
        derived.gradient("mhc_pre")[1](ctx, None, None, None, None, h_mix, None)
    with pytest.raises(RuntimeError, match="mhc_head has no gradient for its output inv_rms"):
        derived.gradient("mhc_head")[1](ctx, None, None, None, inv_rms)


DOUBLE = {
    "pre": (lambda x: mhc_inductor.mhc_pre(x, *list(make_inputs((3,), 4, 16).values())[1:])[0], (3, 4, 16)),
    "head": (
        lambda x: mhc_inductor.mhc_head(x, *list(make_inputs((), 4, 16, head=True).values())[1:]),
        (3, 4, 16),
    ),
    "sinkhorn": (lambda x: mhc_inductor.mhc_sinkhorn(x), (3, 4, 4)),
    "post": (
        lambda h: mhc_inductor.mhc_post(
            torch.ones(3, 4, 16).double().requires_grad_(),
            torch.ones(3, 16).double(),
            h.sum(-1),
            h,
            transpose_res=True,
        ),
        (3, 4, 4),
    ),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_double_backward_is_refused_never_zero(name):
    fn, shape = DOUBLE[name]
    t = torch.randn(shape, dtype=F64, requires_grad=True)
    (first,) = torch.autograd.grad(fn(t).square().sum(), t, create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        first.square().sum().backward()


def test_double_backward_is_refused_in_torch_func():
    x, *rest = make_inputs((3,), 4, 16).values()
    inner = lambda t: grad(loss_of)(t, *rest).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad(inner)(x)


# --- shapes, dtypes, strides --------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(0,), (1,), (), (2, 0), (1, 1, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_token_one_token_any_leading_dimensions(lead, dtype):
    inputs = make_inputs(lead, 4, 16, dtype)
    up = upstream({k: t for k, t in run_pre(inputs).items() if k in ("h_in", "h_post", "h_res")})
    got = run_pre(inputs, up)
    compare(got, oracle_pre(inputs, up), ACCURATE)
    if 0 in lead:
        assert all((got[k] == 0).all() and got[k].numel() for k in ("dphi", "dalpha", "dbias", "dgamma"))
    head = make_inputs(lead, 4, 16, dtype, head=True)
    up = upstream({"h_in": run_head(head)["h_in"]})
    compare(run_head(head, up), oracle_head(head, up), ACCURATE)
    post = make_post_inputs(lead, 4, 16, dtype)
    g = torch.randn(*lead, 4, 16).to(dtype)
    compare(run_post(post, True, g), oracle_post(post, True, g), ACCURATE)
    assert mhc_inductor.mhc_sinkhorn(post["h_res"]).shape == (*lead, 4, 4)


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


def batches(name, sample, variant, dims):
    """Returns three samples, each tensor stacked along its dim or shared, and the results of a loop over them."""
    rows = []
    for k in range(3):
        torch.manual_seed(k)
        rows.append([a + 0.1 * torch.randn_like(a) if isinstance(a, torch.Tensor) else a for a in sample(**variant)])
    first = next(k for k, a in enumerate(rows[0]) if isinstance(a, torch.Tensor))
    in_dims = [dims(k == first, a) if isinstance(a, torch.Tensor) else None for k, a in enumerate(rows[0])]
    for row in rows[1:]:
        for k, dim in enumerate(in_dims):
            if dim is None:
                row[k] = rows[0][k]
    stacked = [
        a if d is None else torch.stack([r[k] for r in rows], d)
        for k, (a, d) in enumerate(zip(rows[0], in_dims, strict=True))
    ]
    out = [op(name)(*row) for row in rows]
    out = [(o,) if isinstance(o, torch.Tensor) else o for o in out]
    return stacked, tuple(in_dims), [torch.stack(column) for column in zip(*out, strict=True)]


# Which tensors have a batch: all; only the first (x, or a gradient), in the last dimension; all but the first.
BATCHED = {
    "all": lambda first, a: 0,
    "first_last_dim": lambda first, a: a.dim() if first else None,
    "others": lambda first, a: None if first else min(1, a.dim()),
}
VMAPPED = [
    pytest.param(*p.values, which, id=f"{p.id}-{which}")
    for p in SAMPLES
    for which in BATCHED
    if p.values[2].get("dtype") is not BF16 and (p.values[0], which) != ("mhc_sinkhorn", "others")
]


@pytest.mark.parametrize(("name", "sample", "variant", "which"), VMAPPED)
def test_vmap_equals_a_loop(name, sample, variant, which):
    stacked, in_dims, want = batches(name, sample, variant, BATCHED[which])
    got = vmap(op(name), in_dims=in_dims)(*stacked)
    got = (got,) if isinstance(got, torch.Tensor) else got
    for g, w in zip(got, want, strict=True):
        if g.numel() or w.numel():
            assert relative(g, w) < 1e-5


@pytest.mark.parametrize("which", ["x", "phi", "both"])
def test_grad_under_vmap_equals_a_loop(which):
    x, *params = make_inputs((2,), 4, 16).values()
    xs, phis = torch.randn(3, *x.shape, dtype=F64), torch.randn(3, *params[0].shape, dtype=F64) * 0.1
    dims = (0 if which != "phi" else None, 0 if which != "x" else None, None, None, None)
    args = (xs if which != "phi" else x, phis if which != "x" else params[0], *params[1:])
    fn = grad(loss_of, argnums=(0, 1, 2, 3, 4))
    got = vmap(fn, in_dims=dims)(*args)
    for k in range(3):
        one = [a if d is None else a[k] for a, d in zip(args, dims, strict=True)]
        leaf = [t.detach().requires_grad_() for t in one]
        want = torch.autograd.grad(loss_of(*leaf), leaf)
        for g, w in zip(got, want, strict=True):
            assert relative(g[k], w) < 1e-12


def test_grad_of_vmap_and_jacrev():
    x, phi, *rest = make_inputs((2,), 4, 16).values()
    xs = torch.randn(3, *x.shape, dtype=F64)
    got = grad(lambda p: vmap(lambda t: loss_of(t, p, *rest))(xs).sum())(phi)
    want = sum(grad(loss_of, argnums=1)(t, phi, *rest) for t in xs)
    assert relative(got, want) < 1e-12
    jac = torch.func.jacrev(lambda a: mhc_inductor.mhc_pre(x, phi, a, *rest[1:])[1])(rest[0])
    assert jac.shape == (2, 4, 3) and float(jac[..., 0].norm()) == 0 and float(jac[..., 1].norm()) > 0


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_autocast_inserts_no_casts(dtype):
    values = [t.requires_grad_() for t in make_inputs((4,), 4, 32, dtype).values()]

    def run():
        h_in, h_post, h_res = mhc_inductor.mhc_pre(*values, sinkhorn_iters=3)
        out = mhc_inductor.mhc_post(values[0], h_in, h_post, h_res, transpose_res=False)
        head = mhc_inductor.mhc_head(out, values[1][:4], values[2][:1], values[3][:4])
        return out, head, mhc_inductor.mhc_sinkhorn(h_res, 2), *torch.autograd.grad(out.float().sum(), values)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_deterministic_algorithms_give_equal_bits():
    values = [t.requires_grad_() for t in make_inputs((64,), 4, 32, BF16).values()]
    with deterministic_algorithms():
        runs = []
        for _ in range(2):
            out = mhc_inductor.mhc_pre(*values, sinkhorn_iters=3)
            runs.append([*out, *torch.autograd.grad(sum(t.float().sum() for t in out), values)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- compilation: traces, checks at trace time, no needless guards ------------------------------------------


def test_one_trace_serves_every_token_count():
    traces = []

    def backend(module, example):
        traces.append(module)
        return module

    params = list(make_inputs((1,), 4, 16, F32).values())[1:]

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def layer(x):
        h_in, h_post, h_res = mhc_inductor.mhc_pre(x, *params, sinkhorn_iters=2)
        return mhc_inductor.mhc_post(x, h_in, h_post, h_res, transpose_res=True)

    for tokens in (2, 3, 64, 100):
        x = torch.randn(2, tokens, 4, 16)
        h_in, h_post, h_res = mhc_inductor.mhc_pre(x, *params, sinkhorn_iters=2)
        assert torch.equal(layer(x), mhc_inductor.mhc_post(x, h_in, h_post, h_res, transpose_res=True))
    # Batch 2 and T 2 may share one symbol at first: at most one more trace.
    assert len(traces) <= 2


def test_bad_input_is_named_at_trace_time():
    x, phi, alpha, bias, gamma = make_inputs((3,), 4, 16, F32).values()
    fn = torch.compile(lambda p: mhc_inductor.mhc_pre(x, p, alpha, bias, gamma)[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"phi must have shape .*\[24, 64\].*got \[23, 64\]"):
        fn(phi[:23])


# --- bad input ----------------------------------------------------------------------------------------------


def bad_pre(**change):
    values = make_inputs((3,), 4, 16, F32)
    options = {k: change.pop(k) for k in list(change) if k in PRE_OPTIONS}
    for key, fn in change.items():
        values[key] = fn(values[key])
    return mhc_inductor.mhc_pre(*values.values(), **options)


BAD_PRE = {
    "rank": ({"x": lambda x: x[0, 0]}, ValueError, r"x must have shape \[..., n, D\], got \[16\]"),
    "n_1": ({"x": lambda x: x[:, :1]}, ValueError, "x.* must hold 2 to 8 streams .*got 1"),
    "n_9": ({"x": lambda x: torch.randn(3, 9, 16)}, ValueError, "x.* must hold 2 to 8 streams .*got 9"),
    "D_15": ({"x": lambda x: x[..., :15]}, ValueError, "x must have a width D of at least 16, got"),
    "phi_rows": (
        {"phi": lambda p: p[:20]},
        ValueError,
        r"phi must .*\[24, 64\] or .*\[8, 64\], got \[20, 64\]",
    ),
    "phi_columns": ({"phi": lambda p: p[:, :63]}, ValueError, r"phi must .*got \[24, 63\]"),
    "phi_rank": ({"phi": lambda p: p[0]}, ValueError, r"phi must .*got \[64\]"),
    "phi_of_a_head": ({"phi": lambda p: p[:4]}, ValueError, r"phi must .*got \[4, 64\]"),
    "alpha": ({"alpha": lambda a: a[:2]}, ValueError, r"alpha must have shape .*\[3\], got \[2\]"),
    "bias": ({"bias": lambda b: b[:8]}, ValueError, r"bias must have shape .*\[24\], got \[8\]"),
    "gamma_flat": (
        {"gamma": lambda g: g.flatten()},
        ValueError,
        r"gamma must have shape .*\[4, 16\], got \[64\]",
    ),
    "gamma": ({"gamma": lambda g: g[:, :8]}, ValueError, r"gamma must have shape .*\[4, 16\], got \[4, 8\]"),
    "integer_x": ({"x": lambda x: x.long()}, TypeError, "x must be bfloat16, .* got torch.int64"),
    "integer_phi": ({"phi": lambda p: p.int()}, TypeError, "phi must be .* got torch.int32"),
    "complex": ({"bias": lambda b: b.to(torch.complex64)}, TypeError, "bias must be .* got torch.complex64"),
    "wide_phi": (
        {"phi": lambda p: p.double()},
        TypeError,
        "phi may be float64 only where x is; x is torch.float32",
    ),
    "no_tensor": ({"alpha": lambda a: a.tolist()}, TypeError, "alpha must be a tensor, got list"),
    "no_x": ({"x": lambda x: None}, TypeError, "x must be a tensor, got NoneType"),
    "no_phi": ({"phi": lambda x: None}, TypeError, "phi must be a tensor, got NoneType"),
    "devices": ({"phi": lambda p: p.to("meta")}, ValueError, "phi must be on x's device cpu, got meta"),
    "norm_eps_nan": ({"norm_eps": math.nan}, ValueError, "norm_eps must be finite, not negative, got nan"),
    "norm_eps_negative": (
        {"norm_eps": -1e-6},
        ValueError,
        "norm_eps must be finite, not negative, got -1e-06",
    ),
    "hc_eps_inf": ({"hc_eps": math.inf}, ValueError, "hc_eps must be finite, not negative, got inf"),
    "hc_eps_text": ({"hc_eps": "1"}, TypeError, "hc_eps must be a number, got str"),
    "post_eps": ({"post_eps": -1.0}, ValueError, "post_eps must be finite, not negative"),
    "post_mult": ({"post_mult": 0.0}, ValueError, "post_mult must be above 0"),
    "post_mult_nan": ({"post_mult": math.nan}, ValueError, "post_mult must be finite"),
    "sinkhorn_eps": (
        {"sinkhorn_eps": 1.0},
        ValueError,
        "sinkhorn_eps must be finite, not negative and below 1",
    ),
    "iters_negative": (
        {"sinkhorn_iters": -1},
        ValueError,
        r"sinkhorn_iters must be 0 \(raw logits\) or more, got -1",
    ),
    "iters_float": ({"sinkhorn_iters": 2.0}, TypeError, "sinkhorn_iters must be an int, got float"),
    "iters_bool": ({"sinkhorn_iters": True}, TypeError, "sinkhorn_iters must be an int, got bool"),
    "form": (
        {"sinkhorn_form": "log"},
        ValueError,
        r"sinkhorn_form must be one of \('softmax', 'exp', 'exp_eps'\), got 'log'",
    ),
}


@pytest.mark.parametrize("case", BAD_PRE)
def test_bad_input_of_pre(case):
    change, error, message = BAD_PRE[case]
    with pytest.raises(error, match="mhc_pre: " + message):
        bad_pre(**change)


def test_sinkhorn_needs_residual_rows():
    values = make_inputs((3,), 4, 16, F32, full=False)
    with pytest.raises(ValueError, match=r"sinkhorn_iters must be 0 when phi has 2n = 8 rows .* got 20"):
        mhc_inductor.mhc_pre(*values.values(), sinkhorn_iters=20)


BAD_POST = {
    "f_out": ({"f_out": lambda f: f[:2]}, ValueError, r"f_out must have shape .*\[3, 16\], got \[2, 16\]"),
    "f_out_width": ({"f_out": lambda f: f[:, :8]}, ValueError, r"f_out must have shape .*got \[3, 8\]"),
    "h_post": (
        {"h_post": lambda h: h[..., None]},
        ValueError,
        r"h_post must have shape .*\[3, 4\], got \[3, 4, 1\]",
    ),
    "h_res": (
        {"h_res": lambda h: h.flatten(-2)},
        ValueError,
        r"h_res must have shape .*\[3, 4, 4\], got \[3, 16\]",
    ),
    "f_tuple": ({"f_out": lambda f: (f,)}, TypeError, "f_out must be a tensor, got tuple"),
    "f_int": ({"f_out": lambda f: f.long()}, TypeError, "f_out must be bfloat16"),
    "h_wide": ({"h_res": lambda h: h.double()}, TypeError, "h_res may be float64 only where x is"),
    "device": ({"h_res": lambda h: h.to("meta")}, ValueError, "h_res must be on x's device"),
}


@pytest.mark.parametrize("case", BAD_POST)
def test_bad_input_of_post(case):
    change, error, message = BAD_POST[case]
    values = make_post_inputs((3,), 4, 16, F32)
    for key, fn in change.items():
        values[key] = fn(values[key])
    with pytest.raises(error, match="mhc_post: " + message):
        mhc_inductor.mhc_post(*values.values(), transpose_res=False)


@pytest.mark.parametrize("value", [1, None, "no", torch.tensor(True)])
def test_transpose_res_is_a_bool(value):
    with pytest.raises(TypeError, match="transpose_res must be a bool, got"):
        mhc_inductor.mhc_post(*make_post_inputs((3,), 4, 16, F32).values(), transpose_res=value)


def test_transpose_res_has_no_default():
    with pytest.raises(TypeError, match="transpose_res"):
        mhc_inductor.mhc_post(*make_post_inputs((3,), 4, 16, F32).values())


def test_bad_input_of_sinkhorn_and_head():
    sinkhorn = mhc_inductor.mhc_sinkhorn
    for args, error, message in [
        ((torch.ones(3, 4, 5),), ValueError, r"h_res must have shape \[..., n, n\], got \[3, 4, 5\]"),
        ((torch.ones(4),), ValueError, r"h_res must have shape \[..., n, n\], got \[4\]"),
        ((torch.ones(9, 9),), ValueError, "h_res.* must hold 2 to 8 streams .*got 9"),
        ((None,), TypeError, "h_res must be a tensor, got NoneType"),
        ((torch.ones(4, 4).long(),), TypeError, "h_res must be bfloat16"),
        ((torch.ones(4, 4), -1), ValueError, "iters must be 0"),
        ((torch.ones(4, 4), 3, math.nan), ValueError, "eps must be finite"),
        ((torch.ones(4, 4), 3, 0.1, "Softmax"), ValueError, "form must be one of"),
    ]:
        with pytest.raises(error, match="mhc_sinkhorn: " + message):
            sinkhorn(*args)
    x, phi, alpha, bias, gamma = make_inputs((3,), 4, 16, F32, head=True).values()
    for args, message in [
        ((x, phi[:3], alpha, bias, gamma), r"phi must have shape \[n, n\*D\] = \[4, 64\], got \[3, 64\]"),
        ((x, phi, torch.ones(3), bias, gamma), r"alpha must have shape .*\[1\], got \[3\]"),
        ((x, phi, alpha, torch.ones(24), gamma), r"bias must have shape .*\[4\], got \[24\]"),
    ]:
        with pytest.raises(ValueError, match="mhc_head: " + message):
            mhc_inductor.mhc_head(*args)


def test_ops_called_directly_are_checked_too():
    args = list(pre_backward_sample())
    args[1] = args[1][:1]
    with pytest.raises(ValueError, match=r"mhc_pre_backward: dh_post must have shape .*got \[1, 3, 4\]"):
        OPS.mhc_pre_backward(*args)
    post = list(post_backward_sample(dtype=F32))
    post[0] = post[0][..., :8]
    with pytest.raises(ValueError, match="mhc_post_backward: g must have shape"):
        OPS.mhc_post_backward(*post)
    with pytest.raises(ValueError, match="mhc_sinkhorn: form"):
        OPS.mhc_sinkhorn(torch.ones(4, 4), 1, 0.0, "none")
    assert {name for name in registry.REFERENCE if name.startswith("mhc_")} <= checks._RULES.keys()
