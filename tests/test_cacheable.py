# SPDX-License-Identifier: Apache-2.0
"""What this package puts into a graph can be cached and saved like what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from mhc_inductor.ops import registry
from tests.formulas import laws, reference_models_e79, reference_models_mhc
from tests.oracles import e79 as helpers_e79
from tests.oracles.op_contract import op
from tests.ranks.sharded_ops import samples
from tests.tools.fakecuda import fake_cuda, generated_code, without_a_gpu

OPS = {name: args for name, _, args in reversed(samples())}


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def _counts(word: str) -> int:
    """Returns how often one of torch's two caches of graphs did what ``word`` says."""
    counts = {**counters["inductor"], **counters["aot_autograd"]}
    return sum(count for name, count in counts.items() if name in (f"fxgraph_cache_{word}", f"autograd_cache_{word}"))


def _twice(fn: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> None:
    """Compiles and runs with a cold and a warm cache; asserts hits, saved artifacts, and the same bits as before."""
    results = []
    for warm in (False, True):
        torch._dynamo.reset()
        counters.clear()
        results.append(torch.compile(fn, backend="mhc_inductor", fullgraph=True, **options)(*args))
        assert _counts("bypass") == 0 and (_counts("hit") > 0) is warm, dict(counters)
    assert torch.compiler.save_cache_artifacts() is not None
    cold_out, warm_out = ((t,) if isinstance(t, Tensor) else t for t in results)
    assert all(torch.equal(a, b) for a, b in zip(cold_out, warm_out, strict=True))


def test_every_op_has_a_sample():
    assert registry.REFERENCE.keys() == OPS.keys()


def _call(name: str, sample: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Returns a function of the tensors of a sample that calls the op, and the tensors."""
    places = [k for k, a in enumerate(sample) if isinstance(a, Tensor)]

    def fn(*tensors: Tensor) -> Any:
        args = list(sample)
        for place, t in zip(places, tensors, strict=True):
            args[place] = t
        return op(name)(*args)

    return fn, tuple(sample[k].detach() for k in places)


@pytest.mark.parametrize("name", OPS)
def test_a_graph_with_an_op_on_a_cpu_is_cached(name):
    _twice(*_call(name, OPS[name]))


@without_a_gpu
@pytest.mark.parametrize("name", OPS)
def test_a_graph_with_an_op_on_cuda_is_cached(name):
    fn, tensors = _call(name, OPS[name])
    with fake_cuda(), FakeTensorMode(), torch._inductor.config.patch(shape_padding=False):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]
        counters.clear()
        generated_code(lambda: torch.compile(fn, backend="mhc_inductor", fullgraph=True)(*fakes))
    # What follows a miss needs a device.
    assert _counts("bypass") == 0 and counters["inductor"]["fxgraph_cache_miss"] == 1, dict(counters)


def _scan(steps: int = 5, **given: Any) -> tuple[Tensor | None, ...]:
    return tuple(helpers_e79.make_inputs(steps, 2, 8, torch.float32, **given).values())


E79: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "inference": (mhc_inductor.e79_scan, _scan(bias="input"), {}),
    "dynamic": (mhc_inductor.e79_scan, _scan(), {"dynamic": True}),
    "one step": (mhc_inductor.e79_scan, _scan(1), {}),
    "a size that is an expression": (
        lambda kvqm, *rest: mhc_inductor.e79_scan(torch.cat((kvqm, kvqm)), *rest),
        _scan(),
        {"dynamic": True},
    ),
    "two scans": (lambda *a: (*mhc_inductor.e79_scan(*a), *mhc_inductor.e79_scan(a[0] * 2, *a[1:])), _scan(), {}),
    "without the passes": (mhc_inductor.e79_scan, _scan(), {"options": {"use_post_grad_passes": False}}),
}


@pytest.mark.parametrize("case", E79)
def test_e79_on_a_cpu_is_cached_and_right(case):
    fn, args, options = E79[case]
    _twice(fn, args, **options)
    got = torch.compile(fn, backend="mhc_inductor", fullgraph=True, **options)(*args)
    assert all(torch.allclose(g, w, atol=1e-5) for g, w in zip(got, fn(*args), strict=True))


def test_e79_in_a_branch():
    """Compiles a subgraph, which torch itself does not cache."""

    def fn(kvqm: Tensor, *rest: Tensor | None) -> Tensor:
        zeros = torch.zeros_like(kvqm[..., :8])
        return torch.cond(
            kvqm.sum() > 0, lambda t: mhc_inductor.e79_scan(t, *rest)[0], lambda _: zeros.clone(), (kvqm,)
        )

    kvqm, *rest = _scan()
    compiled = torch.compile(fn, backend="mhc_inductor", fullgraph=True)
    for sign in (1, -1):
        given = kvqm.abs() * sign
        assert torch.allclose(compiled(given, *rest), fn(given, *rest), atol=1e-5)


def test_the_loop_stays_where_torch_caches_it():
    """Checks that a cached graph has the fused loop, not a call of the op, which is slower."""
    scan = torch.compile(mhc_inductor.e79_scan, backend="mhc_inductor", fullgraph=True)
    (code,) = run_and_get_code(scan, *_scan())[1]
    assert "while" in code and "mhc_inductor.e79_scan" not in code


def _model(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """Returns a model in plain PyTorch, its arguments, and an op that it is routed to."""
    torch.manual_seed(0)
    if name == "e79":
        layer = reference_models_e79.Layer(16, 8)
        return layer, (torch.randn(5, 2, 16),), "e79_scan"
    if name == "mhc":
        p = {k: t.detach() for k, t in reference_models_mhc.parameters().items()}
        x = torch.randn(2, 3, reference_models_mhc.N, reference_models_mhc.WIDTH)
        return lambda x: reference_models_mhc.liger(reference_models_mhc.liger(x, p), p), (x,), "mhc_pre"
    leaves = {k: t.detach() for k, t in laws.selection_leaves(dtype=torch.float32).items()}
    names = list(leaves)
    return (
        lambda *given: laws.attention(dict(zip(names, given, strict=True))),
        tuple(leaves.values()),
        "selection_attention",
    )


@pytest.mark.parametrize("name", ["e79", "mhc", "selection"])
@pytest.mark.parametrize("train", [False, True])
def test_a_routed_model_is_cached(name, train):
    fn, given, routed = _model(name)

    def run(*args: Any) -> Any:
        return fn(*args)[0] if name == "e79" else fn(*args)

    results = []
    for warm in (False, True):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(run, backend="mhc_inductor", fullgraph=True)
        leaves = [t.detach().requires_grad_(train and t.is_floating_point()) for t in given]
        with torch.set_grad_enabled(train):
            out = compiled(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        results.append([out.detach(), *(torch.autograd.grad(out.square().sum(), wanted) if train else ())])
        assert _counts("bypass") == 0 and (_counts("hit") > 0) is warm, dict(counters)
        assert mhc_inductor.counters()[f"routed {routed}"] > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _saved(fn: Callable[..., Any], args: tuple[Any, ...], path: str, enabled: bool = True) -> tuple[Any, list[Any]]:
    """Compiles as servers do, with a backend that saves what ``standalone_compile`` returns.

    Returns the results of ``fn``, and the inputs of each call of the artifact.
    """
    inputs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        artifact = torch._inductor.standalone_compile(gm, example_inputs)
        artifact.save(path=path, format="unpacked")

        def run(*given: Any) -> Any:
            inputs.append(given)
            return artifact(*given)

        return run

    if enabled:
        mhc_inductor.enable()
    try:
        return torch.compile(fn, backend=backend, fullgraph=True)(*args), inputs
    finally:
        mhc_inductor.disable()


@pytest.mark.parametrize("name", ["e79", "mhc", "selection"])
def test_a_routed_model_is_saved_by_itself(name, tmp_path):
    model, args, routed = _model(name)

    def fn(*given: Any) -> Any:
        return model(*given)[0] if name == "e79" else model(*given)

    before = mhc_inductor.counters().get(f"routed {routed}", 0)
    with torch.no_grad():
        got, calls = _saved(fn, args, str(tmp_path / "saved"))
        want = fn(*args)
    assert mhc_inductor.counters()[f"routed {routed}"] > before and len(calls) == 1
    assert (tmp_path / "saved").exists() and torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("enabled", [False, True])
def test_an_e79_scan_is_saved_and_loaded(enabled, tmp_path):
    args, path = _scan(bias="input"), str(tmp_path / "saved")
    got, calls = _saved(mhc_inductor.e79_scan, args, path, enabled)
    with fresh_cache():
        loaded = torch._inductor.CompiledArtifact.load(path=path, format="unpacked")(*calls[0])
    assert all(any(torch.equal(g, t) for t in loaded) for g in got)
    assert all(torch.allclose(g, w, atol=1e-5) for g, w in zip(got, mhc_inductor.e79_scan(*args), strict=True))
