# SPDX-License-Identifier: Apache-2.0
"""Kernels of ops that generated code calls compile on threads, starting when the graph is lowered."""

from __future__ import annotations

import concurrent.futures
import logging
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor.kernels import background, eager
from mhc_inductor.kernels.e79.gluon_forward import e79_forward_gluon
from mhc_inductor.kernels.launch import DeviceProps, Recorder
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]
START = background.start
CALL = "torch.ops.mhc_inductor.e79_scan.default("


@pytest.fixture(autouse=True)
def nothing_started():
    with mock.patch.dict(background.pending, clear=True), mock.patch.object(background, "_started", set()):
        yield


def _scan(steps: int = 8, n: int = 16, dynamic: bool = False) -> str:
    """Returns the generated code of one scan."""
    kvqm = torch.empty(steps, 2, 4 * n, device="cuda")
    call = torch.compile(lambda x: mhc_inductor.e79_scan(x)[0], backend="mhc_inductor", dynamic=dynamic)
    with torch.no_grad():
        (code,) = generated_code(lambda: call(kvqm))
    return code


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_called_ops_kernels_compile_in_the_background(dynamic):
    e79_forward_gluon.device_caches.clear()
    with (
        fake_cuda(),
        FakeTensorMode(),
        mock.patch.object(background, "start", START),
        mock.patch.object(e79_forward_gluon, "_do_compile", wraps=e79_forward_gluon._do_compile) as compiled,
    ):
        assert CALL in _scan(dynamic=dynamic)
        assert list(background.pending) == [e79_forward_gluon]
        assert [f.exception() for f in background.pending[e79_forward_gluon]] == [None]
        background.finish(e79_forward_gluon)
        assert background.pending == {}
        # The kernel that a launch needs is compiled already, for any number of steps.
        for steps in (8, 16):
            kvqm = torch.empty(steps, 2, 64, device="meta")
            recorder = Recorder(DeviceProps(132, "cuda", 90))
            eager.plan_of("e79_scan")(recorder, kvqm, None, None, None, None, 0)
            (launch,) = recorder.launches
            background._compile(torch.device("cuda", 0), *launch)
        assert compiled.call_count == 1


def test_kernels_that_generated_code_launches_are_left_to_inductors_workers():
    with fake_cuda(), FakeTensorMode(), mock.patch.object(background, "start", START):
        assert CALL not in _scan(steps=1)
    assert background.pending == {}


def test_a_launch_waits_for_its_kernel_and_survives_its_failure(caplog):
    class Kernel:
        launched = 0

        def warmup(self, **_):
            raise RuntimeError("no such device")

        def __getitem__(self, grid):
            def run(**_):
                self.launched += 1

            return run

    kernel = Kernel()
    device = torch.device("cpu")
    builder = eager.EagerBuilder(device)
    with mock.patch.object(torch.cuda, "device", mock.MagicMock()):
        background.start((kernel, {"x": torch.empty(2)}, {}, 4, 1), device)
        concurrent.futures.wait(background.pending[kernel])
    with caplog.at_level(logging.DEBUG, "mhc_inductor"):
        builder.launch(kernel, (1, 1, 1), {}, {}, 4, 1)
    assert kernel.launched == 1 and background.pending == {}
    assert "no such device" in caplog.text


def test_a_plan_that_fails_in_the_background_does_not_fail_the_compile(caplog):
    def broken(*_):
        raise ValueError("odd hint")

    with (
        mock.patch.object(eager, "plan_of", lambda name: broken),
        mock.patch.object(eager, "device_props", lambda index: DeviceProps(132, "cuda", 90)),
        caplog.at_level(logging.DEBUG, "mhc_inductor"),
    ):
        eager.compile_in_background("e79_scan", [torch.empty(1, device="meta")], torch.device("cuda", 0))
    assert "odd hint" in caplog.text and background.pending == {}
