# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for lists of keys for absent GPUs, forward and backward, plain Triton and Gluon."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED

from mhc_inductor.kernels import launch
from mhc_inductor.kernels.eager import plan_of
from tests.tools.offline import TARGETS, Recorder, compile_all, names, part

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiling and interpreting exclude each other")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "128": {"h": 64, "Dk": 128},
    "512": {"h": 64, "Dk": 512, "shared": True},
    "576": {"h": 128, "Dk": 576, "Dv": 512, "shared": True, "sink": True},
    "576-fp32": {"h": 20, "Dk": 576, "Dv": 512, "dtype": F32},
    "80-fp16": {"S": 2048, "h": 3, "Dk": 80, "Dv": 48, "dtype": F16, "n": 40, "packed": True, "sink": True},
    "decoding": {"h": 16, "Dk": 128, "S": 1},
    "128-bias": {"h": 64, "Dk": 128, "bias": True},
    "576-bias": {"h": 128, "Dk": 576, "Dv": 512, "shared": True, "sink": True, "bias": True},
    "80-bias-fp32": {"h": 3, "Dk": 80, "Dv": 48, "S": 1, "n": 4096, "dtype": F32, "bias": True},
    "576-bias-fp32": {"h": 20, "Dk": 576, "Dv": 512, "dtype": F32, "bias": True},
}
PLAIN = {"selection_list_keys", "selection_list_forward", "selection_list_dq", "selection_list_rows",
         "selection_list_slots", "selection_list_invert", "selection_list_sum", "selection_delta"}  # fmt: skip
ROWS = {"selection_list_rows", "selection_list_rows_wgmma"}
GLUON = PLAIN - ROWS - {"selection_list_forward", "selection_list_dq"} | {
    "selection_list_forward_wgmma",
    "selection_list_dq_wgmma",
}


def launches(builder, *, h, Dk, Dv=None, dtype=BF16, n=512, S=1024, S_kv=4096, shared=False, packed=False, sink=False,
             bias=False, scale=None):  # fmt: skip
    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    Dv = Dk if Dv is None else Dv
    q, k, v = empty(1, S, 2, h, Dk), empty(1, S_kv, 2, Dk).transpose(1, 2), empty(1, S_kv, 2, Dv).transpose(1, 2)
    ids = [empty(5, dtype=torch.int32), None, empty(1, S, dtype=torch.int64), empty(1, S_kv, dtype=torch.int64)]
    indices = empty(1, S, 2, n, dtype=torch.int64)
    logits = empty(2, h, dtype=F32) if sink else None
    rest = (empty(1, S, 2, n, dtype=F32), logits) if bias else (logits, *(ids if packed else [None] * 4))
    args, options = (
        (q, k, None if shared else v, indices, *rest),
        (Dk**-0.5 if scale is None else scale, Dv, *[True] * bias),
    )
    name = "selection_entry_attention" if bias else "selection_list_attention"
    o, lse = plan_of(name)(builder, *args, *options)
    plan_of(f"{name}_backward")(builder, o, lse, *args, o, lse, *options)
    return builder.launches


PAIRS = [(t, c) for t in TARGETS for c in ("128", "576", "128-bias", "576-bias")] + [("hip:gfx942", "decoding")]
PAIRS += [("cuda:90", c) for c in CASES if c not in ("128", "576", "128-bias", "576-bias")]


def _kept(target, case):
    """Returns whether the tests of each commit compile a case: together they compile every kernel."""
    return case == "128" or (target == "cuda:90" and case in ("80-fp16", "decoding", "128-bias"))


def test_the_kept_cases_launch_every_kernel():
    kept = [pair for pair in PAIRS if _kept(*pair)]
    every, some = (names(launches, pairs, CASES) for pairs in (PAIRS, kept))
    assert some == every


@pytest.mark.parametrize(("target", "case"), part(PAIRS, _kept))
def test_kernels_compile_without_unnamed_spills(target, case):
    recorded = launches(Recorder(TARGETS[target][1]), **CASES[case])
    seen, bad = compile_all(recorded, target, case)
    assert seen >= PLAIN
    assert not bad


@pytest.mark.parametrize("case", ["512", "576", "576-bias"])
def test_gluon_kernels_compile_without_spills(case):
    builder = launch.Recorder(TARGETS["cuda:90"][1])
    seen, bad = compile_all(launches(builder, **CASES[case]), "cuda:90", case)
    rows = "selection_list_rows_wgmma" if CASES[case]["h"] > 64 else "selection_list_rows"
    assert seen >= GLUON | {rows} and not seen & ({"selection_list_forward", "selection_list_dq"} | ROWS - {rows})
    assert not bad


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_without_a_positive_scale_plain_kernels_run(scale):
    recorded = launches(launch.Recorder(TARGETS["cuda:90"][1]), **CASES["512"], scale=scale)
    assert {kernel.__name__ for kernel, *_ in recorded} >= PLAIN


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "cuda:90"])
def test_elsewhere_plain_kernels_run(target):
    recorded = launches(launch.Recorder(TARGETS[target][1]), **CASES["512"])
    assert {kernel.__name__ for kernel, *_ in recorded} >= PLAIN
