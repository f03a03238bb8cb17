# SPDX-License-Identifier: Apache-2.0
"""The norm with eps added to the root, ``1 / (sqrt(mean(v * v)) + eps)``: reference, ops, entry points, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.nn import CONVENTIONS, HyperConnection, HyperHead
from mhc_inductor.ops import registry
from tests.oracles import mhc as h
from tests.oracles.mhc import HEAD_OPTIONS, OPS, PRE_OPTIONS, compare, make_inputs, relative, upstream
from tests.oracles.op_contract import check_outputs, op
from tests.oracles.samples import sample, trainable

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EXACT = 1e-12
OUTSIDE = {"norm_eps": 0.1, "norm_form": "outside"}
"""An eps that tells the two forms apart."""
NAMES = [name for name in registry.REFERENCE if registry.argument_names(name)[-1] == "norm_form"]


# --- the specification --------------------------------------------------------------------------------------


def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in make_inputs((2,), 2, 16).values()]

    def pre(*a: Tensor) -> tuple[Tensor, ...]:
        return mhc_inductor.mhc_pre(*a, **OUTSIDE, sinkhorn_iters=2)

    def coefficients(*a: Tensor) -> tuple[Tensor, ...]:
        return mhc_inductor.mhc_coefficients(*a, **OUTSIDE, sinkhorn_iters=2)

    head = [t.requires_grad_() for t in make_inputs((2,), 2, 16, head=True).values()]
    assert torch.autograd.gradcheck(pre, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(coefficients, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *a: mhc_inductor.mhc_head(*a, **OUTSIDE), head, fast_mode=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_token_of_zeros_has_the_gradient_of_a_vector_norm(dtype: torch.dtype) -> None:
    """Checks zero, not NaN, through the norm: the token's gradient is what reaches it through z and the collapse."""
    inputs = make_inputs((3,), 4, 16, dtype)
    inputs["x"][1] = 0
    options = {**OUTSIDE, "norm_eps": 1e-3}
    up = upstream({k: t for k, t in h.run_pre(inputs, None, options).items() if k in ("h_in", "h_post", "h_res")})
    got, want = h.run_pre(inputs, up, options), h.oracle_pre(inputs, up, options)
    compare(got, want, 2e-5)
    compare({"dx": got["dx"][1]}, {"dx": want["dx"][1]}, 2e-5)
    assert want["dx"][1].any()


def test_small_streams_keep_their_digits() -> None:
    """Checks fp32 gradients of streams far below eps, where 1 / inv_rms - eps has no digit left."""
    inputs = make_inputs((4,), 4, 32, F32, x_scale=1e-9)
    up = upstream({k: t for k, t in h.run_pre(inputs, None, OUTSIDE).items() if k in ("h_post", "h_res")})
    up["h_post"] = up["h_post"] * 1e9
    compare(h.run_pre(inputs, up, OUTSIDE), h.oracle_pre(inputs, up, OUTSIDE), 2e-5)


# --- the registered ops -------------------------------------------------------------------------------------


def outside(args: tuple[object, ...], name: str) -> tuple[object, ...]:
    """Returns a sample's arguments with the other form and eps."""
    names = [a.name for a in op(name)._schema.arguments]
    named = dict(zip(names, args, strict=False)) | OUTSIDE
    return tuple(named[k] for k in names)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_contract(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # dalpha is a sum that may cancel
    args = outside(sample(name, dtype=dtype), name)
    opcheck(op(name), trainable(name, args))
    check_outputs(name, args)


@pytest.mark.parametrize("name", NAMES)
def test_calls_without_the_argument_are_as_before(name: str) -> None:
    args = sample(name)
    assert op(name)._schema.arguments[-1].name == "norm_form" and len(args) == len(op(name)._schema.arguments) - 1
    for a, b in zip(op(name)(*args), op(name)(*args, "inside"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["inside", "outside"])
def test_vmap(form: str) -> None:
    inputs = make_inputs((2, 3), 4, 16, F32)
    x, params = inputs["x"], [inputs[k].requires_grad_() for k in ("phi", "alpha", "bias", "gamma")]
    options = {"norm_eps": 0.1, "norm_form": form, "sinkhorn_iters": 2}
    want = mhc_inductor.mhc_pre(x, *params, **options)
    got = vmap(lambda t: mhc_inductor.mhc_pre(t, *params, **options))(x)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-6
    each = torch.func.grad(lambda t: mhc_inductor.mhc_pre(t, *params, **options)[1].square().sum())(x)
    rows = vmap(torch.func.grad(lambda t: mhc_inductor.mhc_pre(t, *params, **options)[1].square().sum()))(x)
    assert relative(rows, each) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_another_word_is_refused(name: str) -> None:
    args = sample(name)
    with pytest.raises(ValueError, match=r"norm_form must be one of \('inside', 'outside'\).*got 'under'"):
        op(name)(*args, "under")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        with pytest.raises(ValueError, match="norm_form must be one of"):
            op(name)(*fakes, "under")


# --- entry points --------------------------------------------------------------------------------------------


def test_compiled_as_eager() -> None:
    inputs = make_inputs((3,), 4, 16, F32)
    leaves = [t.requires_grad_() for t in inputs.values()]

    def step(*a: Tensor) -> Tensor:
        h_in, h_post, h_res = mhc_inductor.mhc_pre(*a, **OUTSIDE, sinkhorn_iters=2)
        return mhc_inductor.mhc_post(a[0], h_in.sin(), h_post, h_res, transpose_res=True)

    def run(fn: object) -> list[Tensor]:
        out = fn(*leaves)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    torch._dynamo.reset()
    for a, b in zip(run(torch.compile(step, backend="aot_eager")), run(step), strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.parametrize("single_pass", [False, True])
def test_modules(single_pass: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 16)
    made = {"norm_eps": 0.1, "single_pass": single_pass}
    layer = HyperConnection(16, 4, nn.Tanh(), **made, norm_form="outside")
    nn.init.normal_(layer.alpha)
    twin = HyperConnection(16, 4, nn.Tanh(), **made)
    twin.load_state_dict(layer.state_dict())
    first = lambda out: out[0] if single_pass else out  # noqa: E731
    got, other = first(layer((x, None) if single_pass else x)), first(twin((x, None) if single_pass else x))
    assert relative(got, other) > 1e-4 and "norm_form='outside'" in repr(layer) and "norm_form" not in repr(twin)
    named = {k: v.double() for k, v in layer.named_parameters()}
    args = (x.double(), named["phi"], named["alpha"], named["bias"])
    h_in, h_post, h_res = mhc_inductor.mhc_pre(*args, **OUTSIDE, sinkhorn_iters=20)
    f_out = torch.tanh(x[..., 0, :].double() if single_pass else h_in)
    assert relative(got, mhc_inductor.mhc_post(args[0], f_out, h_post, h_res, transpose_res=False)) < 1e-5


def test_loaders_refuse_the_other_form() -> None:
    layer = HyperConnection(16, 4, nn.Tanh(), **{**CONVENTIONS["deepseek_v4"], "norm_form": "outside"})
    with pytest.raises(ValueError, match="deepseek_v4 has norm_form='inside', this module 'outside'"):
        layer.load_deepseek_v4({})
    with pytest.raises(ValueError, match="deepseek_v4 has norm_form='inside', this module 'outside'"):
        HyperHead(16, 4, norm_form="outside").load_deepseek_v4({})
    head = HyperHead(16, 4, norm_eps=0.1, norm_form="outside")
    x, p = torch.randn(3, 4, 16), [head.phi, head.alpha, head.bias]
    assert torch.equal(head(x), mhc_inductor.mhc_head(x, *p, norm_eps=0.1, norm_form="outside", hc_eps=1e-6))
    assert {*HEAD_OPTIONS, "norm_form"} <= mhc_inductor.mhc_head.__kwdefaults__.keys()
    assert {*PRE_OPTIONS, "norm_form"} <= mhc_inductor.mhc_pre.__kwdefaults__.keys()
    assert OPS.mhc_pre.default._schema.arguments[-1].default_value == "inside"
