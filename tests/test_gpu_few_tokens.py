# SPDX-License-Identifier: Apache-2.0
"""Few tokens run kernels of their own, which give a token the bits that the kernels for many give it (sm_90)."""

from __future__ import annotations

import pytest
import torch
from test_gpu import captured
from test_post_project import narrow, on_hopper, run, run_single_pass  # noqa: F401 (narrow is a fixture)

from mhc_inductor.kernels.mhc import config, gluon, plan
from tests.oracles import mhc as h
from tests.oracles import single_pass as one
from tests.oracles.poisoned import Poisoned

BF16 = torch.bfloat16
WIDTHS = [1024, 1088, 2560, 4096, 7168]
TOKENS = (1, 2, 7, 16, 33, 64, 65, 208, 256)
MADE = [{"gamma": False}, {"head": True}, {"residual": False}, {"full": False}, {"param_dtype": BF16}]
CASES = [(width, {}) for width in WIDTHS] + [(width, made) for width in (1088, 4096) for made in MADE]


def last(inputs, tokens):
    """Returns inputs of the last tokens alone, in memory of their own."""
    return {k: t if t is None or k in one.PARAMS else t[-tokens:].clone() for k, t in inputs.items()}


def check(op, inputs, monkeypatch):
    """Runs op by the kernels for many tokens, by those for few, and in other batches: a token's bits stay equal."""
    many = op(inputs)
    assert inputs["x"].shape[0] == config.FEW_TOKENS + 1, "this batch runs the kernels for many tokens"
    assert not any(t.isnan().any() for t in many.values())
    for tokens in TOKENS:
        few = op(last(inputs, tokens))
        for k, t in few.items():
            assert torch.equal(t, many[k][-tokens:]), (tokens, k)
    monkeypatch.setattr(config, "FEW_TOKENS", 0)
    for k, t in op(last(inputs, 33)).items():
        assert torch.equal(t, many[k][-33:]), k
    monkeypatch.setattr(config, "FEW_TOKENS", 1000)
    for k, t in op(inputs).items():
        assert torch.equal(t, many[k]), k


@on_hopper
@pytest.mark.parametrize(("width", "made"), CASES, ids=str)
def test_fused(width, made, monkeypatch):
    inputs = h.make_fused_inputs((config.FEW_TOKENS + 1,), 4, width, BF16, device="cuda", **made)
    check(lambda inputs: run(inputs, width == 1024), inputs, monkeypatch)


@on_hopper
@pytest.mark.parametrize(("width", "made"), [c for c in CASES if c[1] in ({}, *MADE[0:3:2])], ids=str)
@pytest.mark.parametrize("form", ["softmax", "exp"])
def test_single_pass(width, made, form, monkeypatch):
    monkeypatch.setitem(h.PRE_OPTIONS, "sinkhorn_form", form)
    inputs = one.make_inputs((config.FEW_TOKENS + 1,), 4, width, BF16, device="cuda", **made)
    check(lambda inputs: run_single_pass(inputs, width == 1024), inputs, monkeypatch)


@on_hopper
@pytest.mark.parametrize("width", [1088, 4096])
def test_eps_outside_the_root(width, monkeypatch):
    outside, tokens = {"norm_eps": 0.1, "norm_form": "outside"}, (config.FEW_TOKENS + 1,)
    with monkeypatch.context() as m:
        check(lambda i: run(i, options=outside), h.make_fused_inputs(tokens, 4, width, BF16, device="cuda"), m)
    inputs = one.make_inputs(tokens, 4, width, BF16, device="cuda")
    check(lambda i: run_single_pass(i, options=outside), inputs, monkeypatch)


@on_hopper
def test_in_a_cuda_graph():
    inputs = last(h.make_fused_inputs((300,), 4, 2560, BF16, device="cuda"), 64)
    want = run(inputs)
    graph, got = captured(lambda: run(inputs))
    for t in got.values():
        t.fill_(0.0)
    graph.replay()
    assert all(torch.equal(got[k], want[k]) for k in want)


@on_hopper
def test_twenty_iterations():
    inputs = h.make_fused_inputs((config.FEW_TOKENS + 1,), 4, 4096, BF16, device="cuda")
    many, few = (run(i, options={"sinkhorn_iters": 20}) for i in (inputs, last(inputs, 16)))
    assert all(torch.equal(t, many[k][-16:]) for k, t in few.items())


def _pre(inputs):
    b = Poisoned(torch.device("cuda", torch.cuda.current_device()))
    options = {**h.PRE_OPTIONS, "sinkhorn_iters": 3}
    return plan.plan_mhc_pre(b, *inputs.values(), *options.values()), b.names


@on_hopper
@pytest.mark.parametrize(
    ("n", "width", "dtype", "gamma"),
    [(4, 4096, BF16, False), (4, 2560, BF16, True), (8, 1280, BF16, True), (3, 1536, BF16, False),
     (4, 1000, torch.float32, True), (4, 1000, torch.float16, True)],
)  # fmt: skip
def test_pre(n, width, dtype, gamma, monkeypatch):
    # Where one read of x is possible, one kernel runs for any number of tokens.
    monkeypatch.setattr(gluon, "ONE_READ_PRE", range(0))
    inputs = h.make_inputs((208,), n, width, dtype, device="cuda", gamma=gamma)
    many, names = _pre(inputs)
    assert len(names) == 3
    for tokens in TOKENS[:7]:
        few, names = _pre(last(inputs, tokens))
        assert len(names) == (2 if dtype is BF16 and tokens <= config.PRE_FEW_TOKENS else 3)
        for k, t in enumerate(few):
            assert torch.equal(t, many[k][-tokens:]), (tokens, k)
