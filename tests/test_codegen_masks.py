# SPDX-License-Identifier: Apache-2.0
"""The CUDA code of compiled graphs with attention under a mask, without a GPU: which kernels it launches on what."""

from __future__ import annotations

import re

import pytest
import torch

import mhc_inductor
from tests.test_codegen import called_and_logged, compiled
from tests.tools.fakecuda import without_a_gpu
from tests.tools.generated import launches, runs

pytestmark = [pytest.mark.usefixtures("no_caches"), without_a_gpu]
TILES = ["selection_mask_tiles", "selection_mask_lists"]
FORWARD = [*TILES, "selection_finite", "selection_mask_forward"]
SHARES = ["selection_mask_shares"]
BACKWARD = [*TILES, *TILES, *(f"selection_{k}" for k in ["finite", "mask_dq", "dkv_prefix", "mask_dkv", "dkv_fix"])]


def _compile(fn, S=64, T=128, h=4, D=32, dtype=torch.bool, dynamic=None):
    return compiled(fn, (2, S, 1, h, D), (2, T, 1, D), ((1, 1, S, T), dtype), dynamic=dynamic)


def _attend(q, k, mask):
    k = k.transpose(1, 2)
    return mhc_inductor.selection_attention(q, k, k, mask=mask.transpose(1, 2))


def _expanded(q, k, mask):
    return _attend(q, k, mask.expand(2, -1, -1, -1))


def _both(q, k, mask):
    k = k.transpose(1, 2)
    args, D = (q, k, None, mask.transpose(1, 2), None), q.shape[-1]
    ops = torch.ops.mhc_inductor
    o, lse = ops.selection_mask_attention(*args, 0.1, D)
    return ops.selection_mask_attention_backward(o, None, *args, o, lse, 0.1, D)


@pytest.mark.parametrize("fn", [_attend, _expanded])
def test_the_forward_is_launched_from_the_code_and_reads_views_in_place(fn):
    code = _compile(fn)
    assert sorted(n for n in launches(code) if n.startswith("selection_")) == sorted(FORWARD)
    assert "torch.ops.mhc_inductor" not in code
    assert not [n for n in launches(code) if n.startswith("triton_")], "no copy"
    # One list a tile of 16 queries, which both sequences share, and 64 keys.
    assert "empty_strided_cuda((1, 1, 4, 2), (8, 8, 2, 1), torch.int32)" in code


@pytest.mark.parametrize(("dtype", "shares"), [(torch.bool, []), (torch.float32, SHARES)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_backward_is_launched_from_the_code(dtype, shares, dynamic):
    code = _compile(_both, dtype=dtype, dynamic=dynamic)
    ours = sorted(n for n in launches(code) if n.startswith("selection_"))
    assert ours == sorted([*FORWARD, "selection_delta", *shares, *BACKWARD])
    assert "torch.ops.mhc_inductor" not in code
    sizes = runs(code, "selection_mask_dkv")[0].arguments
    assert bool(re.search(r"\bs\d+\b", sizes)) == (dynamic is True)


def test_above_the_kernels_sizes_the_reference_is_called_and_logged(caplog):
    called_and_logged(caplog, lambda: _compile(_attend, D=600), "selection_mask_attention", "D = 600 is above 576")
