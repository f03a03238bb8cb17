# SPDX-License-Identifier: Apache-2.0
"""What a profiler shows of a step on a GPU: a scope for each op, the kernels that it launches, and NVTX ranges."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import mhc_inductor
from mhc_inductor.nn import HyperConnection

pytestmark = pytest.mark.gpu
D, TOKENS = 256, 512
OPS = ("mhc_pre", "mhc_post")


def step(call: nn.Module) -> None:
    call(torch.ones(1, TOKENS, 4, D, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("nvtx", [False, True], ids=["scopes", "nvtx"])
def test_scopes_and_kernels_are_in_the_trace(compiled: bool, nvtx: bool) -> None:
    torch.manual_seed(0)
    model = HyperConnection(D, 4, nn.Linear(D, D, dtype=torch.bfloat16)).cuda()
    options: dict[str, str | int | bool] = {"mhc_inductor.profile_scopes": True}
    call = torch.compile(model, backend="mhc_inductor", options=options) if compiled else model
    step(call)  # compiles
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as trace, mhc_inductor.op_scopes(nvtx=nvtx):
        step(call)
    events = trace.events() or ()
    host = {e.name for e in events if e.device_type == DeviceType.CPU}
    kernels = {e.name for e in events if e.device_type == DeviceType.CUDA}
    for op in OPS:
        assert any(name.startswith(f"{op} x bfloat16[1, 512, 4, 256]") for name in host), sorted(host)
        assert f"mhc_inductor::{op}_backward" in host
    assert any("mhc_post" in name for name in kernels) and any("mhc_pre" in name for name in kernels), sorted(kernels)


def test_counts_are_those_of_a_cpu() -> None:
    def counted(device: str) -> mhc_inductor.OpCounts:
        model = HyperConnection(D, 4, nn.Linear(D, D)).to(device)
        with mhc_inductor.count_ops() as counts:
            model(torch.ones(1, TOKENS, 4, D, device=device)).square().mean().backward()
        return counts

    assert counted("cuda") == counted("cpu")
