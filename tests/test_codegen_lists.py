"""The CUDA code of compiled graphs with attention over lists of keys, without a GPU: which kernels it launches on what."""

from __future__ import annotations

import re

import pytest
import torch
from fakecuda import fake_cuda, generated_code, on_a_cpu_build
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor

pytestmark = [pytest.mark.usefixtures("no_caches"), on_a_cpu_build]


def _compile(fn, S=64, T=128, n=20, h=4, D=32, dynamic=None):
    torch._dynamo.reset()
    with fake_cuda(), FakeTensorMode():
        q = torch.empty(2, S, 1, h, D, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, T, 1, D, device="cuda", dtype=torch.bfloat16)
        indices = torch.empty(2, S, 1, n, device="cuda", dtype=torch.int64)
        codes = generated_code(
            lambda: torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="mhc_inductor")(q, k, indices)
        )
    assert len(codes) == 1
    return codes[0][codes[0].index("def call(") :]


def _launches(code):
    return re.findall(r"^\s+(\w+?)(?:_\d+)?\.run\(", code, re.MULTILINE)


def _attend(q, k, indices):
    k = k.transpose(1, 2)
    return mhc_inductor.selection_attention(q, k, k, indices=indices)


@pytest.mark.parametrize("S", [1, 300])
def test_the_forward_is_launched_from_the_code_and_reads_views_in_place(S):
    code = _compile(_attend, S)
    ours = [n for n in _launches(code) if n.startswith("selection_")]
    # Two sequences of one query split their keys.
    assert ours == ["selection_list_keys", "selection_list_forward", *["selection_combine"] * (S == 1)]
    assert "torch.ops.mhc_inductor" not in code
    assert not [n for n in _launches(code) if n.startswith("triton_")], "no copy"


def test_dynamic_sizes_stay_symbolic():
    code = _compile(_attend, dynamic=True)
    call = re.search(r"^\s+selection_list_forward\w*\.run\((.*)\)", code, re.MULTILINE)[1]
    assert re.search(r"\bs\d+\b", call)
    assert "torch.ops.mhc_inductor" not in code


def test_rows_of_latent_attention_call_the_op_for_its_gluon_kernel():
    code = _compile(_attend, h=64, D=512)
    assert "torch.ops.mhc_inductor.selection_list_attention.default" in code


def test_the_backward_calls_the_op():
    def both(q, k, indices):
        k = k.transpose(1, 2)
        args = (q, k, None, indices, *[None] * 5)
        ops = torch.ops.mhc_inductor
        o, lse = ops.selection_list_attention(*args, 0.1, 32)
        return ops.selection_list_attention_backward(o, None, *args, o, lse, 0.1, 32)

    code = _compile(both)
    assert "torch.ops.mhc_inductor.selection_list_attention_backward.default" in code
    assert "selection_list_forward" in _launches(code)


def test_above_the_kernels_sizes_the_reference_is_called_and_logged(caplog):
    with caplog.at_level("WARNING", logger="mhc_inductor"):
        code = _compile(_attend, D=600)
    assert "torch.ops.mhc_inductor.selection_list_attention.default" in code
    assert [r for r in caplog.records if "D = 600 is above 576" in r.getMessage()]
