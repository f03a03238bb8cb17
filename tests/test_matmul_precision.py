# SPDX-License-Identifier: Apache-2.0
"""PyTorch has two settings of how float32 products round. Transformers' Trainer sets the newer one on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from mhc_inductor import compat, doctor, mhc_post, mhc_pre
from mhc_inductor.kernels.launch import EagerBuilder
from mhc_inductor.warming import side_by_side
from tests.formulas.reference_models_mhc import BOTH, WIDTH, N, liger, parameters
from tests.tools.capture import run


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    unset()
    try:
        yield
    finally:
        unset()
        torch._dynamo.reset()


def unset() -> None:
    """Sets what a process begins with. The older setting also sets the newer one of each library."""
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for library in (torch.backends.cuda, torch.backends.mkldnn):
        library.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def tf32() -> None:
    """Sets TF32 as transformers does for ``tf32=True``, and for ``torch_compile=True``; the getter raises after it."""
    torch.backends.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()


def test_either_setting_is_read() -> None:
    assert compat.matmul_precision() == "highest"
    tf32()
    assert compat.matmul_precision() == "high"
    torch.backends.fp32_precision = "ieee"
    assert compat.matmul_precision() == "highest"
    torch.backends.fp32_precision = "none"
    for name in ("medium", "high", "highest"):
        torch.set_float32_matmul_precision(name)
        assert compat.matmul_precision() == name
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # what CUDA's products follow
    assert compat.matmul_precision() == "highest"


def test_what_transformers_sets_is_read() -> None:
    enable_tf32 = pytest.importorskip("transformers.utils.import_utils").enable_tf32
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", True)
        enable_tf32(True)
        assert compat.matmul_precision() == "high"
        enable_tf32(False)
        assert compat.matmul_precision() == "highest"


@pytest.mark.parametrize("setting", ["highest", "tf32"])
def test_formulas_are_routed_with_either_setting(setting: str) -> None:
    if setting == "tf32":
        tf32()
    p = parameters()
    x = torch.randn(2, 5, N, WIDTH)
    got = run(lambda x: liger(x, p), (x,), list(p.items()), grad=True)
    assert dict(got.ops) == BOTH, got.report.problems
    assert not got.report.problems


def layer(x: torch.Tensor, phi: torch.Tensor, alpha: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, sinkhorn_iters=2)
    return mhc_post(x, h_in, h_post, h_res, transpose_res=True)


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s) for s in ((3, 4, 16), (24, 64), (3,), (24,))]


def test_a_change_by_the_newer_setting_recompiles() -> None:
    counter: Any = torch._dynamo.testing.CompileCounterWithBackend("mhc_inductor")
    step, args = torch.compile(layer, backend=counter), arguments()
    want = step(*args)
    once = counter.frame_count
    tf32()
    torch.testing.assert_close(step(*args), want, atol=1e-5, rtol=1e-5)
    assert counter.frame_count > once


def test_launch_plans_and_processes_read_it() -> None:
    builder = EagerBuilder(torch.device("cpu"))
    assert builder.precision == "highest"
    tf32()
    assert builder.precision == "high"
    assert side_by_side._modes()["precision"] == ("high", "tf32")
    assert doctor._state()["float32 matmul precision"] == "high"
