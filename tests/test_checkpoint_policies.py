# SPDX-License-Identifier: Apache-2.0
"""Selective checkpoint policies: which ops they see in a region, what is fused around it, and what ops_to_save names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_routing_index import given, spelled
from test_routing_lists import ENTRIES, _model, inputs, written
from test_routing_single_pass import Package, streams
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mhc_inductor
from mhc_inductor.ops import registry
from mhc_inductor.routing.operators.mhc import fuse
from tests.formulas.laws import Compiled, Leaves, block, e79, e79_leaves, mhc_leaves, sdpa, selection_leaves

NAMES = {op.name().split("::")[1] for op in mhc_inductor.ops_to_save()}
FUSED = {"mhc_post_pre", "mhc_post_head", "mhc_single_pass"}


def test_every_op_is_saved_or_fused_or_a_gradient():
    every = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("mhc_inductor::")}
    gradients = {n for n in every if n.endswith("_backward")}
    assert every == registry.REFERENCE.keys()
    assert every - gradients - NAMES == FUSED and not NAMES & (gradients | FUSED)
    assert {"index_topk", "index_scores", "selection_list_attention", "e79_scan", "mhc_coefficients"} <= NAMES
    # What the fusion of the pass may put in.
    assert {"mhc_single_pass", *(fused for _, fused in fuse._FUSED.values())} == FUSED


class Policy:
    """A policy that saves our ops and notes which of them it sees."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.ops = set(mhc_inductor.ops_to_save())

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if getattr(op, "namespace", "") == "mhc_inductor":
            self.seen.add(op.name().split("::")[1])
        return CheckpointPolicy.MUST_SAVE if op in self.ops else CheckpointPolicy.PREFER_RECOMPUTE

    def around(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls ``fn`` as a region with this policy."""
        context = functools.partial(create_selective_checkpoint_contexts, self)
        return checkpoint(fn, *args, use_reentrant=False, context_fn=context)


def _plain(fn: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False)


def _twice(x: Tensor, p: Leaves) -> Tensor:
    return block(block(x, p), p)


def _loop(kvqm: Tensor, p: Leaves) -> Tensor:
    return torch.stack(e79({**p, "kvqm": kvqm})[0])


def _head(q: Tensor, p: Leaves) -> Tensor:
    return sdpa({**p, "q": q})


def _indexer(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the chosen keys, and a value with a gradient: a region without one is not computed again."""
    return spelled("einsum", "none", "method")[0](*tensors), tensors[0].float().sin()


def _lists(*tensors: Tensor) -> Tensor:
    return _model("packed", "scattered", True, written)(*tensors)


def _region(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a region and its arguments, the first of which is trained."""
    p = mhc_leaves()
    return {
        "mhc": (_twice, (p["x"], p)),
        "mhc, one checkpoint in another": (functools.partial(_plain, _twice), (p["x"], p)),
        "single pass": (Package(), (streams(),)),
        "single pass, one checkpoint in another": (functools.partial(_plain, Package()), (streams(),)),
        "e79": (_loop, (e79_leaves()["kvqm"], e79_leaves())),
        "selection": (_head, (selection_leaves()["q"], selection_leaves())),
        "lists": (_lists, inputs(packed=True, entries=ENTRIES)),
        "index": (_indexer, tuple(given(dtype=torch.float32))),
    }[name]


SEEN = {
    "mhc": {"mhc_pre", "mhc_post"},
    "mhc, one checkpoint in another": {"mhc_pre", "mhc_post"},
    "single pass": {"mhc_coefficients", "mhc_collapse", "mhc_post"},
    "single pass, one checkpoint in another": {"mhc_coefficients", "mhc_collapse", "mhc_post"},
    "e79": {"e79_scan"},
    "selection": {"selection_attention"},
    "lists": {"selection_list_attention"},
    "index": {"index_topk"},
}


def _run(fn: Callable[..., Any], args: tuple[Any, ...], compiled: Compiled | None = None) -> list[Tensor]:
    """Returns the outputs of ``fn`` and the gradient of its first argument, compiled and routed or eagerly."""
    torch._dynamo.reset()
    first = args[0].detach().clone().requires_grad_()
    call = fn if compiled is None else torch.compile(fn, backend=compiled.backend, dynamic=False)
    out = call(first, *args[1:])
    outputs = out if isinstance(out, tuple) else (out,)
    loss = sum(t.float().square().sum() for t in outputs if t.requires_grad)
    return [*outputs, *torch.autograd.grad(loss, first)]


def _same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.to(b.dtype).sort().values, b.sort().values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEEN)
def test_a_policy_sees_the_parts_and_never_what_stands_for_several(name):
    fn, args = _region(name)
    policy, compiled = Policy(), Compiled()
    got = _run(lambda *a: policy.around(fn, *a), args, compiled)
    assert policy.seen == SEEN[name] <= NAMES
    assert not compiled.report.fused and not compiled.report.problems
    _same(got, _run(fn, args))


@pytest.mark.parametrize(("name", "fused"), [("mhc", "mhc_post_pre"), ("single pass", "mhc_single_pass")])
def test_code_around_a_region_with_a_policy_is_fused(name, fused):
    fn, args = _region(name)
    policy, compiled = Policy(), Compiled()

    def both(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return policy.around(fn, x, *rest), fn(x * 0.5, *rest)

    got = _run(both, args, compiled)
    assert policy.seen == SEEN[name] and {f.op for f in compiled.report.fused} == {fused}
    _same(got, _run(lambda x, *rest: (fn(x, *rest), fn(x * 0.5, *rest)), args))


@pytest.mark.parametrize(("name", "fused"), [("mhc", "mhc_post_pre"), ("single pass", "mhc_single_pass")])
def test_a_policy_around_a_compiled_call_leaves_its_fusions(name, fused):
    fn, args = _region(name)
    policy, compiled = Policy(), Compiled()
    torch._dynamo.reset()
    call = torch.compile(fn, backend=compiled.backend, dynamic=False)
    got = _run(lambda *a: policy.around(call, *a), args)
    assert {f.op for f in compiled.report.fused} == {fused} and not compiled.report.problems
    _same(got, _run(fn, args))
