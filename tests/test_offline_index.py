# SPDX-License-Identifier: Apache-2.0
"""Compiles the index kernels for absent GPUs: nothing spills, tiles fit into shared memory."""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.kernels import launch
from mhc_inductor.kernels.index import backward_plan, loss_plan, plan
from tests.tools import offline
from tests.tools.offline import TARGETS, Recorder, compile_all, names, ones, part

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "128": {"S": 8192, "T": 8192, "limit": True},
    "128-mask": {"S": 2048, "T": 4096, "limit": True, "hidden": True},
    "64": {"S": 2048, "T": 2048, "D": 64, "H": 32},
    "80-fp16": {"S": 300, "T": 1000, "D": 80, "H": 3, "dtype": F16, "topk": 100},
    "128-fp32": {"S": 2048, "T": 4096, "dtype": F32},
    "256": {"S": 2048, "T": 4096, "D": 256},
    "256-fp32": {"S": 2048, "T": 4096, "D": 256, "dtype": F32},
    "long": {"S": 256, "T": 65536, "limit": True},
    "decoding": {"S": 1, "T": 65536, "limit": True, "hidden": True},
    "decoding-fp32": {"S": 1, "T": 65536, "D": 256, "H": 128, "dtype": F32},
}


def inputs(*, S, T, H=64, D=128, dtype=BF16, limit=False, hidden=False, **_):
    """Returns q, k and w, a gradient of the scores, and what hides keys."""
    empty = offline.meta(dtype)
    visible = [empty(1, S, dtype=torch.int64) if limit else None, None, None, None]
    if hidden:
        visible[1:] = [empty(1, 1, T, dtype=torch.bool), empty(1, S, dtype=torch.int32), empty(1, T, dtype=torch.int32)]
    args = empty(1, S, H, D), empty(1, T, D), empty(1, S, H, dtype=F32)
    return args, empty(1, S, T, dtype=F32), visible


def launches(builder, *, T, topk=2048, **sizes):
    args, _, visible = inputs(T=T, **sizes)
    assert plan.unsupported(builder, *args) is None
    plan.plan_index_topk(builder, *args, min(topk, T), 1.0, *visible)
    plan.plan_index_topk_scores(builder, *args, min(topk, T), 1.0, *visible)
    plan.plan_index_scores(builder, *args, 1.0, *visible)
    return builder.launches


# The tuned device compiles every case, the others the most common ones.
PAIRS = [("cuda:90", case) for case in CASES]
PAIRS += [(t, case) for t in TARGETS if t != "cuda:90" for case in ("128", "long", "decoding")]


def _kept(target, case):
    """Returns whether the tests of each commit compile a case: together they compile every kernel."""
    return case == "128" or (target == "cuda:90" and case in ("128-mask", "decoding"))


def test_the_kept_cases_launch_every_kernel():
    kept = [pair for pair in PAIRS if _kept(*pair)]
    every, some = (names(launches, pairs, CASES) for pairs in (PAIRS, kept))
    assert some == every


@pytest.mark.parametrize(("target", "case"), part(PAIRS, _kept))
def test_kernels_compile_without_unnamed_spills(target, case):
    wanted = {"index_row_scores" if CASES[case]["S"] == 1 else "index_tile_scores", "index_select"}
    wanted |= {"index_hide"} if CASES[case].get("hidden") else set()
    assert compile_all(launches(Recorder(TARGETS[target][1]), **CASES[case]), target, case) == wanted


def gradients(builder, **sizes):
    args, dscores, visible = inputs(**sizes)
    backward_plan.plan_index_scores_backward(builder, dscores, *args, 1.0, *visible)
    return builder.launches


BACKWARD = [("cuda:90", case) for case in ("128", "128-mask", "80-fp16", "128-fp32", "256", "256-fp32")]
BACKWARD += [(t, "128") for t in TARGETS if t != "cuda:90"]


@pytest.mark.parametrize(("target", "case"), part(BACKWARD, lambda target, case: case == "128"))
def test_gradients_compile_without_unnamed_spills(target, case):
    seen = compile_all(gradients(Recorder(TARGETS[target][1]), **CASES[case]), target, case)
    assert seen == {"index_dq", "index_dk", "index_dk_sum"}


LOSSES = {
    "576": {},
    "128-list": {"G": 4, "h": 16, "Dk": 128, "with_lse": False},
    "80-fp16": {"H": 3, "D": 80, "G": 2, "h": 3, "Dk": 66, "n": 100, "dtype": F16},
    "256": {"H": 128, "D": 256, "h": 128},
    "576-fp32": {"dtype": F32},
    "256-fp32": {"H": 128, "D": 256, "h": 128, "dtype": F32, "with_lse": False},
}
LOSS_KERNELS = {
    "selection_list_keys", "index_list_heads", "index_loss_rows", "index_loss_factors", "index_loss_gradients",
    "selection_list_slots", "selection_list_invert", "selection_list_sum",
}  # fmt: skip


def loss_launches(
    builder, *, S=8192, H=64, D=128, G=1, h=64, Dk=576, n=2048, dtype=BF16, with_lse=True, index_dtype=torch.int32
):
    empty = offline.meta(dtype)
    index = empty(1, S, H, D), empty(1, S, D), empty(1, S, H, dtype=F32), empty(1, S, n, dtype=index_dtype)
    lse = empty(1, S, G, h, dtype=F32) if with_lse else None
    attention = empty(1, S, G, h, Dk), empty(1, G, S, Dk), lse
    assert loss_plan.unsupported(builder, *index, *(t for t in attention if t is not None)) is None
    loss, dscores = loss_plan.plan_index_loss(builder, *index, *attention, 1.0, 1.0)
    loss_plan.plan_index_loss_backward(builder, loss, *index, dscores, 1.0)
    return builder.launches


LOSS_PAIRS = [("cuda:90", case) for case in LOSSES] + [(t, "576") for t in TARGETS if t != "cuda:90"]


@pytest.mark.parametrize(("target", "case"), part(LOSS_PAIRS, lambda target, case: case == "576"))
def test_losses_compile_without_unnamed_spills(target, case):
    recorded = loss_launches(Recorder(TARGETS[target][1]), **LOSSES[case])
    assert compile_all(recorded, target, f"loss-{case}") == LOSS_KERNELS


@pytest.mark.parametrize(("case", "more"), [("576", {}), ("512", {"Dk": 512, "h": 128})])
def test_losses_compile_with_gluon_without_spills(case, more):
    recorded = loss_launches(launch.Recorder(TARGETS["cuda:90"][1]), **more)
    assert compile_all(recorded, "cuda:90", f"loss-gluon-{case}") == LOSS_KERNELS | {"index_list_target_wgmma"}


@pytest.mark.parametrize("case", ["128-mask", "decoding"])
def test_sizes_of_one_are_constants(case):
    """Checks that kernels compile when generated code passes a size or stride of 1 as a constant."""
    builder = Recorder(TARGETS["cuda:90"][1])
    launches(builder, **CASES[case])
    gradients(builder, **CASES[case])
    compile_all(ones(loss_launches(builder, **LOSSES["80-fp16"])), "cuda:90", "ones")
