# SPDX-License-Identifier: Apache-2.0
"""Single-pass mHC on a GPU: the registered ops, compiled training steps, CUDA graphs, and no copies of the streams."""

from __future__ import annotations

import copy

import pytest
import torch
from test_gpu import assert_as_accurate, kernels_of
from test_post_project import HOPPER
from torch import nn

import mhc_inductor
from mhc_inductor.nn import HyperConnection
from tests.oracles import mhc as h
from tests.oracles import single_pass as one

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
N = 4


class Model(nn.Module):
    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            HyperConnection(width, N, nn.Linear(width, width, bias=False), single_pass=True, transpose_res=True)
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h_pre = None
        for block in self.blocks:
            x, h_pre = block((x, h_pre))
        return mhc_inductor.mhc_collapse(x, h_pre)


def model_of(width: int) -> Model:
    torch.manual_seed(0)
    model = Model(width).cuda()
    with torch.no_grad():
        for block in model.blocks:
            block.alpha.fill_(1.0)
            block.sublayer.bfloat16()
    return model


def gradients(fn, model, x, g):
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = fn(x)
    out.backward(g.to(out.dtype))
    return [out.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("width", [256, 4096])
def test_registered_ops_run_the_kernels_and_agree(width):
    inputs = one.make_inputs((130,), N, width, BF16, device="cuda")
    options = {"sinkhorn_iters": 20}
    up = h.upstream({k: v for k, v in one.run(inputs, True, None, options).items() if k in one.UP})
    got = {}
    names = kernels_of(lambda: got.update(one.run(inputs, True, up, options)))
    want = one.oracle(inputs, True, got["x_out"], up, options)
    # The gradient of x_out is rounded once; dx, df, dh_post and dh_res are computed from it.
    through = {k: got.pop(k) for k in ("dx", "df_out", "dh_post", "dh_res")}
    # The backward computes x_out again, with other fused multiply-adds: about 1 of 10,000 elements rounds the other way.
    again = {"dh_pre": got.pop("dh_pre")}
    h.compare(got, want, 2e-6, 1.05)
    h.compare(again, want, 3e-5, 1.05)
    h.compare(through, want, 2e-6 + h.rounding(BF16), 1.05)
    few = width == 4096 and HOPPER
    forward = {"mhc_post_project_few", "mhc_blocks_coefficients"} if few else {"mhc_post", "mhc_coefficients"}
    assert {n for n in names if "mhc_" in n} >= forward | {"mhc_post_backward", "mhc_pre_backward_dx"}
    assert all("mhc_" in n for n in names), names


@pytest.mark.parametrize("backend", ["mhc_inductor", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step(backend, dynamic):
    torch._dynamo.reset()
    model, x = model_of(512), torch.randn(192, N, 512, device="cuda", dtype=BF16)
    g = torch.randn(192, 512, device="cuda", dtype=BF16)
    exact = copy.deepcopy(model).cpu().double()
    want = gradients(exact, exact, x.cpu().double(), g.cpu())
    step = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    assert_as_accurate(gradients(step, model, x, g), gradients(model, model, x, g), want)


def test_cuda_graphs():
    torch._dynamo.reset()
    model, x = model_of(256), torch.randn(64, N, 256, device="cuda", dtype=BF16)
    step = torch.compile(model, backend="mhc_inductor", mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        want = model(x)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert h.relative(step(x), want) < 3e-3


def test_no_copy_of_the_streams():
    torch._dynamo.reset()
    model, x = model_of(512), torch.randn(192, N, 512, device="cuda", dtype=BF16)
    step = torch.compile(model, backend="mhc_inductor", fullgraph=True)
    gradients(step, model, x, torch.ones(192, 512, device="cuda"))
    names = kernels_of(lambda: step(x).sum().backward())
    assert not [n for n in names if "memcpy" in n.lower()], names
