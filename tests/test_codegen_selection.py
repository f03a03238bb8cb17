# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with selection attention, without a GPU: which kernels it launches on what."""

from __future__ import annotations

import re

import pytest
import torch

import mhc_inductor  # noqa: F401  (registers the ops)
from tests.test_codegen import called_and_logged, compiled
from tests.tools.deterministic import deterministic_algorithms
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches, runs

OPS = torch.ops.mhc_inductor
LISTS = ("selection_pieces", "selection_finite", "selection_lists")
SCALE = 32**-0.5

pytestmark = [
    pytest.mark.usefixtures("no_caches"),
    without_a_gpu,
]


def _attention(q, k, v, ranges):
    return OPS.selection_attention(q, k, v, ranges, None, None, None, SCALE)


def _turned(q, k, v, ranges):
    return _attention(q, k.transpose(1, 2), v.transpose(1, 2), ranges)


def _both(q, k, v, ranges):
    """Computes a forward and its gradients in one graph: autograd itself needs a real device."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    o, lse = _attention(q, k, v, ranges)
    return o, OPS.selection_attention_backward(o, lse, q, k, v, ranges, None, None, None, o, lse, SCALE)


def _compile(fn, S, S_kv=None, r=4, dynamic=None, D=32):
    keys = (2, S_kv or S, 2, D)
    return compiled(fn, (2, S, 2, 4, D), keys, keys, ((2, S, 2, r, 2), torch.int32), dynamic=dynamic)


def _arguments(code, kernel):
    return runs(code, kernel)[0].arguments


def _pointwise(code):
    """Returns the arguments of Inductor's own kernels, except those that only clear the bitmaps."""
    return [args for *_, args in runs(code, "triton_") if not re.match(r"buf\d+, \S+, stream", args)]


def test_views_of_keys_are_read_in_place():
    code = _compile(_turned, 64)
    assert sorted(n for n in launches(code) if n.startswith("selection")) == sorted([*LISTS, "selection_forward"])
    assert "torch.ops.mhc_inductor" not in code
    assert not _pointwise(code), "no copy"
    assert _arguments(code, "selection_forward").count("reinterpret_tensor(arg") == 2


def test_computed_keys_are_read_in_place():
    def fn(q, k, v, ranges):
        kv = torch.cat((k, v), 3).relu()
        return _attention(q * 2, kv.narrow(3, 0, 32).transpose(1, 2), kv.narrow(3, 32, 32).transpose(1, 2), ranges)

    code = _compile(fn, 64)
    assert launches(code).count("selection_forward") == 1
    assert len(_pointwise(code)) <= 3, "q, and the keys and values once"
    assert _arguments(code, "selection_forward").count("(8192, 64, 128, 1)") == 2


def test_expanded_and_transposed_inputs():
    def fn(q, k, v, ranges):
        k = k.narrow(2, 0, 1).expand(-1, -1, 2, -1).transpose(1, 2)
        v = v.permute(0, 2, 3, 1)  # the last dimension has no stride of 1
        return _attention(q, k, v, ranges)

    code = _compile(fn, 32)
    assert launches(code).count("selection_forward") == 1
    assert "(2048, 0, 64, 1)" in _arguments(code, "selection_forward"), "no copy of what is expanded"
    assert len(_pointwise(code)) == 1, "a copy of v"


def test_forward_and_backward_launch_from_the_generated_code():
    code = _compile(_both, 64)
    launched = launches(code)
    assert launched.count("selection_forward") == launched.count("selection_dq") == launched.count("selection_dkv") == 1
    assert "torch.ops.mhc_inductor" not in code


@pytest.mark.parametrize(("S", "r"), [(1, 4), (64, 100)])
def test_decoding_and_single_tokens_take_the_gather_path(S, r):
    code = _compile(_turned, S, 640, r=r)
    launched = launches(code)
    assert "selection_gather" in launched and "selection_forward" not in launched
    assert "torch.ops.mhc_inductor" not in code


def test_the_compiled_code_follows_deterministic_algorithms():
    """With them, few queries take the kernels whose bits no batch changes."""
    few = {"selection_gather", "selection_combine"}
    plain = launches(_compile(_turned, 1, 640))
    with deterministic_algorithms():
        launched = launches(_compile(_turned, 1, 640))
    assert few <= set(plain)
    assert "selection_forward" in launched and not few & set(launched)
    assert launches(_compile(_turned, 1, 640)) == plain


def test_dynamic_sizes_stay_symbolic():
    code = _compile(_both, 64, dynamic=True)
    launched = launches(code)
    assert launched.count("selection_forward") == launched.count("selection_dkv") == 1
    for kernel in (*LISTS, "selection_forward", "selection_dq", "selection_dkv"):
        assert re.search(r"\bs\d+\b", _arguments(code, kernel)), kernel


@pytest.mark.parametrize(("S", "dynamic"), [(64, False), (1, False), (64, True)])
def test_segments_run_on_the_kernels(S, dynamic):
    def fn(q, k, v, ranges):
        own, keys = ranges.sum((2, 3, 4)), k.sum((2, 3)).long()
        last = (None, None, None, SCALE, own, keys)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        o, lse = OPS.selection_attention(q, k, v, ranges, *last)
        args = (o, lse, q, k, v, ranges, *last[:3], o, lse, *last[3:])
        return o, OPS.selection_attention_backward(*args)

    code = _compile(fn, S, 640, dynamic=dynamic)
    launched = launches(code)
    assert launched.count("selection_segment_tiles") == (1 if S == 1 else 2)  # dK and dV have tiles of their own
    assert ("selection_gather" if S == 1 else "selection_forward") in launched
    assert "torch.ops.mhc_inductor" not in code


def test_above_576_the_reference_is_called_and_logged_once(caplog):
    called_and_logged(caplog, lambda: _compile(_turned, 64, D=584), "selection_attention", "D = 584 is above 576")
