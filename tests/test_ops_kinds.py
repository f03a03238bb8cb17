# SPDX-License-Identifier: Apache-2.0
"""Tensors that no op takes are named, with the argument, at every op and public function; transforms say what is meant."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from test_ops_boundaries import GOOD, _given
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from mhc_inductor.ops import registry
from tests.oracles.op_contract import op, outputs
from tests.oracles.samples import OP_SAMPLES, trainable

# Without one of them a fake of it would be a fake of another kind, or no fake can be made.
FAKEABLE = ("complex", "fp8", "sparse")


def kinds(t: Tensor) -> dict[str, Tensor]:
    """Returns tensors like ``t`` of kinds that no op takes."""
    t = t.detach()
    found = {"sparse": t.to_sparse()} if t.dim() else {}
    if t.dim() == 2:
        found["compressed"] = t.to_sparse_csr()
    if t.dim() >= 2:
        found["jagged"] = torch.nested.nested_tensor(list(t), layout=torch.jagged)
        found["nested"] = torch.nested.nested_tensor(list(t))
    if not t.is_floating_point():
        return found
    if t.dim() and t.dtype is torch.float32:
        found["mkldnn"] = t.contiguous().to_mkldnn()
    quantized = torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)
    return {**found, "complex": t.to(torch.complex64), "fp8": t.to(torch.float8_e4m3fn), "quantized": quantized}


def _refusal(call: Any, name: str, argument: str) -> str:
    """Returns why the call did not refuse the argument by name, or an empty text."""
    try:
        call()
    except (TypeError, ValueError) as error:
        public = name.replace("_list", "").replace("_entry", "").replace("_mask", "")
        named = str(error).startswith((f"{name}: {argument} must ", f"{public}: {argument} must "))
        return "" if named and "got " in str(error) else f"{type(error).__name__}: {str(error)[:100]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "nothing raised"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OP_SAMPLES)
def test_other_kinds_of_tensors_are_named(name, caplog):
    caplog.set_level(logging.CRITICAL, "torch._subclasses.fake_tensor")
    sample, wrong = OP_SAMPLES[name], []
    for i, argument in enumerate(a.name for a in op(name)._schema.arguments[: len(sample)]):
        if not isinstance(sample[i], Tensor):
            continue
        for kind, bad in kinds(sample[i]).items():
            args = [*sample[:i], bad, *sample[i + 1 :]]
            wrong.append((argument, kind, _refusal(lambda: op(name)(*args), name, argument)))  # noqa: B023
            if kind in ("jagged", "sparse"):
                with torch.inference_mode():
                    wrong.append((argument, f"{kind}, inference", _refusal(lambda: op(name)(*args), name, argument)))  # noqa: B023
            if kind in FAKEABLE:
                mode = FakeTensorMode()
                fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
                with mode:
                    wrong.append((argument, f"{kind}, fake", _refusal(lambda: op(name)(*fakes), name, argument)))  # noqa: B023
    assert len(wrong) > 4 and [w for w in wrong if w[-1]] == []


@pytest.mark.parametrize("name", OP_SAMPLES)
def test_fake_tensors_outside_of_their_mode(name):
    """Checks that fakes among real tensors are named, and that fakes alone, and meta tensors, give shapes."""
    sample = OP_SAMPLES[name]
    names = [a.name for a in op(name)._schema.arguments]
    at = [i for i, a in enumerate(sample) if isinstance(a, Tensor)]
    mode = FakeTensorMode()
    for i in at if len(at) > 1 else ():
        args = [*sample[:i], mode.from_tensor(sample[i]), *sample[i + 1 :]]
        real = names[at[0] if i != at[0] else at[1]]
        with pytest.raises(TypeError, match=f": {real} must be a fake tensor as {names[i]} is, got a real one; pass"):
            op(name)(*args)
    want = op(name)(*sample)
    for made in (mode.from_tensor, lambda t: t.detach().to("meta")):
        got = op(name)(*[made(a) if isinstance(a, Tensor) else a for a in sample])
        pairs = zip(outputs(want), outputs(got), strict=True)
        assert all((a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) for a, b in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOOD)
def test_other_kinds_of_tensors_are_named_by_public_functions(name):
    wrong = []
    for argument in [*GOOD[name][1], *(["indices", "mask"] if name == "selection_attention" else [])]:
        given = _given(name, argument)
        for kind, bad in kinds(given[argument]).items() if isinstance(given[argument], Tensor) else ():
            refusal = _refusal(lambda: GOOD[name][0](**{**given, argument: bad}), name, argument)  # noqa: B023
            wrong.append((argument, kind, refusal))
    assert len(wrong) > 4 and [w for w in wrong if w[-1]] == []


def test_what_to_pass_instead_of_a_nested_or_sparse_tensor():
    x, h = torch.randn(3, 4, 16), torch.randn(3, 4)
    for made, words in (
        (x.to_sparse(), r"x must be a strided tensor, got a torch.sparse_coo one; pass x.to_dense\(\)"),
        (torch.nested.nested_tensor(list(x), layout=torch.jagged), r"got a nested one; pass x.to_padded_tensor\(0.0\)"),
    ):
        with pytest.raises(TypeError, match=words):
            mhc_inductor.mhc_collapse(made, h)


# --- transforms of compiled functions -----------------------------------------------------------------------


def _collapse(x: Tensor) -> Tensor:
    h = torch.linspace(0.1, 1.0, 12).view(3, 4)
    return mhc_inductor.mhc_collapse(x, h)


def _post(x: Tensor) -> Tensor:
    return mhc_inductor.mhc_post(x, x[:, 0], x[..., 0], None, transpose_res=False)


@pytest.mark.parametrize("grad", [False, True])
def test_a_tangent_is_never_dropped_by_compiled_code(fresh, no_caches, grad):
    """Checks a graph that is compiled without a dual level, then with one: Inductor's code would drop the tangent."""
    x, compiled = torch.randn(3, 4, 16), torch.compile(_collapse, backend="mhc_inductor")
    want = _collapse(x)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(x.clone().requires_grad_(grad)), want)
        with forward_ad.dual_level():
            # The compiled code refuses, or the op where Dynamo leaves calls with a tangent to eager mode.
            who = "compiled code" if _dynamo_takes_tangents() else "mhc_collapse"
            for _ in range(2):
                with pytest.raises(NotImplementedError, match=f"{who} has no forward-mode derivative"):
                    compiled(forward_ad.make_dual(x.clone().requires_grad_(grad), torch.ones_like(x)))
            torch.testing.assert_close(compiled(x.clone().requires_grad_(grad)), want)


def _dynamo_takes_tangents() -> bool:
    """Returns whether Dynamo captures a call whose argument has a tangent: torch 2.15 leaves it to eager mode."""
    counter = CompileCounter()
    torch.compile(lambda x: x.sin(), backend=counter)(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    return bool(counter.frame_count)


@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_tangent_of_a_formula_is_never_dropped_by_compiled_code(fresh, no_caches, grad, first):
    """Checks a graph that is compiled first without a tangent, outside of a dual level or inside of it."""

    def formula(x: Tensor) -> Tensor:
        return x.sin() * 2

    x, compiled = torch.randn(3, 4, 16), torch.compile(formula, backend="mhc_inductor")
    with torch.set_grad_enabled(grad):
        if first == "outside":
            compiled(x.clone().requires_grad_(grad))
        with forward_ad.dual_level():
            if first == "inside":
                compiled(x.clone().requires_grad_(grad))
            # Code that was compiled at this level is run again, whatever Dynamo does with a call that it has not seen.
            captured = first == "inside" or _dynamo_takes_tangents()
            for _ in range(2):
                dual = forward_ad.make_dual(x.clone().requires_grad_(grad), torch.ones_like(x))
                if captured:
                    with pytest.raises(NotImplementedError, match="compiled code has no forward-mode derivative"):
                        compiled(dual)
                else:
                    tangent = forward_ad.unpack_dual(compiled(dual)).tangent
                    torch.testing.assert_close(tangent, forward_ad.unpack_dual(formula(dual)).tangent)
            torch.testing.assert_close(compiled(x.clone().requires_grad_(grad)), formula(x))


@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian"])
def test_forward_mode_transforms_of_compiled_functions_are_refused(fresh, no_caches, place, transform):
    def applied(fn: Any) -> Any:
        if transform == "jvp":
            return lambda x: torch.func.jvp(fn, (x,), (torch.ones_like(x),))
        return getattr(torch.func, transform)(lambda x: fn(x).square().sum())

    fn = applied(torch.compile(_post, backend="aot_eager"))
    call = fn if place == "around" else torch.compile(applied(_post), backend="aot_eager")
    with pytest.raises(
        Exception, match=r"mhc_post has no forward-mode|mhc_post cannot be differentiated by torch\.func"
    ):
        call(torch.randn(3, 4, 16))


def test_reverse_mode_transforms_of_compiled_functions(fresh, no_caches):
    def loss(x: Tensor) -> Tensor:
        return _post(x).square().sum()

    x = torch.randn(3, 4, 16)
    compiled = torch.compile(loss, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(compiled)(x), want)
    torch.testing.assert_close(torch.func.vjp(compiled, x)[1](torch.ones(()))[0], want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(compiled))(x[None])[0], want)
    torch.testing.assert_close(torch.compile(torch.func.vmap(_post), backend="aot_eager")(x[None])[0], _post(x))
    # The op refuses, so Dynamo breaks the graph and runs the transform eagerly, or says why it cannot.
    torch.testing.assert_close(torch.compile(torch.func.grad(loss), backend="aot_eager")(x), want)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"mhc_post cannot be differentiated by torch\.func\.grad.* inside a compiled"):
        torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("name", [name for name in OP_SAMPLES if f"{name}_backward" in registry.REFERENCE])
def test_a_gradient_reads_each_saved_tensor_once(name: str) -> None:
    """Checkpointing refuses a second reading; the gradients are those without it."""
    sample = trainable(name, OP_SAMPLES[name])
    leaves = [a for a in sample if isinstance(a, Tensor) and a.requires_grad]

    def loss(*args: Any) -> Tensor:
        found: Tensor = sum(t.square().sum() for t in outputs(op(name)(*args)) if t.requires_grad)
        return found

    want = torch.autograd.grad(loss(*sample), leaves, allow_unused=True)
    got = torch.autograd.grad(checkpoint(loss, *sample, use_reentrant=False), leaves, allow_unused=True)
    assert any(g is not None for g in want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
