# SPDX-License-Identifier: Apache-2.0
"""E79Cell and E79Layer: the formula, streaming, decoding, training, state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from mhc_inductor.nn import E79Cell, E79Layer, E79State
from tests.oracles.e79 import BIASES, FP32_GRADIENTS, loop
from tests.oracles.mhc import relative

D, N, T, B = 12, 8, 11, 3
LAYERS = {
    "plain": {},
    "conv": {"conv": 4},
    "conv_1": {"conv": 1},
    "input_bias": {"bias": "input", "inner": 20, "conv": 3},
    "no_bias": {"bias": "none", "conv": 40},  # wider than the sequence
}


def layer(seed=0, **kwargs):
    torch.manual_seed(seed)
    return E79Layer(D, N, **kwargs)


def sequence(steps=T, batch=B, seed=1):
    return torch.randn(batch, steps, D, generator=torch.Generator().manual_seed(seed))


def close(got, want, tolerance=1e-5):
    assert relative(got, want) < tolerance


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("state", [True, False])
def test_cell_is_the_formula(bias, state):
    torch.manual_seed(0)
    cell = E79Cell(D, N, bias=bias).double()
    x = torch.randn(T, B, D, dtype=torch.float64)
    S, M = (torch.randn(2, B, N, N, dtype=torch.float64) * 0.3).unbind() if state else (None, None)
    biases = {"none": (None, None), "fixed": (cell.b_s_gate, cell.b_m_gate)}
    if bias == "input":
        biases["input"] = (x @ cell.W_bs.T, x @ cell.W_bm.T)
    b_s, b_m = biases[bias]
    want = loop({"kvqm": x @ cell.W_kvqm.T, "b_s": b_s, "b_m": b_m, "S0": S, "M0": M})
    for got, name in zip(cell(x, S, M), ("out", "S", "M"), strict=True):
        close(got, want[name], 1e-12)


def test_parameters_are_named_as_the_specification():
    shapes = {bias: {k: tuple(p.shape) for k, p in E79Cell(D, N, bias).named_parameters()} for bias in BIASES}
    assert shapes == {
        "none": {"W_kvqm": (4 * N, D)},
        "fixed": {"W_kvqm": (4 * N, D), "b_s_gate": (N,), "b_m_gate": (N,)},
        "input": {"W_kvqm": (4 * N, D), "W_bs": (N, D), "W_bm": (N, D)},
    }
    names = {k for k, _ in layer(conv=4).named_parameters()}
    cell = {"cell.W_kvqm", "cell.b_s_gate", "cell.b_m_gate"}
    assert names == cell | {"in_proj.weight", "conv1d.weight", "conv1d.bias", "out_proj.weight"}


def test_layer_is_what_its_docstring_says():
    a, x = layer(conv=3), sequence()
    h = F.conv1d(F.pad(a.in_proj(x).mT, (2, 0)), a.conv1d.weight, a.conv1d.bias, groups=D).mT
    out, S, M = a.cell(F.silu(h).transpose(0, 1))
    y, state = a(x)
    close(y, out.transpose(0, 1) @ a.out_proj.weight.T)
    close(state.S, S)
    close(state.M, M)
    assert y.shape == x.shape and torch.equal(state.tail, a.in_proj(x).mT[..., -2:])


@pytest.mark.parametrize("kwargs", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("cuts", [(1,), (4,), (1, 2, 9), tuple(range(1, T))])
def test_streaming_equals_the_whole(kwargs, cuts):
    a, x = layer(**kwargs), sequence()
    whole, last = a(x)
    parts, state = [], None
    for first, end in zip((0, *cuts), (*cuts, T), strict=True):
        y, state = a(x[:, first:end], state)
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    close(state.S, last.S)
    close(state.M, last.M)
    assert (state.tail is None) == (a.conv == 0) and (state.tail is None or relative(state.tail, last.tail) < 1e-5)


def test_gradients_cross_the_calls_until_detached():
    a, x = layer(conv=3), sequence()
    a(x)[0].square().sum().backward()
    want = {k: p.grad.clone() for k, p in a.named_parameters()}
    a.zero_grad()
    first, state = a(x[:, :5])
    second, _ = a(x[:, 5:], state)
    (first.square().sum() + second.square().sum()).backward()
    for k, p in a.named_parameters():
        close(p.grad, want[k])
    start = x[:, :5].clone().requires_grad_()
    state = a(start)[1].detach()
    assert isinstance(state, E79State) and not any(t.requires_grad for t in state)
    a(x[:, 5:], state)[0].sum().backward()
    assert start.grad is None


@pytest.mark.parametrize("kwargs", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_parameter_and_x(kwargs, dtype):
    a, x = layer(**kwargs).to(dtype), sequence().to(dtype).requires_grad_()
    y, state = a(x)
    assert y.dtype is dtype and state.S.dtype is state.M.dtype is torch.float32
    y.square().sum().backward()
    for name, p in [*a.named_parameters(), ("x", x)]:
        assert p.grad is not None and p.grad.dtype is dtype and p.grad.isfinite().all(), name
        assert float(p.grad.float().norm()) > 0, name


def test_autocast_runs_the_projections_in_bfloat16():
    a, x = layer(bias="input", conv=3), sequence()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = a(x)
    assert y.dtype is torch.bfloat16 and state.S.dtype is torch.float32
    assert 0 < relative(y, a(x)[0]) < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = a(x, state)
    assert y.isfinite().all()


@pytest.mark.parametrize("bias", BIASES)
def test_training_decreases_the_loss(bias):
    """Trains the layer to return the value stored with a key, which takes a state carried over steps."""
    g = torch.Generator().manual_seed(2)
    keys, values = torch.eye(4), torch.randn(16, 4, 4, generator=g)
    order = torch.stack([torch.randperm(4, generator=g) for _ in range(16)])
    write = torch.cat([keys.expand(16, 4, 4), values, torch.zeros(16, 4, 4)], -1)
    read = torch.cat([keys[order], torch.zeros(16, 4, 4), torch.ones(16, 4, 4)], -1)
    x = torch.cat([write, read], 1)
    target = torch.gather(values, 1, order.unsqueeze(-1).expand(-1, -1, 4))
    target = F.pad(target, (0, D - 4))
    a = layer(bias=bias)
    optimizer = torch.optim.Adam(a.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        loss = F.mse_loss(a(x)[0][:, 4:], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    blind = float(F.mse_loss(torch.zeros_like(target), target))
    assert losses[-1] < 0.6 * blind and losses[-1] < 0.6 * losses[0], losses[:: len(losses) - 1]


@pytest.mark.parametrize("kwargs", LAYERS.values(), ids=LAYERS)
def test_state_dict_round_trip(kwargs, tmp_path):
    a, b, x = layer(**kwargs), layer(seed=3, **kwargs), sequence()
    assert relative(a(x)[0], b(x)[0]) > 1e-3
    torch.save(a.state_dict(), tmp_path / "state.pt")
    b.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(a(x)[0], b(x)[0])
    assert torch.equal(copy.deepcopy(a)(x)[0], a(x)[0])


def test_initial_gates_and_scales():
    torch.manual_seed(0)
    cell = E79Cell(64, 32, "fixed")
    assert torch.equal(cell.b_s_gate, torch.full((32,), 2.0)) and torch.equal(cell.b_m_gate, torch.full((32,), 2.5))
    for weight in (cell.W_kvqm, E79Cell(64, 32, "input").W_bs, E79Cell(64, 32, "input").W_bm):
        assert abs(float((torch.randn(500, 64) @ weight.T).std()) - 1) < 0.1
    # Long sequences neither vanish nor overflow.
    x = torch.randn(300, 2, 64)
    out, S, M = cell(x)
    assert all(t.isfinite().all() for t in (out, S, M)) and 1e-2 < float(out[-50:].std()) < 100


def test_repr_says_the_sizes():
    text = repr(layer(bias="input", inner=20, conv=3))
    assert "dim=12, inner=20, conv=3" in text and "dim=20, n_state=8, bias='input'" in text


@pytest.mark.parametrize("kwargs", [{"conv": 4}, {"bias": "input"}])
def test_compiled_whole_and_trained(kwargs):
    torch._dynamo.reset()
    a, x = layer(**kwargs), sequence()
    compiled = torch.compile(a, fullgraph=True)
    y, state = compiled(x)
    want, last = a(x)
    close(y, want)
    close(state.S, last.S)
    got = torch.autograd.grad(y.square().sum(), list(a.parameters()))
    for g, w in zip(got, torch.autograd.grad(want.square().sum(), list(a.parameters())), strict=True):
        close(g, w)
    close(compiled(x, state)[0], a(x, last)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: E79Cell(0, 4), "E79Cell: dim must be at least 1, got 0"),
        (lambda: E79Cell(4, 0), "E79Cell: n_state must be at least 1, got 0"),
        (lambda: E79Cell(4, 4, "yes"), "E79Cell: bias must be one of .*'input'.*, got 'yes'"),
        (lambda: E79Layer(4, 4, conv=-1), "E79Layer: conv must be at least 0, got -1"),
        (lambda: E79Layer(4, 4, inner=0), "E79Layer: inner must be at least 1, got 0"),
        (lambda: E79Cell(4, 4)(torch.ones(3, 2, 5)), r"E79Cell: x must have shape .*\[T, B, 4\], got \[3, 2, 5\]"),
        (lambda: E79Layer(4, 4)(torch.ones(3, 4)), r"E79Layer: x must have shape .*\[B, T, 4\], got \[3, 4\]"),
        (lambda: E79Layer(4, 4)(torch.ones(3, 0, 4)), "must have at least one time step"),
        (lambda: E79Layer(4, 4).step(torch.ones(3, 1, 4)), r"step takes x of shape .*\[B, 4\], got \[3, 1, 4\]"),
        (lambda: E79Cell(4, 4)(torch.ones(3, 2, 4), torch.ones(4, 4)), r"S0 must have shape .*\[2, 4, 4\]"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_another_batch_is_named():
    a = layer(conv=3)
    state = a(sequence(batch=2))[1]
    with pytest.raises(ValueError, match=r"state.tail must have shape \[3, 12, 2\], got \[2, 12, 2\]"):
        a(sequence(), state)
    with pytest.raises(ValueError, match=r"S0 must have shape \[B, n, n\] = \[3, 8, 8\]"):
        a(sequence(), state._replace(tail=None))


# Smallest known errors of the authors' CUDA gradients against fp64: (first T affected, bias modes, relative error).
AUTHORS_CUDA = {"W_m": (17, ("none", "fixed", "input"), 0.20), "W_k": (2, ("fixed",), 0.04), "x": (2, ("fixed",), 0.04)}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("steps", [2, 17, 64])
def test_gradients_that_the_authors_cuda_has_wrong(steps, bias):
    """Compares fp32 gradients through the projections with autograd of the fp64 loop: far below the authors' errors."""
    torch.manual_seed(steps)
    dim, n, batch = 24, 16, 4
    cell, x = E79Cell(dim, n, bias=bias), torch.randn(steps, batch, dim, requires_grad=True)
    g = torch.randn(steps, batch, n)
    (cell(x)[0] * g).sum().backward()
    got = {"x": x.grad, "W_k": cell.W_kvqm.grad[:n], "W_m": cell.W_kvqm.grad[3 * n :]}

    exact = {k: p.detach().double().requires_grad_() for k, p in cell.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    inputs = {"kvqm": x64 @ exact["W_kvqm"].T, "b_s": None, "b_m": None, "S0": None, "M0": None}
    if bias == "fixed":
        inputs |= {"b_s": exact["b_s_gate"], "b_m": exact["b_m_gate"]}
    elif bias == "input":
        inputs |= {"b_s": x64 @ exact["W_bs"].T, "b_m": x64 @ exact["W_bm"].T}
    (loop(inputs)["out"] * g.double()).sum().backward()
    want = {"x": x64.grad, "W_k": exact["W_kvqm"].grad[:n], "W_m": exact["W_kvqm"].grad[3 * n :]}
    for name, (since, modes, theirs) in AUTHORS_CUDA.items():
        error = relative(got[name], want[name])
        assert error <= FP32_GRADIENTS, name
        if since <= steps and bias in modes:
            assert error < theirs / 1000, name
