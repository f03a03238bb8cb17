# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with attention over lists of keys, without a GPU: which kernels it launches on what."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import mhc_inductor
from mhc_inductor.kernels.selection import lists_plan
from tests.test_codegen import called_and_logged, compiled
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches, runs

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]


def _compile(fn, S=64, T=128, n=20, h=4, D=32, dynamic=None):
    return compiled(fn, (2, S, 1, h, D), (2, T, 1, D), ((2, S, 1, n), torch.int64), dynamic=dynamic)


def _attend(q, k, indices):
    k = k.transpose(1, 2)
    return mhc_inductor.selection_attention(q, k, k, indices=indices)


@pytest.mark.parametrize("S", [1, 300])
def test_the_forward_is_launched_from_the_code_and_reads_views_in_place(S):
    code = _compile(_attend, S)
    ours = [n for n in launches(code) if n.startswith("selection_")]
    # Two sequences of one query split their keys.
    assert ours == ["selection_list_keys", "selection_list_forward", *["selection_combine"] * (S == 1)]
    assert "torch.ops.mhc_inductor" not in code
    assert not [n for n in launches(code) if n.startswith("triton_")], "no copy"


def test_dynamic_sizes_stay_symbolic():
    code = _compile(_attend, dynamic=True)
    call = runs(code, "selection_list_forward")[0].arguments
    assert re.search(r"\bs\d+\b", call)
    assert "torch.ops.mhc_inductor" not in code


def test_rows_of_latent_attention_call_the_op_for_its_gluon_kernel():
    code = _compile(_attend, h=64, D=512)
    assert "torch.ops.mhc_inductor.selection_list_attention.default" in code


OPS = torch.ops.mhc_inductor


def _both(q, k, indices, up=None):
    args = (q, k.transpose(1, 2), None, indices, *[None] * 5)
    o, lse = OPS.selection_list_attention(*args, 0.1, q.shape[-1])
    return OPS.selection_list_attention_backward(o if up is None else up, None, *args, o, lse, 0.1, q.shape[-1])


def _from_a_transpose(q, k, indices):
    return _both(q, k, indices, torch.sin(q.transpose(1, 3).contiguous()).transpose(1, 3))


def _both_biased(q, k, indices):
    bias = torch.zeros(indices.shape, device=indices.device)
    args, options = (q, k.transpose(1, 2), None, indices, bias, None), (0.1, q.shape[-1], True)
    o, lse = OPS.selection_entry_attention(*args, *options)
    return OPS.selection_entry_attention_backward(o, lse, *args, o, lse, *options)


CHUNK = [f"selection_list_{what}" for what in ("dq", "rows", "slots", "invert", "sum")]


@pytest.mark.parametrize(("most", "chunks"), [(2048, [300]), (256, [198, 102]), (132, [132, 132, 36])])
def test_the_backward_is_launched_from_the_code(monkeypatch, most, chunks):
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", most)
    code = _compile(_both, 300)
    ours = [n for n in launches(code) if n.startswith("selection_")]
    forward = ["selection_list_keys", "selection_list_forward"]
    assert ours == [*forward, "selection_list_keys", "selection_delta", *CHUNK * len(chunks)]
    assert "torch.ops.mhc_inductor" not in code
    # 20 keys are rows of 32 times 32 columns. Each chunk's are freed before the next chunk's are made, or taken over.
    shape = r"\((\d+), 32, 32\), \(1024, 32, 1\)"
    made = re.findall(rf"^\s+(\w+) = empty_strided_cuda\({shape}, torch.bfloat16\)", code, re.MULTILINE)
    assert [int(rows) for _, rows in made] == [2 * rows for i, rows in enumerate(chunks) if rows not in chunks[:i]]
    for (first, _), (second, _) in itertools.pairwise(made):
        gone = re.search(rf"del {first}\b|{first}  # reuse", code)
        assert gone.start() < code.index(f" {second} = empty_strided_cuda")


def test_unknown_sizes_many_chunks_and_gluon_kernels_call_the_op_of_the_backward(monkeypatch):
    name = "torch.ops.mhc_inductor.selection_list_attention_backward.default"
    code = _compile(_both, dynamic=True)
    assert name in code and "selection_list_forward" in launches(code)
    assert name in _compile(_both, h=64, D=512)
    monkeypatch.setattr(lists_plan, "MOST_QUERIES", 64)
    assert name in _compile(_both, 300)


def test_a_gradient_is_written_as_the_op_reads_it():
    """The kernels read contiguous gradients: the op that is called would copy others."""
    code = _compile(_from_a_transpose, h=64, D=512)
    given = re.search(r"selection_list_attention_backward.default\((\w+), None", code)
    assert given is not None and re.search(
        rf"{given[1]} = empty_strided_cuda\(\(2, 64, 1, 64, 512\), \(2097152, 32768, 32768, 512, 1\)", code
    )
    assert len([n for n in launches(code) if n.startswith("triton_")]) == 1


def test_a_bias_is_launched_from_the_code():
    code = _compile(_both_biased, 300)
    ours = [n for n in launches(code) if n.startswith("selection_")]
    chunk = [CHUNK[0], *["selection_list_fold"] * 2, *CHUNK[1:]]
    first = [
        "selection_list_keys",
        "selection_list_forward",
        "selection_list_keys",
        "selection_delta",
        "selection_list_totals",
    ]
    assert ours[:5] == first and ours[5:] == chunk * (len(ours[5:]) // len(chunk)) != []
    assert "torch.ops.mhc_inductor" not in code


def test_a_bias_of_rows_of_the_gluon_kernels_calls_the_ops():
    code = _compile(_both_biased, h=64, D=512)
    assert "torch.ops.mhc_inductor.selection_entry_attention.default" in code
    assert "torch.ops.mhc_inductor.selection_entry_attention_backward.default" in code


def test_a_bias_of_unknown_sizes_calls_the_op_of_the_backward():
    code = _compile(_both_biased, dynamic=True)
    assert "torch.ops.mhc_inductor.selection_entry_attention_backward.default" in code
    assert "selection_list_forward" in launches(code)


@pytest.mark.parametrize(("fn", "kind"), [(_attend, "list"), (_both_biased, "entry")])
def test_above_the_kernels_sizes_the_reference_is_called_and_logged(caplog, fn, kind):
    called_and_logged(caplog, lambda: _compile(fn, D=600), f"selection_{kind}_attention", "D = 600 is above 576")
