# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with the E79 scan, without a GPU: which kernels, or which op, it calls."""

from __future__ import annotations

import re

import pytest
import torch

import mhc_inductor  # noqa: F401  (registers the ops)
from mhc_inductor import compat
from mhc_inductor.kernels.e79 import plan
from tests.test_codegen import called_and_logged, compiled
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches, runs

OPS, F32 = torch.ops.mhc_inductor, torch.float32
N = 32
BACKWARD = ("e79_backward", "e79_finish")

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


@pytest.fixture
def plain_triton(monkeypatch):
    """Forces plain Triton, as in an AOTInductor package or on a device without Gluon."""
    monkeypatch.setattr(plan, "runs_gluon", lambda *_: False)


def _scan(x, w, bias, S0):
    """Computes a scan and its gradients in one graph: autograd itself needs a real device."""
    kvqm = x @ w
    out, S, M, checkpoints, gates = OPS.e79_scan(kvqm, bias, None, S0, None, 8)
    return out, S, M, OPS.e79_scan_backward(out, S, None, kvqm, bias, None, S0, None, checkpoints, gates, 8)[:2]


def _compile(fn, steps, batch, bias, dynamic=None):
    sizes = {"none": None, "fixed": ((N,), F32), "input": ((steps, batch, N), F32)}[bias]
    given = ((steps, batch, 48), F32), ((48, 4 * N), F32), sizes, ((batch, N, N), F32)
    return compiled(fn, *given, dynamic=dynamic)


@pytest.mark.parametrize("bias", ["none", "fixed", "input"])
@pytest.mark.parametrize(("steps", "batch"), [(20, 3), (1, 1), (2, 1)])
def test_plain_triton_is_launched_from_the_generated_code(plain_triton, bias, steps, batch):
    code = _compile(_scan, steps, batch, bias)
    sums = ["e79_bias_sum"] if bias == "fixed" else []
    assert launches(code, "e79_")[0] == "e79_forward"
    assert sorted(launches(code, "e79_")) == sorted(["e79_forward", *BACKWARD, *sums])
    assert "torch.ops.mhc_inductor" not in code


def test_gluon_is_called_through_the_op():
    code = _compile(_scan, 20, 3, "fixed")
    assert launches(code, "e79_") == []
    assert len(re.findall(r"torch\.ops\.mhc_inductor\.e79_scan\.default\(", code)) == 1
    assert len(re.findall(r"torch\.ops\.mhc_inductor\.e79_scan_backward\.default\(", code)) == 1


def test_one_step_is_launched_from_the_generated_code():
    def step(x, w, bias, S0):
        return OPS.e79_scan(x @ w, bias, bias, S0, S0, 0)[:3]

    code = _compile(step, 1, 4, "fixed")
    assert launches(code, "e79_") == ["e79_forward"]
    assert "torch.ops.mhc_inductor" not in code


def test_a_package_launches_plain_triton(monkeypatch):
    monkeypatch.setattr(compat.lowerings, "packaging", lambda: True)
    code = _compile(_scan, 20, 3, "fixed")
    assert sorted(launches(code, "e79_")) == sorted(["e79_forward", *BACKWARD, "e79_bias_sum"])


def test_dynamic_sizes_stay_symbolic(plain_triton):
    code = _compile(_scan, 20, 3, "input", dynamic=True)
    found = runs(code, "e79_")
    assert len(found) == 3
    assert all(re.search(r"\bs\d+", launch.arguments) for launch in found)


def test_above_128_the_reference_is_called_and_logged_once(caplog):
    scan = lambda x: OPS.e79_scan(x, None, None, None, None, 0)[0]  # noqa: E731
    called_and_logged(caplog, lambda: compiled(scan, ((4, 2, 4 * 136), F32)), "e79_scan", "n = 136 is above 128")
