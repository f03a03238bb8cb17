# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of every plan for absent GPUs: it must compile, and use what tests/compiled.json says."""

from __future__ import annotations

import itertools

import pytest
import torch

from mhc_inductor.kernels.mhc import fused_plan, plan, single_pass_plan
from tests.tools import offline
from tests.tools.offline import TARGETS, Recorder, compile_all, part

CASES = {
    "bf16": {"dtype": torch.bfloat16, "n": 4, "width": 4096, "iters": 20, "gamma": False},
    "bf16-gamma-2560": {"dtype": torch.bfloat16, "n": 4, "width": 2560, "iters": 0, "gamma": True},
    "fp32": {"dtype": torch.float32, "n": 4, "width": 1000, "iters": 20, "gamma": True},
    "bf16-n8": {"dtype": torch.bfloat16, "n": 8, "width": 1280, "iters": 20, "gamma": False},
}


def launches(props, *, dtype, n, width, iters, gamma, tokens=8192):
    b = Recorder(props)
    empty = offline.meta(torch.float32)
    x, f = empty(tokens, n, width, dtype=dtype), empty(tokens, width, dtype=dtype)
    m = n * n + 2 * n
    params = [empty(m, n * width), empty(3), empty(m), empty(n, width) if gamma else None]
    floats = (1e-6, 1e-6, 2.0, 0.0, iters, 1e-6, "softmax")
    _, h_post, h_res, h_pre, h_mix, inv = plan.plan_mhc_pre(b, x, *params, *floats)
    plan.plan_mhc_pre_backward(b, f, h_post, h_res, x, *params, h_pre, h_post, h_mix, inv, x, *floats)
    plan.plan_mhc_post(b, x, f, h_post, h_res, True)
    plan.plan_mhc_post_backward(b, x, x, f, h_post, h_res, True)
    post, saved = (x, f, h_post, h_res, True), (h_pre, h_post, h_mix, inv)
    fused_plan.plan_mhc_post_pre(b, *post, *params, *floats)
    fused_plan.plan_mhc_post_pre_backward(b, x, f, h_post, h_res, *post, x, *params, *saved, *floats)
    site, coefficients = (x, f, h_post, h_res, h_pre, True), (h_pre, h_post, h_mix, inv)
    single_pass_plan.plan_mhc_single_pass(b, *site, *params, *floats)
    single_pass_plan.plan_mhc_single_pass_backward(
        b, x, f, h_pre, h_post, h_res, *site, x, *params, *coefficients, *floats
    )
    single_pass_plan.plan_mhc_collapse(b, x, h_pre)
    single_pass_plan.plan_mhc_collapse_backward(b, f, x, h_pre)
    outside = (*floats, "outside")
    plan.plan_mhc_pre(b, x, *params, *outside)
    plan.plan_mhc_pre_backward(b, f, h_post, h_res, x, *params, h_pre, h_post, h_mix, inv, x, *outside)
    plan.plan_mhc_head(b, x, empty(n, n * width), empty(1), empty(n), None, 1e-6, 1e-6, "outside")
    single_pass_plan.plan_mhc_coefficients(b, x, *params, *outside)
    for form in ("exp", "exp_eps"):
        plan.plan_mhc_sinkhorn(b, h_res, 20, 1e-6, form)
        plan.plan_mhc_sinkhorn_backward(b, h_res, h_res, 20, 1e-6, form)
    return b.launches


PAIRS = list(itertools.product(TARGETS, CASES))


@pytest.mark.parametrize(("target", "case"), part(PAIRS, lambda target, case: case == "bf16"))
def test_compiles_without_differs_spills(target, case):
    assert len(compile_all(launches(TARGETS[target][1], **CASES[case]), target, case)) == 15


def test_numbers_that_the_table_does_not_have_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(offline.RECORD, raising=False)
    table = {
        "versions": [offline.TRITON],
        "kernels": {"cuda:90 k a": {offline.TRITON: ["9 registers, 8 shared, 0 spilled"]}},
    }
    monkeypatch.setattr(offline, "_table", lambda: table)
    assert not offline._differs("cuda:90 k a", offline.Resources(9, 8, 0, False))
    for other in (
        offline.Resources(10, 8, 0, False),
        offline.Resources(9, 8, 4, False),
        offline.Resources(9, 8, 0, True),
    ):
        assert offline._differs("cuda:90 k a", other)
    assert offline._differs("cuda:90 k another case", offline.Resources(9, 8, 0, False))
