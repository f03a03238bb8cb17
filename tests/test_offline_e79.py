# SPDX-License-Identifier: Apache-2.0
"""Compiles the E79 kernels, plain Triton and Gluon, for absent GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

from mhc_inductor.kernels.e79 import plan
from tests.tools import offline
from tests.tools.offline import TARGETS, Recorder, compile_all, part

CASES = {
    "16": {"n": 16, "bias": "none"},
    "32-bf16": {"n": 32, "bias": "input", "dtype": torch.bfloat16},
    "48": {"n": 48, "bias": "fixed"},
    "64": {"n": 64, "bias": "input"},
    "128": {"n": 128, "bias": "fixed"},
}


def launches(builder, *, n, bias, dtype=torch.float32, T=512, B=32, segment=16):
    empty = offline.meta(torch.float32)
    kvqm, S = empty(T, B, 4 * n, dtype=dtype), empty(B, n, n)
    b = {"none": None, "fixed": empty(n, dtype=dtype), "input": empty(T, B, n, dtype=dtype)}[bias]
    args = (kvqm, b, b, S, None)
    plan.plan_e79_scan(builder, *args, 0)
    out, S, _, checkpoints, gates = plan.plan_e79_scan(builder, *args, segment)
    plan.plan_e79_scan_backward(builder, out, S, None, *args, checkpoints, gates, segment)
    return builder.launches


PAIRS = list(itertools.product(TARGETS, CASES))
ON_CUDA = [(target, case) for target, case in PAIRS if target.startswith("cuda")]


@pytest.mark.parametrize(("target", "case"), part(PAIRS, lambda target, case: case == "64"))
def test_plain_triton_compiles_without_unnamed_spills(target, case):
    seen = compile_all(launches(Recorder(TARGETS[target][1]), **CASES[case]), target, case)
    sums = {"e79_bias_sum"} if CASES[case]["bias"] == "fixed" else set()
    assert seen == {"e79_forward", "e79_backward", "e79_finish"} | sums


@pytest.mark.parametrize(("target", "case"), part(ON_CUDA, lambda target, case: case == "64" or target == "cuda:90"))
def test_gluon_compiles_without_unnamed_spills(target, case):
    builder = Recorder(TARGETS[target][1])
    builder.gluon = True
    recorded = [args for args in launches(builder, **CASES[case]) if args[0].is_gluon()]
    # Shared memory of 99 or 163 KiB does not hold the states of the widest backward.
    backward = {"e79_backward_gluon"} if case != "128" or target in ("cuda:90", "cuda:100") else set()
    assert compile_all(recorded, target, case) == {"e79_forward_gluon"} | backward
