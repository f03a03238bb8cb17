# SPDX-License-Identifier: Apache-2.0
"""Routing finds mHC in other projects' code: DeepSeek-V4 of transformers, and the reference models."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import deepseek_model
from tests.formulas import reference_models_mhc as reference
from tests.formulas.reference_models_mhc import BOTH, EPS, ITERS, WIDTH, N, P, around, normed, parameters, sublayer
from tests.tools.capture import Captured, alike, difference, eager, run, through_inductor

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
    fn, inputs = functools.partial(_logits, model), _ids()
    named = list(model.named_parameters())
    return run(fn, inputs, named, grad), eager(fn, inputs, named, grad)


def _assert_all_routed(got: Captured) -> None:
    reasons = [f"{m.op}: {m.reason} at {m.source}" for m in got.report.near_misses]
    assert dict(got.ops) == EXPECTED, reasons + got.report.problems
    folded = [n.args[9:12] for op in ("mhc_pre", "mhc_post_pre") for n in got.nodes(f"mhc_inductor.{op}.")]
    assert len(folded) == 2 * LAYERS
    if not got.report.fused:
        config = deepseek_model.config(TINY)
        assert set(folded) == {(config.hc_sinkhorn_iters, config.hc_eps, "softmax")}


def _assert_gradients(got: Captured, plain: Captured) -> None:
    for name, g in plain.grads.items():
        if g is not None and bool(g.any()):
            assert got.grads[name] is not None, f"no gradient reaches {name}"
            assert got.grads[name].dtype is g.dtype and got.grads[name].shape == g.shape, name  # type: ignore[union-attr]


def _routed(*given: Any, within: float = 1e-4, **options: Any) -> Captured:
    return alike(*given, within=within, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["training", "checkpointed", "inference"])
def test_deepseek_v4_is_routed_with_equal_results(mode: str, dtype: torch.dtype) -> None:
    """Has fp32 parameters in both dtypes. Compares bf16 loosely: it changes which experts a token takes.

    The report names each formula's line in transformers, and no near miss but dense attention.
    """
    model = _deepseek(dtype, mode == "checkpointed", mode != "inference")
    assert {p.dtype for name, p in model.named_parameters() if "_hc." in name or "hc_head" in name} == {torch.float32}
    got, plain = _run(model, mode != "inference")
    _assert_all_routed(got)
    _assert_gradients(got, plain)
    a, b = got.outputs[0].double(), plain.outputs[0].double()
    assert difference(got, plain) < 1e-3 if dtype is torch.float32 else float((a - b).norm() / b.norm()) < 0.1
    assert Counter(r.op for r in got.report.routed if r.op in EXPECTED) == EXPECTED
    assert all("modeling_deepseek_v4.py" in r.source for r in got.report.routed)
    # Both attentions see all earlier keys at this length: dense attention, with a sink.
    assert all(miss.ordinary for miss in got.report.near_misses) and not got.report.problems


def _ids() -> tuple[Tensor, ...]:
    return (deepseek_model.tokens(TINY, torch.device("cpu")),)


def test_deepseek_v4_through_inductor() -> None:
    """Runs two layers forward; one layer trains below."""
    given = functools.partial(_logits, _deepseek(torch.float32)), _ids(), (), False
    got = through_inductor(*given)
    assert {op: got.ops[op] for op in EXPECTED} == EXPECTED and difference(got, eager(*given)) < 1e-3


def test_deepseek_v4_trains_through_inductor() -> None:
    one = dataclasses.replace(TINY, layers=1)
    model = deepseek_model.build(one, torch.device("cpu"), torch.float32).train()

    def logits_and_loss(ids: Tensor) -> tuple[Tensor, Tensor]:
        out = model(ids, labels=ids)
        return out.logits, out.loss

    given = logits_and_loss, _ids(), list(model.named_parameters())
    got, plain = through_inductor(*given), eager(*given)
    _assert_gradients(got, plain)
    assert {op: got.ops[op] for op in EXPECTED} == {"mhc_pre": 2, "mhc_post": 2, "mhc_head": 1}
    hyper = [name for name in got.grads if "_hc." in name or "hc_head." in name]
    assert len(hyper) == 9 and all(bool(got.grads[name].any()) for name in hyper if "_hc." in name)  # type: ignore[union-attr]
    assert difference(got, plain) < 5e-5
    assert 4.5 < float(plain.outputs[1]) < 7.0, "an untrained model knows nothing: about ln 256 = 5.55"


def _expected(name: str, grad: bool = True) -> dict[str, int]:
    usual = reference.REFERENCE_MODELS[name][1]
    return reference.IN_TRAINING.get(name, usual) if grad else usual


def _reference_model(
    name: str, dtype: torch.dtype
) -> tuple[Callable[..., Any], tuple[Tensor, ...], list[tuple[str, Tensor]]]:
    fn, _ = reference.REFERENCE_MODELS[name]
    p = parameters()
    shape = (2, 6, N, N) if "sinkhorn" in name else (2, N, 6, WIDTH) if name == "streams_first" else (2, 6, N, WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return functools.partial(fn, p=p), (x,), list(p.items())


@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(reference.REFERENCE_MODELS))
def test_formulas_of_other_projects_are_routed(name: str, dynamic: bool, grad: bool) -> None:
    fn, inputs, named = _reference_model(name, torch.float32)
    tokens = [d for d in (0, 1, 2) if inputs[0].shape[d] in (2, 6)]
    got = _routed(fn, inputs, named, _expected(name, grad), grad, dynamic=None, symbolic=tokens if dynamic else ())
    said = [f"{m.op}: {m.reason}" for m in got.report.near_misses]
    assert not grad or said[:1] == reference.REASONS.get(name, []), "the report says what differs"


@pytest.mark.parametrize("name", list(reference.REFERENCE_MODELS))
def test_formulas_of_other_projects_are_routed_for_one_token(name: str) -> None:
    """Runs a single token, as in decoding, where a token's vectors have the shapes of weights."""
    fn, (x,), named = _reference_model(name, torch.float32)
    inputs = (x[:1, :, :1] if name == "streams_first" else x[:1, :1],)
    for grad in (True, False):
        _routed(fn, inputs, named, _expected(name, grad), grad)


def test_one_token_sliced_from_more() -> None:
    fn, inputs, named = _reference_model("paper", torch.float32)
    _routed(lambda x: fn(x[:1, :1]), inputs, named, BOTH)


@pytest.mark.parametrize("name", [name for name in reference.REFERENCE_MODELS if "sinkhorn" not in name])
def test_formulas_of_other_projects_are_routed_in_bf16(name: str) -> None:
    fn, inputs, named = _reference_model(name, torch.bfloat16)
    _routed(fn, inputs, named, _expected(name), within=2e-2)


def test_sinkhorn_iterations_of_the_transpose_are_counted() -> None:
    """Checks that columns-first iterations of the transposed logits are all in one op."""
    fn, inputs, named = _reference_model("hyper_connections_sinkhorn", torch.float32)
    got = run(fn, inputs, named)
    assert [(n.args[1], n.args[3]) for n in got.nodes("mhc_sinkhorn")] == [(ITERS, "exp")]


def test_automodels_sublayers_are_fused_except_where_the_memory_writes() -> None:
    """Counts the passes between two sublayers of four: the memory stands between the second and the third."""
    fn, inputs, named = _reference_model("automodel", torch.float32)
    assert [f.op for f in _routed(fn, inputs, named).report.fused] == ["mhc_single_pass"] * 2


def _formula(x: Tensor, p: P, rows: str = "pre post res", alpha: bool = True, bias: bool = True) -> Tensor:
    """Computes the formula with phi's parts in the given order, with or without alpha and bias."""
    n, sizes = x.shape[-2], {"pre": N, "post": N, "res": N * N}
    names = rows.split()
    z = F.rms_norm(x.flatten(-2).float(), (n * x.shape[-1],), eps=EPS) @ p["phi"].T
    z = z * torch.cat([p["alpha"][k].expand(sizes[name]) for k, name in enumerate(names)]) if alpha else z
    parts = dict(zip(names, (z + p["bias"] if bias else z).split([sizes[name] for name in names], -1), strict=True))
    f_out = sublayer((torch.sigmoid(parts["pre"]).unsqueeze(-1) * x.float()).sum(-2).to(x.dtype), p).float()
    matrix = parts["res"].unflatten(-1, (n, n)).exp()
    for step in range(2 * ITERS):
        matrix = matrix / matrix.sum(-1 - step % 2, keepdim=True)
    out = matrix @ x.float() + 2 * torch.sigmoid(parts["post"]).unsqueeze(-1) * f_out.unsqueeze(-2)
    return out.to(x.dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "res first": {"rows": "res pre post"},
    "post first": {"rows": "post pre res"},
    "no alpha": {"alpha": False},
    "no bias": {"bias": False},
    "neither": {"alpha": False, "bias": False, "rows": "res post pre"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_weights_in_another_order_or_left_out(name: str, dtype: torch.dtype) -> None:
    """Checks that the op's phi, alpha and bias are assembled from the model's, with constants for missing ones."""
    _, inputs, named = _reference_model("paper", dtype)
    fn = functools.partial(_formula, p=dict(named), **VARIANTS[name])
    _routed(fn, inputs, named, BOTH, within=1e-4 if dtype is torch.float32 else 2e-2)


def test_weights_that_are_computed_after_the_projection() -> None:
    """Computes alpha and bias after the projection: the op must be placed after all its inputs."""
    _, inputs, named = _reference_model("paper", torch.float32)

    def fn(x: Tensor) -> Tensor:
        p = dict(named)
        z = normed(x.flatten(-2)) @ p["phi"].T
        return around(x, {**p, "alpha": F.softplus(p["alpha"]).neg().exp(), "bias": p["bias"].tanh()}, torch.exp, z)

    _routed(fn, inputs, named, BOTH)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector norm": lambda v: v / (torch.linalg.vector_norm(v, dim=-1, keepdim=True) ** 2 / v.shape[-1] + EPS).sqrt(),
    "root times itself": lambda v: v / ((r := v.norm(dim=-1, keepdim=True)) * r / v.shape[-1] + EPS).sqrt(),
    "einsum": lambda v: v * (torch.einsum("...k,...k->...", v, v) / v.shape[-1] + EPS).pow(-0.5).unsqueeze(-1),
}


@pytest.mark.parametrize("name", list(NORMS))
def test_other_spellings_of_the_norm(name: str) -> None:
    _, inputs, named = _reference_model("paper", torch.float32)
    p = dict(named)
    _routed(lambda x: around(x, p, torch.exp, NORMS[name](x.flatten(-2)) @ p["phi"].T), inputs, named, BOTH)


@pytest.mark.parametrize("tokens", [6, N, 1])
def test_streams_in_another_dim_than_the_last_but_one(tokens: int) -> None:
    """Tests as many tokens as streams, and a single token, which could confuse the dims."""
    fn, _, named = _reference_model("streams_first", torch.float32)
    x = torch.randn(2, N, tokens, WIDTH, generator=torch.Generator().manual_seed(3))
    _routed(fn, (x,), named, BOTH)


@pytest.mark.parametrize("inside", [False, True], ids=["bias outside", "alpha times the bias"])
def test_transposed_logits_are_balanced_by_an_op_of_their_own(inside: bool) -> None:
    _, inputs, named = _reference_model("paper", torch.float32)
    p, turned = dict(named), lambda m: reference._balanced(m.mT)
    fn = lambda x: reference.gates_written_out(x, p, torch.sigmoid, inside, turned)  # noqa: E731
    _routed(fn, inputs, named, {**BOTH, "mhc_sinkhorn": 1})


def _balanced_in_place(logits: Tensor, p: P) -> Tensor:
    matrix = torch.exp(logits - logits.max())
    for step in range(2 * ITERS):
        matrix /= matrix.sum(dim=-1 - step % 2, keepdim=True)
    return matrix


def _kept(logits: Tensor, p: P) -> tuple[Tensor, Tensor]:
    """Reads the initial matrix after iterations in place, which must have changed it."""
    matrix = torch.exp(logits)
    first = matrix
    for step in range(4):
        matrix /= matrix.sum(dim=-1 - step % 2, keepdim=True)
    return matrix, first + 1


@pytest.mark.parametrize(("fn", "within"), [(_balanced_in_place, 1e-4), (_kept, 1e-6)])
def test_iterations_in_place(fn: Callable[..., Any], within: float) -> None:
    """Divides in place, as ports of the paper do in inference."""
    _, inputs, named = _reference_model("log_domain_sinkhorn", torch.float32)
    fn = functools.partial(fn, p=dict(named))
    alike(fn, inputs, named, None if within < 1e-4 else {"mhc_sinkhorn": 1}, False, within)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_what_a_transform_differentiates_is_left_alone(transform: str, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that formulas inside a transform stay, and those before and after it are routed.

    The op has no forward-mode derivative, and tensors inside belong to the transform's level.
    """
    fn, inputs, named = _reference_model("paper", torch.float32)

    def step(x: Tensor) -> Tensor:
        inner = x.detach()
        if transform == "grad":
            return fn(x) + torch.func.grad(lambda y: fn(y).square().sum())(inner)
        return fn(x) + torch.func.jvp(fn, (inner,), (torch.ones_like(x),))[1]

    with caplog.at_level("INFO", "mhc_inductor"):
        _routed(step, inputs, named, reference.REFERENCE_MODELS["paper"][1], False)
    assert "torch.func.grad or torch.func.jvp" in caplog.text
