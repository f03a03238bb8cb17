# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for masks for absent GPUs, forward and backward."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED

from mhc_inductor.kernels.selection import masks_plan
from tests.tools.offline import TARGETS, Recorder, compile_all, names, part

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "128": {"h": 4, "Dk": 128},
    "128-floats": {"h": 1, "Dk": 128, "mask": BF16, "sink": True},
    "256": {"h": 8, "Dk": 256, "mask": F32},
    "576": {"h": 128, "Dk": 576, "Dv": 512, "shared": True, "sink": True},
    "576-floats": {"h": 128, "Dk": 576, "Dv": 512, "shared": True, "mask": BF16},
    "512-apart": {"h": 64, "Dk": 512, "mask": F32, "sink": True},
    "64-fp32": {"h": 2, "Dk": 64, "dtype": F32, "mask": F32},
    "80-fp16": {"h": 3, "Dk": 80, "Dv": 48, "dtype": F16, "mask": F16, "sink": True},
}
KERNELS = {"selection_mask_tiles", "selection_mask_lists", "selection_finite", "selection_mask_forward", "selection_mask_dq",
           "selection_mask_dkv", "selection_delta"}  # fmt: skip


def launches(builder, *, h, Dk, Dv=None, dtype=BF16, mask=torch.bool, S=1024, S_kv=4096, shared=False, sink=False):
    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    Dv = Dk if Dv is None else Dv
    q, k, v = empty(1, S, 2, h, Dk), empty(1, S_kv, 2, Dk).transpose(1, 2), empty(1, S_kv, 2, Dv).transpose(1, 2)
    rest = (empty(1, S, 1, S_kv, dtype=mask), empty(2, h, dtype=F32) if sink else None)
    args = (q, k, None if shared else v, *rest)
    o, lse = masks_plan.plan_selection_mask_attention(builder, *args, Dk**-0.5, Dv)
    masks_plan.plan_selection_mask_attention_backward(builder, o, lse, *args, o, lse, Dk**-0.5, Dv)
    return builder.launches


# Shared memory of gfx942 does not hold the backward's tiles of 576 columns: the reference runs.
PAIRS = [(t, c) for t in TARGETS for c in ("128", "576") if (t, c) != ("hip:gfx942", "576")]
PAIRS += [("cuda:90", c) for c in CASES if c not in ("128", "576")]


def _kept(target, case):
    """Returns whether the tests of each commit compile a case: together they compile every kernel."""
    return case == "128" or (target == "cuda:90" and case in ("128-floats", "80-fp16"))


def test_the_kept_cases_launch_every_kernel():
    kept = [pair for pair in PAIRS if _kept(*pair)]
    every, some = (names(launches, pairs, CASES) for pairs in (PAIRS, kept))
    assert some == every


@pytest.mark.parametrize(("target", "case"), part(PAIRS, _kept))
def test_kernels_compile_without_unnamed_spills(target, case):
    recorded = launches(Recorder(TARGETS[target][1]), **CASES[case])
    seen, bad = compile_all(recorded, target, case)
    assert seen >= KERNELS | ({"selection_mask_shares"} if "mask" in CASES[case] else set())
    assert not bad


def test_sizes_of_one_are_constants():
    """Checks that kernels compile when generated code passes a size or stride of 1 as a constant."""
    recorded = []
    for kernel, args, constexprs, *options in launches(Recorder(TARGETS["cuda:90"][1]), h=2, Dk=16, mask=F32):
        ones = {name: 1 for name, value in args.items() if isinstance(value, int)}
        if kernel.__name__.startswith("selection_mask"):
            recorded.append((kernel, args, {**constexprs, **ones}, *options))
    seen, bad = compile_all(recorded, "cuda:90", "ones")
    assert seen == {name for name in (*KERNELS, "selection_mask_shares") if "mask" in name} and not bad
