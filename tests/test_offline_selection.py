# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of selection attention for absent GPUs: both paths, forward and backward."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED

from mhc_inductor.kernels.selection import backward_plan, blocks_plan, join_plan, plan
from tests.tools.offline import TARGETS, Recorder, compile_all, names, part

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")

TILES = {"selection_pieces", "selection_finite", "selection_lists", "selection_forward"}
BACKWARD = {"selection_delta", "selection_dq", "selection_dkv", "selection_dkv_fix"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "128": {"h": 16, "Dk": 128},
    "80-fp16": {"h": 3, "Dk": 80, "Dv": 48, "dtype": F16, "r": 40, "varlen": True, "sink": True},
    "512": {"h": 64, "Dk": 512},
    "128-fp32": {"h": 4, "Dk": 128, "dtype": F32},
    "decoding": {"h": 16, "Dk": 128, "S": 1},
    "decoding-512-fp32": {"h": 64, "Dk": 512, "S": 1, "dtype": F32},
    "tokens": {"h": 8, "Dk": 64, "r": 512},
    "128-segments": {"h": 16, "Dk": 128, "segments": torch.int32},
    "tokens-segments": {"h": 8, "Dk": 64, "r": 512, "segments": torch.int64},
    "decoding-segments": {"h": 16, "Dk": 128, "S": 1, "segments": torch.int64},
    "576": {"h": 128, "Dk": 576, "Dv": 512},
    "576-fp32": {"h": 128, "Dk": 576, "Dv": 512, "dtype": F32},
    "decoding-576": {"h": 128, "Dk": 576, "Dv": 512, "S": 1},
}


def launches(
    builder,
    *,
    h,
    Dk,
    Dv=None,
    dtype=BF16,
    r=16,
    S=1024,
    S_kv=4096,
    varlen=False,
    sink=False,
    backward=True,
    segments=None,
):
    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    Dv = Dk if Dv is None else Dv
    q = empty(1, S, 2, h, Dk)
    k, v = empty(1, S_kv, 2, Dk).transpose(1, 2), empty(1, S_kv, 2, Dv).transpose(1, 2)
    ranges = empty(1, S, 2, r, 2, dtype=torch.int64)
    boundaries = empty(5, dtype=torch.int32) if varlen else None
    args = (q, k, v, ranges, empty(2, h, dtype=F32) if sink else None, boundaries, boundaries)
    ids = () if segments is None else (empty(1, S, dtype=segments), empty(1, S_kv, dtype=segments))
    o, lse = plan.plan_selection_attention(builder, *args, Dk**-0.5, *ids)
    if backward and backward_plan.unsupported(builder, *[t for t in (o, lse, *args, o, lse) if t is not None]) is None:
        backward_plan.plan_selection_attention_backward(builder, o, lse, *args, o, lse, Dk**-0.5, *ids)
    return builder.launches


# The tuned device compiles every case, the others the most common one; gfx942 also the gather path and segments.
PAIRS = [(t, "128") for t in TARGETS] + [("hip:gfx942", "decoding")]
PAIRS += [("hip:gfx942", "decoding-segments"), ("hip:gfx942", "128-segments"), ("cuda:80", "576")]
PAIRS += [("cuda:90", c) for c in CASES if c != "128"]


def _kept(target, case):
    """Returns whether the tests of each commit compile a case: together they compile every kernel."""
    return case == "128" or (target, case) in [("cuda:90", c) for c in ("80-fp16", "decoding", "128-segments")]


def test_the_kept_cases_launch_every_kernel():
    kept = [pair for pair in PAIRS if _kept(*pair)]
    every, some = (names(launches, pairs, CASES) for pairs in (PAIRS, kept))
    assert some == every


@pytest.mark.parametrize(("target", "case"), part(PAIRS, _kept))
def test_kernels_compile_without_unnamed_spills(target, case):
    recorded = launches(Recorder(TARGETS[target][1]), **CASES[case])
    seen, bad = compile_all(recorded, target, case)
    assert ("selection_segment_tiles" in seen) == ("segments" in CASES[case])
    if CASES[case].get("S") == 1 or "tokens" in case or "576" in case:
        assert seen >= {"selection_gather", "selection_gather_dq"} and "selection_forward" not in seen
        assert ("selection_dkv_few" in seen) == (CASES[case].get("S") == 1)
    else:
        assert seen >= TILES | BACKWARD
    assert not bad


@pytest.mark.parametrize("target", TARGETS)
def test_the_choice_of_blocks_compiles_without_unnamed_spills(target):
    cases = {"128": (16, 128, BF16), "256": (4, 256, F16), "256-fp32": (33, 256, F32)}
    for case, (h, D, dtype) in cases.items() if target == "cuda:90" else [("128", cases["128"])]:
        builder = Recorder(TARGETS[target][1])
        q, k = (torch.empty(n, dtype=dtype, device="meta") for n in ((1, 512, 2, h, D), (1, 2, 31, D)))
        lse = torch.empty(1, 512, 2, h, device="meta")
        blocks_plan.plan_selection_blocks(builder, q, k, lse, D**-0.5, 32, 16, 64, 16, 512)
        seen, bad = compile_all(builder.launches, target, case)
        assert seen == {"selection_block_scores", "selection_block_top"} and not bad


# For each path, a launch that compiles quickly, and its kernels.
ONES = {
    "tiles": ({"h": 2, "Dk": 16, "r": 4}, TILES | BACKWARD | {"selection_dkv_count", "selection_dkv_prefix"}),
    "gather": (
        {"h": 2, "Dk": 16, "r": 4, "S": 1},
        {"selection_gather", "selection_combine", "selection_gather_dq", "selection_dq_sum", "selection_dkv_few"},
    ),
    "segments": (
        {"h": 2, "Dk": 16, "r": 4, "segments": torch.int64},
        {"selection_segment_tiles", "selection_pieces", "selection_forward", "selection_dq", "selection_dkv"},
    ),
    "gathered segments": (
        {"h": 2, "Dk": 16, "r": 4, "S": 1, "segments": torch.int32},
        {"selection_segment_tiles", "selection_gather", "selection_gather_dq", "selection_dkv_few"},
    ),
}


@pytest.mark.parametrize("path", ONES)
def test_sizes_of_one_are_constants(path):
    """Checks that kernels compile when generated code passes a size or stride of 1 as a constant."""
    case, wanted = ONES[path]
    recorded = []
    for kernel, args, constexprs, *options in launches(Recorder(TARGETS["cuda:90"][1]), **case):
        ones = {name: 1 for name, value in args.items() if isinstance(value, int)}
        if kernel.__name__ in wanted:
            recorded.append((kernel, args, {**constexprs, **ones}, *options))
    seen, bad = compile_all(recorded, "cuda:90", "ones")
    assert seen == wanted and not bad


@pytest.mark.parametrize("target", TARGETS)
def test_joining_parts_compiles_without_spills(target):
    for DV, dtype in ((128, BF16), (80, F16), (512, BF16), (1024, F32)):
        builder = Recorder(TARGETS[target][1])
        o, row, sink = (torch.empty(n, device="meta") for n in ((2, 512, 2, 16, DV), (2, 512, 2, 16), (2, 16)))
        o = o.to(dtype)
        state = join_plan.plan_selection_join(builder, o, row, None, o, row, None, False)
        join_plan.plan_selection_join(builder, *state, o, row, sink, True)
        join_plan.plan_selection_part_gradients(builder, o, row, o, row, row, o, row)
        seen, bad = compile_all(builder.launches, target, f"{DV}")
        assert seen == {"selection_join", "selection_part_gradients"} and not bad
