# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of selection attention over ranges, lists and masks for absent GPUs, plain Triton and Gluon."""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.kernels import launch
from mhc_inductor.kernels.eager import plan_of, why_not
from mhc_inductor.kernels.selection import blocks_plan, join_plan
from tests.tools import offline
from tests.tools.offline import TARGETS, Recorder, compile_all, names, ones, part

TILES = {"selection_pieces", "selection_finite", "selection_lists", "selection_forward"}
BACKWARD = {"selection_delta", "selection_dq", "selection_dkv", "selection_dkv_fix"}
PLAIN = {"selection_list_keys", "selection_list_forward", "selection_list_dq", "selection_list_rows",
         "selection_list_slots", "selection_list_invert", "selection_list_sum", "selection_delta"}  # fmt: skip
ROWS = {"selection_list_rows", "selection_list_rows_wgmma"}
GLUON = PLAIN - ROWS - {"selection_list_forward", "selection_list_dq"} | {
    "selection_list_forward_wgmma",
    "selection_list_dq_wgmma",
}
MASKED = {"selection_mask_tiles", "selection_mask_lists", "selection_finite", "selection_mask_forward", "selection_mask_dq",
          "selection_mask_dkv", "selection_delta"}  # fmt: skip
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LATENT = {"h": 128, "Dk": 576, "Dv": 512}
ODD = {"h": 3, "Dk": 80, "Dv": 48}
# The last word of a name is the case's in tests/compiled.json.
CASES = {
    "128": {"h": 16, "Dk": 128},
    "80-fp16": {**ODD, "dtype": F16, "r": 40, "packed": True, "sink": True},
    "512": {"h": 64, "Dk": 512},
    "128-fp32": {"h": 4, "Dk": 128, "dtype": F32},
    "decoding": {"h": 16, "Dk": 128, "S": 1},
    "decoding-512-fp32": {"h": 64, "Dk": 512, "S": 1, "dtype": F32},
    "tokens": {"h": 8, "Dk": 64, "r": 512},
    "128-segments": {"h": 16, "Dk": 128, "segments": torch.int32},
    "tokens-segments": {"h": 8, "Dk": 64, "r": 512, "segments": torch.int64},
    "decoding-segments": {"h": 16, "Dk": 128, "S": 1, "segments": torch.int64},
    "576": LATENT,
    "576-fp32": {**LATENT, "dtype": F32},
    "decoding-576": {**LATENT, "S": 1},
    "list 128": {"h": 64, "Dk": 128, "n": 512},
    "list 512": {"h": 64, "Dk": 512, "n": 512, "shared": True},
    "list 576": {**LATENT, "n": 512, "shared": True, "sink": True},
    "list 576-fp32": {"h": 20, "Dk": 576, "Dv": 512, "n": 512, "dtype": F32},
    "list 80-fp16": {**ODD, "S": 2048, "dtype": F16, "n": 40, "packed": True, "segments": torch.int64, "sink": True},
    "list decoding": {"h": 16, "Dk": 128, "n": 512, "S": 1},
    "list 128-bias": {"h": 64, "Dk": 128, "n": 512, "bias": True},
    "list 576-bias": {**LATENT, "n": 512, "shared": True, "sink": True, "bias": True},
    "list 80-bias-fp32": {**ODD, "S": 1, "n": 4096, "dtype": F32, "bias": True},
    "list 576-bias-fp32": {"h": 20, "Dk": 576, "Dv": 512, "n": 512, "dtype": F32, "bias": True},
    "mask 128": {"h": 4, "Dk": 128, "mask": torch.bool},
    "mask 128-floats": {"h": 1, "Dk": 128, "mask": BF16, "sink": True},
    "mask 256": {"h": 8, "Dk": 256, "mask": F32},
    "mask 576": {**LATENT, "mask": torch.bool, "shared": True, "sink": True},
    "mask 576-floats": {**LATENT, "mask": BF16, "shared": True},
    "mask 512-apart": {"h": 64, "Dk": 512, "mask": F32, "sink": True},
    "mask 64-fp32": {"h": 2, "Dk": 64, "dtype": F32, "mask": F32},
    "mask 80-fp16": {**ODD, "dtype": F16, "mask": F16, "sink": True},
}


def launches(
    builder, *, h, Dk, Dv=None, dtype=BF16, S=1024, S_kv=4096, r=16, n=0, mask=None, bias=False, shared=False, packed=False,
    sink=False, segments=None, scale=None,
):  # fmt: skip
    """Returns the launches of the forward and, where there are kernels, the backward: over ranges, n keys or a mask."""
    empty = offline.meta(dtype)
    Dv = Dk if Dv is None else Dv
    q, k, v = empty(1, S, 2, h, Dk), empty(1, S_kv, 2, Dk).transpose(1, 2), empty(1, S_kv, 2, Dv).transpose(1, 2)
    v = None if shared else v
    logits = empty(2, h, dtype=F32) if sink else None
    ends = empty(5, dtype=torch.int32) if packed else None
    ids = (None, None) if segments is None else (empty(1, S, dtype=segments), empty(1, S_kv, dtype=segments))
    options = (Dk**-0.5 if scale is None else scale, Dv)
    if mask is not None:
        name, args = "selection_mask_attention", (empty(1, S, 1, S_kv, dtype=mask), logits)
    elif bias:
        name, args = (
            "selection_entry_attention",
            (empty(1, S, 2, n, dtype=torch.int64), empty(1, S, 2, n, dtype=F32), logits),
        )
        options = (*options, True)
    elif n:
        name, args = "selection_list_attention", (empty(1, S, 2, n, dtype=torch.int64), logits, ends, None, *ids)
    else:
        name, args = "selection_attention", (empty(1, S, 2, r, 2, dtype=torch.int64), logits, ends, ends)
        options = (options[0], *(() if segments is None else ids))
    args = q, k, v, *args
    o, lse = plan_of(name)(builder, *args, *options)
    backward = o, lse, *args, o, lse, *options
    if why_not(f"{name}_backward", backward, builder) is None:
        plan_of(f"{name}_backward")(builder, *backward)
    return builder.launches


# The tuned device compiles every case, the others the most common ones; gfx942 also the gather path and segments. Shared
# memory of gfx942 does not hold the backward's tiles of 576 columns for masks: the reference runs.
COMMON = ("128", "list 128", "list 576", "list 128-bias", "list 576-bias", "mask 128", "mask 576")
PAIRS = [(t, c) for t in TARGETS for c in COMMON if (t, c) != ("hip:gfx942", "mask 576")]
PAIRS += [("hip:gfx942", c) for c in ("decoding", "decoding-segments", "128-segments", "list decoding")]
PAIRS += [("cuda:80", "576"), *(("cuda:90", c) for c in CASES if c not in COMMON)]
KEPT = ("80-fp16", "decoding", "128-segments", "list 80-fp16", "list decoding", "list 128-bias")
KEPT += ("mask 128-floats", "mask 80-fp16")


def _kept(target, case):
    """Returns whether the tests of each commit compile a case: together they compile every kernel."""
    return case.split()[-1] == "128" or (target == "cuda:90" and case in KEPT)


@pytest.mark.parametrize("kind", ["", "list ", "mask "])
def test_the_kept_cases_launch_every_kernel(kind):
    pairs = [p for p in PAIRS if p[1].rpartition(" ")[0] == kind.strip()]
    every, some = (names(launches, found, CASES) for found in (pairs, [p for p in pairs if _kept(*p)]))
    assert some == every


@pytest.mark.parametrize(("target", "case"), part([p for p in PAIRS if " " not in p[1]], _kept))
def test_kernels_compile_without_unnamed_spills(target, case):
    seen = compile_all(launches(Recorder(TARGETS[target][1]), **CASES[case]), target, case)
    assert ("selection_segment_tiles" in seen) == ("segments" in CASES[case])
    if CASES[case].get("S") == 1 or "tokens" in case or "576" in case:
        assert seen >= {"selection_gather", "selection_gather_dq"} and "selection_forward" not in seen
        assert ("selection_dkv_few" in seen) == (CASES[case].get("S") == 1)
    else:
        assert seen >= TILES | BACKWARD


@pytest.mark.parametrize(("target", "case"), part([p for p in PAIRS if " " in p[1]], _kept))
def test_lists_and_masks_compile_without_unnamed_spills(target, case):
    seen = compile_all(launches(Recorder(TARGETS[target][1]), **CASES[case]), target, case.split()[-1])
    shares = {"selection_mask_shares"} if CASES[case].get("mask", torch.bool) is not torch.bool else set()
    assert seen >= (MASKED | shares if "mask" in case else PLAIN)


@pytest.mark.parametrize("case", ["list 512", "list 576", "list 576-bias"])
def test_gluon_kernels_compile_without_spills(case):
    seen = compile_all(launches(launch.Recorder(TARGETS["cuda:90"][1]), **CASES[case]), "cuda:90", case.split()[-1])
    rows = "selection_list_rows_wgmma" if CASES[case]["h"] > 64 else "selection_list_rows"
    assert seen >= GLUON | {rows} and not seen & ({"selection_list_forward", "selection_list_dq"} | ROWS - {rows})


@pytest.mark.parametrize(
    ("target", "how"),
    [*(("cuda:90", {"scale": scale}) for scale in (0.0, -0.5)), *((t, {}) for t in TARGETS if t != "cuda:90")],
)
def test_without_a_positive_scale_or_elsewhere_plain_kernels_run(target, how):
    recorded = launches(launch.Recorder(TARGETS[target][1]), **CASES["list 512"], **how)
    assert {kernel.__name__ for kernel, *_ in recorded} >= PLAIN


@pytest.mark.parametrize("target", TARGETS)
def test_the_choice_of_blocks_compiles_without_unnamed_spills(target):
    cases = {"128": (16, 128, BF16), "256": (4, 256, F16), "256-fp32": (33, 256, F32)}
    for case, (h, D, dtype) in cases.items() if target == "cuda:90" else [("128", cases["128"])]:
        builder = Recorder(TARGETS[target][1])
        q, k = (torch.empty(n, dtype=dtype, device="meta") for n in ((1, 512, 2, h, D), (1, 2, 31, D)))
        lse = torch.empty(1, 512, 2, h, device="meta")
        blocks_plan.plan_selection_blocks(builder, q, k, lse, D**-0.5, 32, 16, 64, 16, 512)
        assert compile_all(builder.launches, target, case) == {"selection_block_scores", "selection_block_top"}


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
    "mask": ({"h": 2, "Dk": 16, "mask": F32}, {n for n in (*MASKED, "selection_mask_shares") if "mask" in n}),
}


@pytest.mark.parametrize("path", ONES)
def test_sizes_of_one_are_constants(path):
    """Checks that kernels compile when generated code passes a size or stride of 1 as a constant."""
    case, wanted = ONES[path]
    recorded = [row for row in launches(Recorder(TARGETS["cuda:90"][1]), **case) if row[0].__name__ in wanted]
    assert compile_all(ones(recorded), "cuda:90", "ones") == wanted


@pytest.mark.parametrize("target", TARGETS)
def test_joining_parts_compiles_without_spills(target):
    for DV, dtype in ((128, BF16), (80, F16), (512, BF16), (1024, F32)):
        builder = Recorder(TARGETS[target][1])
        o, row, sink = (torch.empty(n, device="meta") for n in ((2, 512, 2, 16, DV), (2, 512, 2, 16), (2, 16)))
        o = o.to(dtype)
        state = join_plan.plan_selection_join(builder, o, row, None, o, row, None, False)
        join_plan.plan_selection_join(builder, *state, o, row, sink, True)
        join_plan.plan_selection_part_gradients(builder, o, row, o, row, row, o, row)
        assert compile_all(builder.launches, target, f"{DV}") == {"selection_join", "selection_part_gradients"}


@pytest.mark.parametrize(
    ("dtype", "Dk", "tiles"), [(BF16, 512, True), (BF16, 576, False), (F32, 256, True), (F32, 300, False)]
)
def test_wide_heads_are_gathered(dtype, Dk, tiles):
    """The assembler gives the tiles of fp32 with more columns 32 registers, and 28 KiB of a thread's memory."""
    made = names(launches, [("cuda:90", "wide")], {"wide": {"h": 4, "Dk": Dk, "dtype": dtype}})
    assert ("selection_forward" in made, "selection_gather" in made) == (tiles, not tiles)
