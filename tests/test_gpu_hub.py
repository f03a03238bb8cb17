# SPDX-License-Identifier: Apache-2.0
"""The kernel of the Hugging Face hub on a GPU, loaded as the library ``kernels`` loads it, which need not be installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mhc_inductor.integrations import hub
from mhc_inductor.nn import HyperConnection, SelectionAttention, SparseIndexer

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    variant = hub.build(tmp_path_factory.mktemp("hub") / "kernel", [DEVICE])[DEVICE]
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sparse(nn.Module):
    """Attention over the keys that an indexer chooses, in a hyper-connection's sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(256, 128)
        self.index, self.attend = SparseIndexer(16), SelectionAttention(1, 4, sink=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([256, 64, 64], -1)
        picks = self.index(q.detach().unflatten(-1, (4, 64)), k.detach(), x.detach()[..., :4].abs())
        return self.out(self.attend(q.unflatten(-1, (1, 4, 64)), k[:, None], v[:, None], indices=picks).flatten(2))


def _run(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = call(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_have_the_bits_of_the_modules(kernel: ModuleType, compiled: bool) -> None:
    """The kernel launches the same Triton kernels; torch.compile makes other code for the layers around them."""
    torch.manual_seed(0)
    model = nn.Sequential(HyperConnection(128, 4, Sparse()), HyperConnection(128, 4, nn.Linear(128, 128))).to(DEVICE)
    x = torch.randn(2, 64, 4, 128, device=DEVICE)
    want = _run(model, model, x)
    for module in model.modules():
        layer = getattr(kernel.layers, type(module).__name__, None)
        if layer is not None:
            module.forward = MethodType(layer.forward, module)
    torch._dynamo.reset()
    call: Any = torch.compile(model, fullgraph=True) if compiled else model
    for got, expected in zip(_run(model, call, x), want, strict=True):
        if compiled:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(got, expected)
