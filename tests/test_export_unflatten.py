# SPDX-License-Identifier: Apache-2.0
"""Routed programs are unflattened into submodules that give the program's values, also where formulas cross them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_export import Site, randn, sparse, through_a_file
from torch import Tensor, nn

from mhc_inductor import explain, route_exported
from tests.formulas.reference_models_e79 import DIM, STATE, StepByStep
from tests.formulas.reference_models_mhc import _balanced, parameters
from tests.tools.capture import ops_of

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("one_thread")]


class Part(nn.Module):
    """A step of a formula as a module of its own."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *given: Any) -> Any:
        return self.fn(*given)


class Coefficients(nn.Module):
    """Projects normed streams and makes the coefficients of a site; the norm and the matrix are modules too."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.p = nn.ParameterDict({k: nn.Parameter(t.detach()) for k, t in parameters(seed).items()})
        self.inverse = Part(lambda v: torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6))
        self.balanced = Part(_balanced)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, a, b = x.flatten(-2), self.p["alpha"], self.p["bias"]
        z = F.linear(v, self.p["phi"]) * self.inverse(v)
        res = self.balanced((a[2] * z[..., 8:] + b[8:]).unflatten(-1, (4, 4)))
        return (torch.sigmoid(a[0] * z[..., :4] + b[:4]) + 1e-6, 2 * torch.sigmoid(a[1] * z[..., 4:8] + b[4:8]), res)


class Parts(nn.Module):
    """A site of four submodules. Given weights ``before`` collapse the streams instead of its own: a single pass."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.coefficients = Coefficients(seed)
        self.collapse = Part(lambda x, pre: (pre.unsqueeze(-1) * x).sum(-2))
        self.f = nn.Linear(32, 32)
        self.post = Part(lambda x, y, post, res: post.unsqueeze(-1) * y.unsqueeze(-2) + res.transpose(-1, -2) @ x)

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pre, post, res = self.coefficients(x)
        y = torch.tanh(self.f(self.collapse(x, pre if before is None else before)))
        return self.post(x, y, post, res), pre


class Layers(nn.Module):
    """Sites one after another; ``shared``: the second is the first again."""

    def __init__(self, make: Callable[[], nn.Module], shared: bool = False) -> None:
        super().__init__()
        self.a = make()
        self.b = self.a if shared else make()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.a if self.shared else self.b):
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Nested(nn.Module):
    """Layers of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Parts(1), Site()])
        self.again = Layers(Parts, shared=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layers[1](self.layers[0](x)[0]) * 0.5)


class SinglePass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sites = nn.ModuleList([Parts(1), Parts(2), Parts(3)])
        self.last = Part(lambda x, pre: (pre.unsqueeze(-1) * x).sum(-2))

    def forward(self, x: Tensor) -> Tensor:
        pre = torch.tensor([1.0, 0, 0, 0]).expand(*x.shape[:-1])
        for site in self.sites:
            x, pre = site(x, pre)
        return self.last(x, pre)


class Recurrence(StepByStep):
    """E79 whose cell is a module that every step calls, with projections in modules of their own."""

    def __init__(self) -> None:
        super().__init__(1)
        self.step = Part(self.cell)
        self.norm = Part(lambda x: F.silu(x))

    def forward(self, x: Tensor) -> Tensor:
        S = M = x.new_zeros(x.shape[1], STATE, STATE)
        outs, z = [], self.inner[0](x)
        for t in range(x.shape[0]):
            S, M, y = self.step(S, M, z[t])
            outs.append(y)
        return self.norm(self.outer[0](torch.stack(outs))) + S.sum() + M.sum()


class Attention(nn.Module):
    """Attention under a window and blocks: mask, scores, weights and output in four modules."""

    def __init__(self) -> None:
        super().__init__()

        def mask(S: int, topk: Tensor) -> Tensor:
            rows, cols = torch.arange(S)[:, None], torch.arange(S)[None, :]
            picked = (cols.view(1, 1, 1, S) // 4 == topk[..., None]).any(2)
            return (picked | (cols > rows - 6)) & (cols <= rows)

        self.mask = Part(mask)
        self.scores = Part(lambda q, k: q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        self.weights = Part(lambda s, m: s.masked_fill(~m[:, None], -torch.inf).softmax(-1))
        self.output = Part(lambda p, v: p @ v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, topk: Tensor) -> Tensor:
        return self.output(self.weights(self.scores(q, k), self.mask(q.shape[2], topk)), v)


STREAMS = (randn(2, 3, 4, 32),)
PICKED = (torch.arange(16) // 4).view(1, 16, 1).repeat(2, 1, 2) * torch.tensor([1, 0])
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, int]]] = {
    "two layers": (lambda: Layers(Site), STREAMS, {"mhc_pre": 2, "mhc_post": 2}),
    "a layer twice": (lambda: Layers(Site, shared=True), STREAMS, {"mhc_pre": 2, "mhc_post": 2}),
    "parts": (lambda: Layers(Parts), STREAMS, {"mhc_pre": 2, "mhc_post": 2}),
    "nested": (Nested, STREAMS, {"mhc_pre": 4, "mhc_post": 4}),
    "single pass": (SinglePass, STREAMS, {"mhc_coefficients": 3, "mhc_post": 3, "mhc_collapse": 4}),
    "recurrence": (Recurrence, (randn(4, 2, DIM),), {"e79_scan": 1}),
    "attention": (
        Attention,
        (randn(2, 3, 16, 8), randn(2, 3, 16, 8) * 0.5, randn(2, 3, 16, 6), PICKED),
        {"selection_attention": 1},
    ),
    "indexer": (sparse, (randn(2, 16, 24),), {"index_topk": 1, "selection_attention": 1}),
}


def _same(got: Tensor, want: Tensor) -> bool:
    return bool(torch.allclose(got, want, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", MODELS)
def test_formulas_across_submodules(name: str, strict: bool) -> None:
    make, args, ops = MODELS[name]
    torch.manual_seed(1)
    model = make()
    want, exported = model(*args), torch.export.export(model, args, strict=strict)
    for program in (exported, exported.run_decompositions()):
        routed = route_exported(program)
        assert ops_of(routed.graph_module) == Counter(ops)
        for one in (routed, through_a_file(routed)):
            assert _same(torch.export.unflatten(one)(*args), want)


CROSSED = [(name, path) for name in ("two layers", "parts") for path in ("a", "b")]
CROSSED += [("parts", "a.coefficients"), ("parts", "b.post"), ("parts", "a.coefficients.inverse")]
CROSSED += [("nested", "again"), ("recurrence", "step"), ("attention", "weights"), ("indexer", "indexer")]


@pytest.mark.parametrize(("name", "path"), CROSSED)
def test_a_submodule_whose_signature_is_kept(name: str, path: str) -> None:
    """Checks that such a submodule still takes the model's inputs and gives its outputs, called alone and as a part."""
    make, args, _ = MODELS[name]
    torch.manual_seed(1)
    model = make()
    seen: list[Any] = []
    part = model.get_submodule(path)
    handle = part.register_forward_hook(lambda _, given, out: seen.append((given, out)))
    want = model(*args)
    handle.remove()
    program = torch.export.export(model, args, preserve_module_call_signature=(path,))
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(r.op for r in explain(program).routed)
    for one in (routed, through_a_file(routed)):
        module = torch.export.unflatten(one)
        assert _same(module(*args), want)
        given, out = seen[0]
        got = module.get_submodule(path)(*given)
        pairs = zip(got, out, strict=True) if isinstance(out, tuple) else [(got, out)]
        assert all(_same(a, b) for a, b in pairs)
