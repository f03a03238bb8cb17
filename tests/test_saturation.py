# SPDX-License-Identifier: Apache-2.0
"""Gradients where a gate or a softmax is saturated: as small as the formula's, not the rounding of a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mhc_inductor
from mhc_inductor.kernels.cpu import selection_core as selection_cpu_core
from mhc_inductor.ops.registry import call
from tests.oracles import e79 as helpers_e79
from tests.oracles import mhc as helpers_mhc
from tests.oracles import single_pass as one

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
N, WIDTH = 4, 24
OPTIONS = {"hc_eps": 0.03, "post_eps": 0.4, "post_mult": 1.7, "sinkhorn_iters": 2}
HEAD = {"hc_eps": 0.03}
ENDS = (30.0, -30.0, 100.0, -100.0)
"""Biases. In fp32 the sigmoid of the first is 1 less 9e-14, the slope of the last two underflows."""


def _saturated(inputs: dict[str, Tensor | None], end: float) -> dict[str, Tensor | None]:
    """Returns the inputs with gates at one end, but for the first stream's, whose gradients are of ordinary size."""
    bias = inputs["bias"]
    assert bias is not None
    bias = bias.clone()
    gates = bias[: 2 * N].view(-1, N)
    gates[:, 1:] = end
    return {**inputs, "bias": bias}


@pytest.mark.parametrize("name", [name for name in one.FORMULAS if name not in ("post", "collapse")])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("norm_form", ["inside", "outside"])
def test_gradients_of_saturated_gates(name, end, dtype, norm_form, device):
    """Compares each element, and each row of phi: of one token, so that nothing cancels in a sum."""
    options = {**(HEAD if "head" in name else OPTIONS), "norm_form": norm_form}
    make, run, oracle, outputs = one.FORMULAS[name]
    inputs = _saturated(make((1,), N, WIDTH, dtype, device=device), end)
    out = run(inputs, True, None, options)
    ups = helpers_mhc.upstream({k: t for k, t in out.items() if k in outputs})
    got, want = run(inputs, True, ups, options), oracle(inputs, True, out.get("x_out"), ups, options)
    for key in ("dbias", "dphi"):
        g, w = (t[key].cpu().double().view(t[key].shape[0], -1)[: 2 * N] for t in (got, want))
        error, size = (g - w).norm(dim=1), w.norm(dim=1)
        # Autograd in fp64 takes 1 - sigmoid(30), which has two to three digits.
        relative = torch.full_like(size, 2e-2)
        relative[::N] = 1e-5
        assert (error <= relative * size + 1e-15).all(), (key, g[:, 0], w[:, 0])
        assert size.view(-1, N)[:, 1:].max() < 1e-9 and size[::N].min() > 1e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_adam_leaves_a_saturated_bias_where_it_is(compiled, device):
    """Trains for 100 steps: Adam divides a gradient by its size, so that rounding would move the bias by 1."""
    inputs = _saturated(helpers_mhc.make_inputs((16,), N, WIDTH, F32, device=device), 30.0)
    params = {k: t.clone().requires_grad_() for k, t in inputs.items() if t is not None and k != "x"}
    adam = torch.optim.Adam(params.values(), lr=0.01)
    start = inputs["bias"]
    target = torch.randn(16, N, WIDTH, generator=torch.Generator().manual_seed(5)).to(device)

    def loss(x: Tensor, **given: Tensor) -> Tensor:
        h_in, h_post, h_res = mhc_inductor.mhc_pre(x, **given, **OPTIONS)
        out = mhc_inductor.mhc_post(x, h_in, h_post, h_res, transpose_res=True)
        return (out - target).square().mean()

    step = torch.compile(loss, backend="mhc_inductor", fullgraph=True) if compiled else loss
    losses = []
    for _ in range(100):
        adam.zero_grad()
        value = step(inputs["x"], **params)
        value.backward()
        adam.step()
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    moved = (params["bias"] - start)[: 2 * N].detach().view(2, N)
    assert moved[:, 1:].abs().max() < 1e-3 and moved[:, 0].abs().min() > 1e-3


@pytest.mark.parametrize("form", ["softmax", "exp", "exp_eps"])
@pytest.mark.parametrize("end", [12.0, 30.0, 80.0])
@pytest.mark.parametrize("pattern", ["permutation", "one column", "random signs"])
def test_gradients_of_saturated_sinkhorn(form, end, pattern, device):
    """Allows twice the error of the formula in fp32: where its gradient is 0, so is the op's."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, N, N, generator=g) * 0.1
    if pattern == "permutation":
        logits = logits + end * torch.eye(N)[torch.tensor([2, 0, 3, 1])]
    elif pattern == "one column":
        logits[..., 1] += end
    else:
        logits = logits + end * torch.randn(5, N, N, generator=g).sign()
    logits, grad = logits.to(device), torch.randn(5, N, N, generator=g).to(device)
    got = call("mhc_sinkhorn_backward", grad, logits, 3, 1e-6, form)
    want = helpers_mhc.oracle_sinkhorn(logits, 3, 1e-6, form, grad)["dh_res"]
    leaf = logits.cpu().requires_grad_()
    plain = torch.autograd.grad(helpers_mhc.sinkhorn(leaf, 3, 1e-6, form), leaf, grad.cpu())[0]
    error, bar = ((t.cpu().double() - want).abs().amax((-1, -2)) for t in (got, plain))
    assert (error <= 2 * bar + 1e-6 * want.abs().amax((-1, -2)) + 1e-12).all(), (error, bar)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("bias", ["fixed", "input"])
def test_gradients_of_saturated_e79_gates(end, bias, device):
    """Allows the error of the formula in fp32, which also takes 1 less a gate that is 1."""
    inputs = helpers_e79.make_inputs(5, 2, 8, F32, bias=bias)
    inputs = {k: t if t is None or k[0] != "b" else t.sign() * 0.1 + end for k, t in inputs.items()}
    leaves = {k: t.to(device).requires_grad_() for k, t in inputs.items() if t is not None}
    out = mhc_inductor.e79_scan(**leaves)[0]
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    got = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), up.to(device)), strict=True))
    results = {}
    for dtype in (F32, F64):
        at = {k: t.detach().cpu().to(dtype).requires_grad_() for k, t in leaves.items()}
        plain = helpers_e79.loop(at, dtype)["out"]
        results[dtype] = dict(zip(at, torch.autograd.grad(plain, list(at.values()), up.to(dtype)), strict=True))
    for key, want in results[F64].items():
        bar = (results[F32][key].double() - want).abs().max()
        error = (got[key].cpu().double() - want).abs().max()
        assert error <= 2 * bar + 1e-6 * want.abs().max() + 1e-12, (key, error, bar)
    if end > 0:
        assert got["b_s"].abs().max() < 1e-9 < 1e-3 < got["kvqm"].abs().max()


@pytest.mark.parametrize("form", ["formulas", "C++", "compiled"])
@pytest.mark.parametrize(("scale", "equal"), [(1.0, False), (30.0, False), (100.0, True), (1000.0, True)])
@pytest.mark.parametrize("sink", [None, -50.0, 2.0])
def test_gradients_of_attention_with_large_scores(form, scale, equal, sink, device, monkeypatch):
    """Allows the rounding of a large lse relative to a gradient, not to the terms that it is the difference of.

    With equal keys and values a query's weights have no gradient.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(selection_cpu_core, "LEAST", 0 if form == "C++" else 2**40)
    g = torch.Generator().manual_seed(7)
    q, k, v, up = (
        torch.randn(*s, generator=g) for s in ((1, 8, 1, 2, 8), (1, 1, 16, 8), (1, 1, 16, 8), (1, 8, 1, 2, 8))
    )
    if equal:
        k, v = (t[:, :, :1].expand_as(t).clone() for t in (k, v))
    q, ranges = q * scale, torch.tensor([0, 16], device=device).expand(1, 8, 1, 1, 2)
    logits = None if sink is None else torch.full((1, 2), sink, device=device)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("bsghd,bgtd->bsght", q, k) * 8**-0.5
        rest = [] if sink is None else [torch.full_like(scores[..., :1], sink)]
        return torch.softmax(torch.cat([scores, *rest], -1), -1)[..., :16]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mhc_inductor.selection_attention(q, k, v, ranges, sink=logits)

    def gradients(fn: Callable[..., Tensor], dtype: torch.dtype, to: str = "cpu") -> tuple[Tensor, ...]:
        leaves = [t.to(to, dtype, copy=True).requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(fn(*leaves), leaves, up.to(to, dtype))
        return tuple(t.cpu().double() for t in found)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bsght,bgtd->bsghd", weights(q, k), v)

    want, plain = gradients(formula, F64), gradients(formula, F32)
    got = gradients(torch.compile(attention) if form == "compiled" else attention, F32, device)
    p, dp = weights(q.double(), k.double()), torch.einsum("bsghd,bgtd->bsght", up.double(), v.double())
    scores = torch.einsum("bsghd,bgtd->bsght", q, k).abs().max() * 8**-0.5
    difference = p * (dp - (p * dp).sum(-1, keepdim=True)).abs()
    for key, order, factor in (("q", "bsght,bgtd->bsghd", k), ("k", "bsght,bsghd->bgtd", q)):
        at = "qk".index(key)
        terms, left = (
            torch.einsum(order, t, factor.double().abs()).max() * 8**-0.5 for t in (p * dp.abs(), difference)
        )
        bar = 2 * (plain[at] - want[at]).abs().max() + 1e-6 * terms + 1.2e-7 * (scores + 10) * left
        error = (got[at] - want[at]).abs().max()
        assert error <= bar, (key, error, bar)
