# SPDX-License-Identifier: Apache-2.0
"""Kernels compile while code generation continues: Inductor's workers get each source as soon as it is known."""

from __future__ import annotations

import ast
from unittest import mock

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor import compat
from mhc_inductor.kernels import COMPILED
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu
from tests.tools.generated import runs

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


def _layer(x, phi, alpha, bias):
    h_in, h_post, h_res = mhc_inductor.mhc_pre(x, phi, alpha, bias, sinkhorn_iters=20)
    return mhc_inductor.mhc_post(x, torch.tanh(h_in), h_post, h_res, transpose_res=False)


def _generate(model=_layer, dtype=torch.bfloat16):
    """Returns the generated source of ``model``."""
    with fake_cuda(), FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 64, 4, 256, dtype=dtype, device="cuda")
        phi, alpha, bias = (torch.empty(*n, device="cuda") for n in ((24, 1024), (3,), (24,)))
        (code,) = generated_code(
            lambda: torch.compile(model, fullgraph=True, backend="mhc_inductor")(x, phi, alpha, bias)
        )
    return code


def _kernels(code: str) -> dict[str, str]:
    """Returns the evaluated name and source of each ``async_compile.triton`` call in a generated module."""
    calls = [
        n
        for n in ast.walk(ast.parse(code))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "async_compile.triton"
    ]
    return dict([ast.literal_eval(a) for a in call.args[:2]] for call in calls)


@pytest.mark.parametrize("ready", [True, False])
def test_workers_that_are_ready_get_every_kernel(ready):
    submitted = []

    def triton(self, name, source, *args, **kwargs):
        submitted.append((name, source))

    with (
        mock.patch.object(AsyncCompile, "use_process_pool", classmethod(lambda cls: ready)),
        mock.patch.object(AsyncCompile, "triton", triton),
    ):
        code = _generate()
    kernels = _kernels(code)
    assert {"mhc_post", "mhc_pre_project"} <= set(kernels)
    # The sources must be identical, since Inductor recognises a submitted kernel by its source.
    assert submitted == (list(kernels.items()) if ready else [])


def test_our_kernels_are_marked_for_launches_without_triton_s_launcher():
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.hints import HeuristicType

    sources = _kernels(_generate())
    names = [n for n in sources if n.startswith("mhc_")]
    assert len(names) >= 4
    for name in names:
        kernel = getattr(PyCodeCache.load(sources[name]), name)
        assert kernel.heuristic_type is HeuristicType.FIXED and kernel.custom_kernel
        assert len(kernel.configs) == 1 and kernel.configs[0].kwargs, "constants are still bound"
        assert COMPILED.items() <= kernel.triton_meta.items()


def test_each_kernel_is_analysed_once():
    from torch._higher_order_ops import triton_kernel_wrap

    def layers(x, phi, alpha, bias):
        for _ in range(3):
            x = _layer(x, phi, alpha, bias)
        return x

    asked = []
    generate = triton_kernel_wrap.generate_ttir

    def generate_ttir(kernel, *args):
        asked.append(kernel.fn.__name__)
        return generate(kernel, *args)

    compat.lowerings.configured_kernel.cache_clear()
    with mock.patch.object(triton_kernel_wrap, "generate_ttir", generate_ttir):
        code = _generate(layers)
        assert sorted(asked) == ["mhc_post", "mhc_pre_collapse", "mhc_pre_project", "mhc_pre_weights"]
        # Another dtype needs its own analysis.
        _generate(layers, torch.float16)
    assert len(asked) == 8
    assert len(runs(code, "mhc_post")) == 3
