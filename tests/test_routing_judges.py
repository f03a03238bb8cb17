"""Routing finds mHC in models that nobody here wrote: DeepSeek-V4 of transformers, and other projects' formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_inductor
from benchmarks import deepseek_model
from tests.capture import Captured, difference, eager, evaluate, run
from tests.judges_mhc import ITERS, JUDGES, WIDTH, N, parameters

TINY = deepseek_model.TINY
LAYERS = TINY.layers
EXPECTED = {"mhc_pre": 2 * LAYERS, "mhc_post": 2 * LAYERS, "mhc_head": 1}


def _deepseek(dtype: torch.dtype, checkpointed: bool = False, training: bool = False) -> torch.nn.Module:
    model = deepseek_model.build(TINY, torch.device("cpu"), dtype)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train(training)


def _logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(ids).logits


def _run(model: torch.nn.Module, grad: bool) -> tuple[Captured, Captured]:
    fn, inputs = functools.partial(_logits, model), (deepseek_model.tokens(TINY, torch.device("cpu")),)
    named = list(model.named_parameters())
    return run(fn, inputs, named, grad), eager(fn, inputs, named, grad)


def _assert_all_routed(got: Captured) -> None:
    reasons = [f"{m.op}: {m.reason} at {m.source}" for m in got.report.near_misses]
    assert dict(got.ops) == EXPECTED, reasons + got.report.problems
    folded = [
        node.args[9:12]
        for gm in got.graphs
        for inner in gm.modules()
        if isinstance(inner, torch.fx.GraphModule)
        for node in inner.graph.nodes
        if str(node.target).startswith(("mhc_inductor.mhc_pre.", "mhc_inductor.mhc_post_pre."))
    ]
    assert len(folded) == 2 * LAYERS
    if not got.report.fused:
        config = deepseek_model.config(TINY)
        assert set(folded) == {(config.hc_sinkhorn_iters, config.hc_eps, "softmax")}


def _assert_gradients(got: Captured, plain: Captured) -> None:
    for name, g in plain.grads.items():
        if g is not None and bool(g.any()):
            assert got.grads[name] is not None, f"no gradient reaches {name}"
            assert got.grads[name].dtype is g.dtype and got.grads[name].shape == g.shape, name  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["training", "checkpointed", "inference"])
def test_deepseek_v4_in_fp32_is_routed_with_equal_results(mode: str) -> None:
    model = _deepseek(torch.float32, mode == "checkpointed", mode != "inference")
    got, plain = _run(model, mode != "inference")
    _assert_all_routed(got)
    _assert_gradients(got, plain)
    assert difference(got, plain) < 1e-3


@pytest.mark.parametrize("mode", ["training", "checkpointed", "inference"])
def test_deepseek_v4_with_bf16_streams_and_fp32_parameters_is_routed(mode: str) -> None:
    """bf16 changes which experts a token takes, so the numbers here are only close."""
    model = _deepseek(torch.bfloat16, mode == "checkpointed", mode != "inference")
    assert {p.dtype for name, p in model.named_parameters() if "_hc." in name or "hc_head" in name} == {torch.float32}
    got, plain = _run(model, mode != "inference")
    _assert_all_routed(got)
    _assert_gradients(got, plain)
    a, b = got.outputs[0].double(), plain.outputs[0].double()
    assert float((a - b).norm() / b.norm()) < 0.1


def test_deepseek_v4_counts_grow_with_its_layers() -> None:
    """The report names each formula's line in transformers, and no near miss."""
    report = run(functools.partial(_logits, _deepseek(torch.float32)), _ids(), (), False).report
    assert sorted(r.op for r in report.routed if r.op in EXPECTED) == sorted(
        op for op, k in EXPECTED.items() for _ in range(k)
    )
    assert all("modeling_deepseek_v4.py" in r.source for r in report.routed)
    assert not report.near_misses and not report.problems


def _ids() -> tuple[Tensor, ...]:
    return (deepseek_model.tokens(TINY, torch.device("cpu")),)


def test_deepseek_v4_through_inductor() -> None:
    """Two layers forward; one layer of it trains in tests/test_example_deepseek.py."""
    model = _deepseek(torch.float32)
    torch._dynamo.reset()
    before = mhc_inductor.counters()
    compiled = torch.compile(functools.partial(_logits, model), backend="mhc_inductor")
    got = Captured(*evaluate(compiled, _ids(), (), False))
    after = mhc_inductor.counters()
    counted = {op: after.get(f"routed {op}", 0) - before.get(f"routed {op}", 0) for op in EXPECTED}
    assert counted == EXPECTED
    assert difference(got, eager(functools.partial(_logits, model), _ids(), (), False)) < 1e-3


def _judge(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Tensor, ...], list[tuple[str, Tensor]]]:
    fn, _ = JUDGES[name]
    p = parameters()
    shape = (2, 6, N, N) if "sinkhorn" in name else (2, 6, N, WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return functools.partial(fn, p=p), (x,), list(p.items())


@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(JUDGES))
def test_formulas_of_other_projects_are_routed(name: str, dynamic: bool, grad: bool) -> None:
    fn, inputs, named = _judge(name, torch.float32)
    got = run(fn, inputs, named, grad, dynamic=None, symbolic=(0, 1) if dynamic else ())
    plain = eager(fn, inputs, named, grad)
    assert dict(got.ops) == JUDGES[name][1], [f"{m.op}: {m.reason}" for m in got.report.near_misses]
    _assert_gradients(got, plain)
    assert difference(got, plain) < 1e-4


@pytest.mark.parametrize("name", [name for name in JUDGES if "sinkhorn" not in name])
def test_formulas_of_other_projects_are_routed_in_bf16(name: str) -> None:
    fn, inputs, named = _judge(name, torch.bfloat16)
    got, plain = run(fn, inputs, named), eager(fn, inputs, named)
    assert dict(got.ops) == JUDGES[name][1], [f"{m.op}: {m.reason}" for m in got.report.near_misses]
    _assert_gradients(got, plain)
    assert difference(got, plain) < 2e-2


def test_sinkhorn_iterations_of_the_transpose_are_counted() -> None:
    """Columns before rows is the same iteration of the transposed logits, all of it in one op."""
    fn, inputs, named = _judge("hyper_connections_sinkhorn", torch.float32)
    got = run(fn, inputs, named)
    calls = [n.args[1:] for gm in got.graphs for n in gm.graph.nodes if "mhc_sinkhorn" in str(n.target)]
    assert [(c[0], c[2]) for c in calls] == [(ITERS, "exp")]
