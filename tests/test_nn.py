# SPDX-License-Identifier: Apache-2.0
"""HyperConnection and HyperHead: they start near the identity; loaders, gradients, state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mhc_inductor.nn import CONVENTIONS, HyperConnection, HyperHead, expand
from tests.oracles.mhc import relative, sinkhorn

D, N = 32, 4


class Sub(nn.Module):
    """A nonlinear sublayer with one more argument."""

    def __init__(self, dim=D):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, h, scale=1.0):
        return torch.tanh(self.linear(h)) * scale


def block(n=N, dim=D, seed=0, **kwargs):
    torch.manual_seed(seed)
    return HyperConnection(dim, n, Sub(dim), **kwargs)


def scramble(module, seed=1):
    """Sets every parameter of the mixing to random values, so that no term is small."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (module.phi, module.alpha, module.bias, module.gamma):
            if p is not None:
                p.copy_(torch.randn(p.shape, generator=g) * (0.1 if p is module.phi else 1.0))
    return module


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["softmax", "exp", "exp_eps"])
@pytest.mark.parametrize("transpose", [False, True])
def test_starts_as_an_ordinary_residual(n, form, transpose):
    b = block(n, sinkhorn_form=form, transpose_res=transpose)
    x = torch.randn(5, n, D)
    want = x + b.sublayer(x.mean(-2)).unsqueeze(-2)
    assert relative(b(x), want) < 0.02
    # Equal streams stay nearly equal: the layer acts as n copies of a plain residual network.
    same = expand(x[:, 0], n)
    assert relative(b(same), same + b.sublayer(same[:, 0]).unsqueeze(-2)) < 0.02


@pytest.mark.parametrize(
    "kwargs",
    [
        {"residual": False},
        {"sinkhorn_iters": 0},
        {"gamma": True},
        {"post_mult": 1.5, "post_eps": 0.2},
        {"sinkhorn_iters": 1},
    ],
)
def test_every_variant_starts_as_a_residual(kwargs):
    b = block(**kwargs)
    x = torch.randn(5, N, D)
    assert relative(b(x), x + b.sublayer(x.mean(-2)).unsqueeze(-2)) < 0.02


def test_alpha_starts_small_and_depth_does_not_drift():
    blocks = nn.Sequential(*[HyperConnection(D, N, nn.Identity()) for _ in range(16)])
    assert all(torch.equal(b.alpha, torch.full((3,), 0.01)) for b in blocks)
    x = torch.randn(3, D)
    out = blocks(expand(x, N)).mean(-2)
    assert relative(out, x * 2.0**16) < 0.2  # identity sublayers double the stream in each layer


def test_head_starts_as_the_mean():
    x = torch.randn(5, N, D)
    assert relative(HyperHead(D, N)(x), x.mean(-2)) < 0.02


@pytest.mark.parametrize("kwargs", [{"gamma": True}, {"residual": False}, {"transpose_res": True, "sinkhorn_iters": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_parameter_and_x(kwargs, dtype):
    b = block(**kwargs).to(dtype)
    head = HyperHead(D, N, gamma=True).to(dtype)
    x = torch.randn(6, N, D, dtype=dtype, requires_grad=True)
    head(b(x, scale=0.7)).square().sum().backward()
    for name, p in [*b.named_parameters(), *head.named_parameters(), ("x", x)]:
        assert p.grad is not None and p.grad.dtype is dtype and p.grad.isfinite().all(), name
        assert float(p.grad.float().norm()) > 0, name


def test_further_arguments_go_to_the_sublayer():
    b, x = block(), torch.randn(3, N, D)
    assert not torch.allclose(b(x, scale=2.0), b(x))
    assert torch.equal(b(x, 2.0), b(x, scale=2.0))


def test_parameters_are_fp32_and_named_as_the_specification():
    torch.set_default_dtype(torch.bfloat16)
    try:
        b, head = block(gamma=True), HyperHead(D, N)
    finally:
        torch.set_default_dtype(torch.float32)
    own = {k: tuple(p.shape) for k, p in b.named_parameters(recurse=False)}
    assert own == {"phi": (24, N * D), "alpha": (3,), "bias": (24,), "gamma": (N, D)}
    assert {k: tuple(p.shape) for k, p in head.named_parameters()} == {"phi": (N, N * D), "alpha": (1,), "bias": (N,)}
    assert all(p.dtype is torch.float32 for p in [*b.parameters(recurse=False), *head.parameters()])
    assert "gamma" not in dict(block().named_parameters())


def test_bfloat16_modules_stay_usable():
    b = scramble(block(gamma=True))
    x = torch.randn(4, N, D)
    low = copy.deepcopy(b).bfloat16()
    assert low.phi.dtype is torch.bfloat16
    assert relative(low(x.bfloat16()), b(x)) < 0.03
    keep = copy.deepcopy(b)
    keep.sublayer.bfloat16()  # the mixing stays fp32
    assert keep(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("kwargs", [{}, {"gamma": True}, {"residual": False}])
def test_state_dict_roundtrip(kwargs, tmp_path):
    a, b = scramble(block(**kwargs)), block(seed=3, **kwargs)
    x = torch.randn(3, N, D)
    assert not torch.allclose(a(x), b(x))
    torch.save(a.state_dict(), tmp_path / "state.pt")
    b.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(a(x), b(x))


def test_options_reach_the_formula():
    """Checks that each option changes the result."""
    x = torch.randn(3, N, D)
    base = scramble(block())(x)
    for change in (
        {"transpose_res": True},
        {"sinkhorn_iters": 1},
        {"sinkhorn_eps": 0.3},
        {"sinkhorn_form": "exp", "sinkhorn_iters": 2},
        {"norm_eps": 1.0},
        {"hc_eps": 0.5},
        {"post_mult": 1.0},
        {"post_eps": 0.5},
    ):
        assert relative(scramble(block(**change))(x), base) > 1e-4, change


# --- loaders: the other projects' formulas, in their own layouts --------------------------------------------


def test_load_deepseek_v4():
    g = torch.Generator().manual_seed(0)
    m = N * N + 2 * N
    fn, base, scale = (torch.randn(s, generator=g) * 0.3 for s in ((m, N * D), (m,), (3,)))
    b = block(**CONVENTIONS["deepseek_v4"], hc_eps=1e-4, norm_eps=1e-5, sinkhorn_eps=1e-4)
    b.load_deepseek_v4({"attn_hc.fn": fn, "attn_hc.base": base, "attn_hc.scale": scale}, prefix="attn_hc.")

    x = torch.randn(2, 3, N, D, generator=g)
    flat = x.flatten(2)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-5)
    pre, post, comb = F.linear(flat, fn).split([N, N, N * N], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:N]) + 1e-4
    post = 2 * torch.sigmoid(post * scale[1] + base[N : 2 * N])
    comb = sinkhorn(comb.unflatten(-1, (N, N)) * scale[2] + base[2 * N :].view(N, N), 20, 1e-4, "softmax")
    out = b.sublayer((pre.unsqueeze(-1) * x).sum(2))
    want = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    assert relative(b(x), want) < 2e-6


def test_load_deepseek_v4_head():
    g = torch.Generator().manual_seed(0)
    fn, base, scale = (torch.randn(s, generator=g) * 0.3 for s in ((N, N * D), (N,), (1,)))
    head = HyperHead(D, N, gamma=True)
    head.load_deepseek_v4({"hc_fn": fn, "hc_base": base, "hc_scale": scale})
    x = torch.randn(2, 3, N, D, generator=g)
    flat = F.rms_norm(x.flatten(2), (N * D,), eps=1e-6)
    pre = torch.sigmoid(F.linear(flat, fn) * scale + base) + 1e-6
    assert relative(head(x), (pre.unsqueeze(-1) * x).sum(2)) < 2e-6


def test_load_liger():
    g = torch.Generator().manual_seed(0)
    m = N * N + 2 * N
    state = {"phi": torch.randn(N * D, m, generator=g) * 0.1, "b": torch.randn(m, generator=g)}
    state |= {f"alpha_{k}": torch.tensor(v) for k, v in (("pre", 0.4), ("post", -0.8), ("res", 1.3))}
    state["layer.weight"] = torch.zeros(1)  # the wrapped layer's own parameter, which the loader ignores
    b = block(**CONVENTIONS["liger"], hc_eps=1e-4, sinkhorn_iters=8)
    b.load_liger(state)

    x = torch.randn(5, N, D, generator=g)
    v = x.reshape(5, N * D)
    mix = (v @ state["phi"]) * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
    h_pre = torch.sigmoid(mix[:, :N] * 0.4 + state["b"][:N]) + 1e-4
    h_post = torch.sigmoid(mix[:, N : 2 * N] * -0.8 + state["b"][N : 2 * N]) * 2.0
    h_res = sinkhorn(mix[:, 2 * N :].view(-1, N, N) * 1.3 + state["b"][2 * N :].view(N, N), 8, 1e-6, "softmax")
    f = b.sublayer((x * h_pre.unsqueeze(-1)).sum(-2))
    want = torch.einsum("...oi,...ic->...oc", h_res, x) + h_post.unsqueeze(-1) * f.unsqueeze(-2)
    assert relative(b(x), want) < 2e-6


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_load_transformer_engine(weighted, padded):
    """Checks TransformerEngine's layout [s, b, D, n]: log-domain Sinkhorn, rows first; x @ H_res."""
    g = torch.Generator().manual_seed(0)
    m = N * N + 2 * N
    state = {
        "phi": torch.randn(32 if padded else m, D * N, generator=g) * 0.1,
        "alpha": torch.tensor([0.4, -0.8, 1.3]),
        "beta": torch.randn(1, m, generator=g),
    }
    if weighted:
        state["norm_weight"] = torch.randn(D * N, generator=g)
    b = block(**CONVENTIONS["transformer_engine"], gamma=weighted)
    b.load_transformer_engine(state)

    x = torch.randn(3, 2, D, N, generator=g)
    flat = x.reshape(6, D * N)
    weight = state.get("norm_weight", torch.ones(D * N))
    h = (flat * weight) @ state["phi"][:m].T / torch.sqrt(flat.square().mean(1, keepdim=True) + 2.0**-23)
    beta = state["beta"][0]
    h_pre = torch.sigmoid(h[:, :N] * 0.4 + beta[:N]).view(3, 2, N)
    h_post = 2 * torch.sigmoid(h[:, N : 2 * N] * -0.8 + beta[N : 2 * N]).view(3, 2, N)
    logits = (h[:, 2 * N :] * 1.3 + beta[2 * N :]).view(3, 2, N, N)
    rows, columns = torch.zeros(3, 2, N), torch.zeros(3, 2, N)
    for _ in range(20):
        rows = -torch.logsumexp(logits + columns.unsqueeze(2), dim=3)
        columns = -torch.logsumexp(logits + rows.unsqueeze(3), dim=2)
    h_res = torch.exp(rows.unsqueeze(3) + logits + columns.unsqueeze(2))
    f = b.sublayer((x @ h_pre.unsqueeze(-1)).squeeze(-1))
    want = f.unsqueeze(-1) @ h_post.unsqueeze(-2) + x @ h_res
    assert relative(b(x.transpose(-1, -2)).transpose(-1, -2), want) < 2e-6


def states():
    m = N * N + 2 * N
    zeros = torch.zeros
    liger = {
        "phi": zeros(N * D, m),
        "b": zeros(m),
        "alpha_pre": zeros(()),
        "alpha_post": zeros(()),
        "alpha_res": zeros(()),
    }
    return {
        "deepseek_v4": {"fn": zeros(m, N * D), "base": zeros(m), "scale": zeros(3)},
        "liger": liger,
        "transformer_engine": {"phi": zeros(m, N * D), "alpha": zeros(3), "beta": zeros(1, m)},
    }


@pytest.mark.parametrize("project", CONVENTIONS)
def test_loaders_refuse_what_does_not_fit(project):
    state = states()[project]
    load = lambda b, s: getattr(b, f"load_{project}")(s)  # noqa: E731
    other = dict(CONVENTIONS[project])
    other["transpose_res"] = not other["transpose_res"]
    with pytest.raises(ValueError, match=f"{project} has transpose_res=.* construct it with"):
        load(block(**other), state)
    other = dict(CONVENTIONS[project])
    other["sinkhorn_form"] = "exp" if other["sinkhorn_form"] == "softmax" else "softmax"
    with pytest.raises(ValueError, match=f"{project} has sinkhorn_form="):
        load(block(**other), state)
    b = block(**CONVENTIONS[project])
    before = {k: p.clone() for k, p in b.named_parameters()}
    for key in state:
        with pytest.raises(KeyError, match=f"the state has no {key}"):
            load(b, {k: t for k, t in state.items() if k != key})
    bad = dict(state)
    first = next(iter(bad))
    bad[first] = bad[first][:, :-1]
    with pytest.raises(ValueError, match="phi must have shape"):
        load(b, bad)
    assert all(torch.equal(p, before[k]) for k, p in b.named_parameters())  # a refused load changes no parameter


def test_a_norm_weight_needs_gamma():
    state = {**states()["transformer_engine"], "norm_weight": torch.ones(D * N)}
    with pytest.raises(ValueError, match="construct it with gamma=True"):
        block(**CONVENTIONS["transformer_engine"]).load_transformer_engine(state)


def test_bad_construction():
    with pytest.raises(TypeError, match=r"sublayer must be a torch\.nn\.Module, got NoneType"):
        HyperConnection(D, N)
    with pytest.raises(ValueError, match="n must be from 2 to 8 streams, got 9"):
        HyperConnection(D, 9, Sub())
    with pytest.raises(ValueError, match="dim must be at least 16, got 8"):
        HyperHead(8, 4)


def test_compiles_as_one_graph():
    model = nn.Sequential(block(), HyperHead(D, N))
    x = torch.randn(3, N, D)
    assert torch.allclose(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x), atol=1e-6)


def test_repr_names_the_conventions():
    assert "transpose_res=True" in repr(block(transpose_res=True)) and "sinkhorn_form='exp'" in repr(
        block(sinkhorn_form="exp")
    )
