# SPDX-License-Identifier: Apache-2.0
"""The fused ops mhc_post_pre and mhc_post_head: equal to the two separate ops, exact gradients, refusals, one trace."""

from __future__ import annotations

import pytest
import torch

import mhc_inductor  # noqa: F401  (registers the ops)
from mhc_inductor.ops import registry
from mhc_inductor.ops.dims import results
from mhc_inductor.ops.registry import call
from tests.oracles.mhc import (
    HEAD_OPTIONS,
    OPS,
    PRE_OPTIONS,
    make_fused_inputs,
    oracle_fused,
    relative,
    run_fused,
    upstream,
)
from tests.oracles.samples import sample, trainable

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UP = ("x_out", "h_in", "next_post", "next_res")
EXACT = 1e-12
OPTIONS = {**PRE_OPTIONS, "sinkhorn_iters": 3}


def apart(inputs, transpose_res, head=False):
    """Returns the outputs of the two separate ops, through autograd, under the fused op's names."""
    x, f_out, h_post, h_res, *params = inputs.values()
    x_out = OPS.mhc_post(x, f_out, h_post, h_res, transpose_res)
    after = (
        OPS.mhc_head(x_out, *params, *HEAD_OPTIONS.values()) if head else OPS.mhc_pre(x_out, *params, *OPTIONS.values())
    )
    names = ("h_in", "h_pre", "h_mix", "inv_rms") if head else ("h_in", *UP[2:], "h_pre", "h_mix", "inv_rms")
    return {"x_out": x_out, **dict(zip(names, after, strict=True))}


@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("transpose_res", [False, True], ids=["R", "RT"])
def test_equal_bits_to_the_two_separate_ops(head, dtype, transpose_res):
    inputs = make_fused_inputs((2, 3), 4, 40, dtype, head=head)
    got = run_fused(inputs, transpose_res, None, None if head else OPTIONS)
    want = apart(inputs, transpose_res, head)
    assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head", [False, True], ids=["pre", "head"])
def test_no_less_accurate_than_the_two_ops(dtype, head):
    """Compares errors: the two separate ops round the gradient of x_out between them, the fused op does not."""
    inputs = make_fused_inputs((64,), 4, 64, dtype, head=head)
    leaf = {k: t.detach().requires_grad_() for k, t in inputs.items()}
    want = apart(leaf, True, head)
    up = upstream({k: t for k, t in want.items() if k in UP})
    grads = torch.autograd.grad([want[k] for k in up], list(leaf.values()), list(up.values()))
    options = None if head else OPTIONS
    exact = oracle_fused(inputs, True, want["x_out"].detach(), up, options)
    got = run_fused(inputs, True, up, options)
    for (key, t), other in zip(inputs.items(), grads, strict=True):
        mine, theirs = (relative(g, exact[f"d{key}"]) for g in (got[f"d{key}"], other))
        assert mine <= 1.05 * theirs + 2e-6, key
        if dtype is not F32 and key in ("h_post", "h_res"):
            assert mine < 0.01 * theirs, key
        assert got[f"d{key}"].dtype is t.dtype


# --- autograd through the registered op ---------------------------------------------------------------------


def outputs(values, head=False, transpose_res=True):
    tail = HEAD_OPTIONS if head else OPTIONS
    name = "mhc_post_head" if head else "mhc_post_pre"
    return call(name, *values[:4], transpose_res, *values[4:], *tail.values())


def leaves(*args, **kwargs):
    return [t.requires_grad_() for t in make_fused_inputs(*args, **kwargs).values()]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step_on_the_cpu(dynamic):
    values = leaves((5,), 4, 16, F32)

    def step(*args):
        return outputs(args)[:4]

    compiled = torch.compile(step, backend="mhc_inductor", fullgraph=True, dynamic=dynamic)
    results = []
    for fn in (step, compiled):
        out = fn(*values)
        results.append([*out, *torch.autograd.grad(sum(t.square().sum() for t in out), values)])
    for a, b in zip(*results, strict=True):
        assert relative(b, a) < 2e-6


PARAMS = ("phi", "alpha", "bias", "gamma")
UNREAD = {
    ("mhc_post_pre", "x_out"): PARAMS,
    ("mhc_post_head", "x_out"): PARAMS,
    ("mhc_single_pass", "x_out"): ("h_pre", *PARAMS),
    ("mhc_single_pass", "h_in"): PARAMS,
    **{("mhc_single_pass", f"next_{name}"): ("h_pre",) for name in ("pre", "post", "res")},
    **{("mhc_post_pre", name): () for name in UP[1:]},
    ("mhc_post_head", "h_in"): (),
}


@pytest.mark.parametrize(("name", "output"), UNREAD)
def test_what_an_output_does_not_read_has_no_gradient(name, output):
    """As between separate ops: None, not zeros."""
    given = dict(zip(registry.argument_names(name), trainable(name, sample(name, iters=2)), strict=False))
    leaves = {k: t for k, t in given.items() if isinstance(t, torch.Tensor)}
    out = dict(zip(results(name), call(name, *given.values()), strict=True))
    grads = torch.autograd.grad(out[output].sum(), list(leaves.values()), allow_unused=True)
    assert tuple(k for k, g in zip(leaves, grads, strict=True) if g is None) == UNREAD[name, output]
