# SPDX-License-Identifier: Apache-2.0
"""The contract of an op (CONTRIBUTING.md), the same for each: opcheck, outputs, gradients, transforms, compilation.

What only one operator does is in the file of its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import grad, vmap
from torch.library import opcheck

import mhc_inductor
from mhc_inductor.ops import registry
from mhc_inductor.ops.dims import results
from tests.oracles import index
from tests.oracles.op_contract import check_outputs, check_vmap, op, outputs, strided
from tests.oracles.samples import BF16, F32, F64, SAMPLES, VARIANTS, named, sample, trainable
from tests.oracles.selection import error
from tests.tools.deterministic import deterministic_algorithms

pytestmark = pytest.mark.usefixtures("one_thread")
of_every_sample = pytest.mark.parametrize(("name", "variant"), SAMPLES)
FORWARD = [p for p in SAMPLES if f"{p.values[0]}_backward" in registry.REFERENCE and p.values[1].get("segment") != 0]
of_every_forward = pytest.mark.parametrize(("name", "variant"), FORWARD)
of_every_gradient = pytest.mark.parametrize(("name", "variant"), [p for p in FORWARD if "fp64" in p.id])


def differentiable(name: str) -> int:
    """Returns how many results have a gradient, the first ones."""
    names = registry.argument_names(f"{name}_backward")
    return next(i for i, a in enumerate(names) if a in (*registry.argument_names(name), *results(name)))


def function_of(name: str) -> Callable[..., Any] | None:
    """Returns the public function of an op, if it has one."""
    return getattr(mhc_inductor, "selection_attention" if name.endswith("_attention") else name, None)


def called(name: str) -> Callable[..., Any]:
    """Returns the public function of an op, or what calls an op that has none, with arguments by name."""
    return function_of(name) or (lambda **given: registry.call(name, *given.values()))


def public(name: str, compiled: Callable[..., Any] | None = None, **given: Any) -> tuple[Tensor, ...]:
    """Returns the results that are no None of an op's public function, or of what it was compiled to."""
    if (function := function_of(name)) is not None:
        given |= {"return_lse": True, "reduction": "none"}
        if "v" in given:
            given |= {"v": given["k"]} if given["v"] is None else {"v_width": None}
        given = {k: v for k, v in given.items() if k in inspect.signature(function).parameters}
    return tuple(t for t in outputs((compiled or called(name))(**given)) if t is not None)


def weighted(*out: Tensor) -> Tensor:
    """Returns a sum in which every finite entry has a different weight."""
    finite = [torch.where(t.isfinite(), t, 0.0).double() for t in out]
    return sum((t * torch.linspace(-1, 1, t.numel(), dtype=F64).view_as(t)).sum() for t in finite)


def trained(name: str, given: Mapping[str, Any], function: Callable[..., Any] = public) -> list[Tensor | None]:
    """Returns the results of a function and the gradients of their weighted sum."""
    given = dict(zip(given, trainable(name, tuple(given.values())), strict=True))
    out = function(name, **given)
    leaves = [a for a in given.values() if isinstance(a, Tensor) and a.requires_grad]
    wanted = [t for t in out if t.requires_grad]
    return [*(t.detach() for t in out), *torch.autograd.grad(weighted(*wanted), leaves, allow_unused=True)]


def same(got: list[Tensor | None], want: list[Tensor | None], tolerance: float = 0.0) -> bool:
    """Returns whether results have the same dtypes, and the same bits or errors below ``tolerance``."""

    def equal(a: Tensor, b: Tensor) -> bool:
        near = tolerance and b.is_floating_point() and error(a, b) < tolerance + 2 * torch.finfo(b.dtype).eps
        return a.dtype is b.dtype and (near or torch.equal(a, b))

    return all(b is None if a is None else equal(a, b) for a, b in zip(got, want, strict=True))


def test_every_op_is_sampled():
    assert {p.values[0] for p in SAMPLES} == registry.REFERENCE.keys()


def _in_each_commit() -> list[Any]:
    """Returns the samples, of which the first of each forward op runs in each commit."""
    first = {p.values[0]: p.id for p in reversed(FORWARD)}.values()
    return [pytest.param(*p.values, id=p.id, marks=pytest.mark.every_case if p.id in first else ()) for p in SAMPLES]


@pytest.mark.parametrize(("name", "variant"), _in_each_commit())
def test_opcheck(name, variant):
    args = sample(name, **variant)
    # A backward op, or a scan without checkpoints, raises when differentiated, by design.
    opcheck(op(name), args if variant.get("segment") == 0 else trainable(name, args))


@of_every_sample
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, variant):
    torch.manual_seed(0)  # dalpha is a sum that may cancel: with other inputs each time, one in 40 misses the bound
    check_outputs(name, sample(name, **variant), 2e-5 if name.startswith("mhc") else 1e-5)


@of_every_sample
def test_the_public_function_is_the_op(name, variant):
    if function_of(name) is not None:
        got, want = public(name, **named(name, **variant)), outputs(op(name)(*sample(name, **variant)))
        assert len(got) > 0 and all(map(torch.equal, got, want))


# --- gradients ----------------------------------------------------------------------------------------------


@of_every_gradient
def test_only_the_wanted_gradient_and_gradients_that_do_not_arrive_count_as_zero(name, variant):
    args = trainable(name, sample(name, **variant))
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    count = differentiable(name)
    out = outputs(op(name)(*args))[:count]
    every = torch.autograd.grad(weighted(*out), leaves, retain_graph=True)
    for leaf, want in zip(leaves, every, strict=True):
        alone = [a.detach().requires_grad_(a is leaf) if isinstance(a, Tensor) else a for a in args]
        weighted(*outputs(op(name)(*alone))[:count]).backward()
        found = [a.grad for a in alone if isinstance(a, Tensor) and a.grad is not None]
        assert len(found) == 1 and error(found[0], want) < 1e-12
    ups = [torch.randn_like(t) for t in out]
    for k, (t, up) in enumerate(zip(out, ups, strict=True)):
        got = torch.autograd.grad(t, leaves, up, retain_graph=True, allow_unused=True)
        zeros = [up if j == k else torch.zeros_like(u) for j, u in enumerate(ups)]
        for a, b in zip(got, torch.autograd.grad(out, leaves, zeros, retain_graph=True), strict=True):
            assert error(torch.zeros_like(b) if a is None else a, b) < 1e-12


@of_every_gradient
def test_internal_outputs_carry_no_gradient(name, variant):
    out = outputs(op(name)(*trainable(name, sample(name, **variant))))
    count = differentiable(name)
    assert [t.requires_grad for t in out] == [k < count for k in range(len(out))]
    for k in range(count, len(out)):
        arrived = [t if j == k else None for j, t in enumerate(out)]
        with pytest.raises(RuntimeError, match=f"{name} has no gradient for its output {results(name)[k]}"):
            registry._FUNCTIONS[name].backward(None, *arrived)


@of_every_gradient
def test_double_backward_is_refused_never_zero(name, variant):
    given = named(name, **variant)
    first = next(
        k for k, t in enumerate(trainable(name, tuple(given.values()))) if isinstance(t, Tensor) and t.requires_grad
    )
    values = list(given.values())
    leaf = values[first] = values[first].requires_grad_()
    out = public(name, **dict(zip(given, values, strict=True)))
    (once,) = torch.autograd.grad(weighted(*(t.square() for t in out if t.requires_grad)), leaf, create_graph=True)
    assert once.requires_grad
    with pytest.raises(
        RuntimeError, match=f"double backward is not supported: {name}_backward.*{registry.REFERENCE[name].__module__}"
    ):
        once.square().sum().backward()

    def of_first(t: Tensor) -> Tensor:
        out = outputs(registry.call(name, *values[:first], t, *values[first + 1 :]))
        return weighted(*(t.square() for t in out[: differentiable(name)]))

    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad(lambda t: grad(of_first)(t).square().sum())(leaf.detach())


# --- torch.func, autocast, determinism, strides -------------------------------------------------------------

BATCHED: dict[str, Callable[[int, str], bool]] = {
    "all": lambda k, name: True,
    "even": lambda k, name: k % 2 == 0,
    "odd": lambda k, name: k % 2 == 1,
    "the first": lambda k, name: k == 0,
    "all but the first": lambda k, name: k > 0,
    "the first four": lambda k, name: k < 4,
    "the fourth": lambda k, name: k == 3,
    "queries": lambda k, name: name not in ("k", "mask", "segments_k"),
    "all but what is shared": lambda k, name: k not in (4, 6),
}


@of_every_sample
def test_vmap_equals_a_loop(name, variant):
    rows = []
    for seed in range(3):
        torch.manual_seed(seed)
        rows.append(sample(name, **{**variant, "seed": seed}))
    assert [which for which, batched in BATCHED.items() if check_vmap(name, rows, batched)]


def _ways(name: str, args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Returns positions of leaves: each alone, and all."""
    leaves = tuple(k for k, a in enumerate(trainable(name, args)) if isinstance(a, Tensor) and a.requires_grad)
    return [*((k,) for k in leaves), leaves]


@of_every_gradient
def test_grad_under_vmap_equals_a_loop(name, variant):
    rows = [sample(name, **{**variant, "seed": k}) for k in range(3)]
    ways = _ways(name, rows[0])

    def loss(*args: Any) -> Tensor:
        return weighted(*outputs(registry.call(name, *args))[: differentiable(name)])

    for way in ways:
        args = [torch.stack([r[k] for r in rows]) if k in way else a for k, a in enumerate(rows[0])]
        dims = tuple(0 if k in way else None for k in range(len(args)))
        got = vmap(grad(loss, argnums=ways[-1]), in_dims=dims)(*args)
        summed = grad(lambda *a: vmap(loss, in_dims=dims)(*a).sum(), argnums=ways[-1])(*args)  # noqa: B023
        for k, each, whole in zip(ways[-1], got, summed, strict=True):
            assert error(whole, each if k in way else each.sum(0)) < 1e-12
        for row in range(3):
            one = trainable(name, [a[row] if k in way else a for k, a in enumerate(args)])
            want = torch.autograd.grad(loss(*one), [one[k] for k in ways[-1]])
            assert all(error(g[row], w) < 1e-12 for g, w in zip(got, want, strict=True))


LARGE: Mapping[str, Mapping[str, Any]] = {
    **{name: {"lead": (64,), "width": 32, "iters": 3} for name in ("mhc_pre", "mhc_post_pre", "mhc_single_pass")},
    **{name: {"lead": (64,), "width": 32} for name in ("mhc_coefficients", "mhc_head", "mhc_post_head")},
    **{name: {"lead": (64,), "width": 32} for name in ("mhc_post", "mhc_collapse", "mhc_sinkhorn")},
    "e79_scan": {"T": 9, "n": 8, "bias": "input"},
    "selection_attention": {"kind": "odd", "S": 40, "S_kv": 40, "h": 16, "sink": True},
    "selection_list_attention": {"kind": "odd", "S": 40, "h": 8, "n": 20, "sink": True},
    "selection_entry_attention": {"kind": "odd", "S": 40, "h": 8, "n": 20, "sink": True, "repeats": True},
    "selection_mask_attention": {"kind": "fills", "S": 40, "h": 8, "sink": True},
    **{name: {"B": 1, "S": 30, "T": 60, "topk": 9} for name in ("index_scores", "index_topk", "index_topk_scores")},
    "index_loss": {"S": 64, "T": 30, "n": 20},
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equal_inputs_give_equal_bits_and_are_not_written(name, dtype):
    given = named(name, dtype=dtype, **LARGE[name])
    kept = {k: t.clone() for k, t in given.items() if isinstance(t, Tensor)}
    run = functools.partial(trained if f"{name}_backward" in registry.REFERENCE else public, name)
    with deterministic_algorithms():
        one, two = (list(run(given) if run.func is trained else run(**given)) for _ in range(2))
    assert same(one, two) and all(torch.equal(given[k], t) for k, t in kept.items())


@of_every_forward
def test_arguments_may_be_strided_and_overlapping_and_autocast_inserts_no_casts(name, variant):
    given = named(name, **variant)
    want = trained(name, given)
    with torch.autocast("cpu", BF16):
        cast = trained(name, given)
    assert same(cast, want)
    assert same(trained(name, {k: strided(a) for k, a in given.items()}), want, 1e-5)
    for k, a in given.items():
        if isinstance(a, Tensor) and a.dim() > 1 and a.shape[0]:
            one = a[:1].expand_as(a)
            got, want = (outputs(op(name)(*(given | {k: t}).values())) for t in (one, one.contiguous()))
            assert same([*got], [*want], 1e-5)


_ONE = {"lead": (2,), "n": 2}
_KEYS = {"B": 1, "S": 2, "h": 2, "Dk": 3, "S_kv": 4, "sink": True}
GRADCHECKED: list[tuple[str, Mapping[str, Any]]] = [
    *[("mhc_pre", {**_ONE, **v}) for v in ({"iters": 2}, {"full": False})],
    *[(f"mhc_{name}", {**_ONE, "iters": 2}) for name in ("coefficients", "post_pre", "single_pass")],
    *[(f"mhc_{name}", _ONE) for name in ("head", "post_head", "collapse")],
    *[("mhc_post", {**_ONE, "transpose": transpose}) for transpose in (False, True)],
    *[("mhc_sinkhorn", {"lead": (2,), "n": 3, "form": form}) for form in ("softmax", "exp", "exp_eps")],
    *[("e79_scan", {"T": 3, "B": 1, "bias": bias}) for bias in ("none", "fixed", "input")],
    *[
        ("selection_attention", {"Dk": 3, "Dv": 2, "r": 2, "segments": segments, "sink": sink, **packed})
        for sink in (False, True)
        for segments in (None, "mixed")
        for packed in ({}, {"B": 1, "S": 6, "S_kv": 6, "lengths": (2, 0, 3)})
    ],
    *[
        (f"selection_{name}_attention", {**_KEYS, "shared": shared, **v})
        for shared in (False, True)
        for name, v in (
            ("list", {"kind": "odd", "n": 3, "segments": True}),
            *(("entry", {"kind": "odd", "n": 3, "bias": "normal", "repeats": repeats}) for repeats in (False, True)),
            *(
                ("entry", {"kind": "odd", "n": 4, "S": 4, "bias": "rows", "repeats": repeats})
                for repeats in (False, True)
            ),
            *(("mask", {"kind": kind}) for kind in ("empty", "biased")),
        )
    ],
    *[("index_scores", {"B": 1, "S": 3, "T": 5, "H": 2, "D": 4, "kind": kind}) for kind in index.KINDS],
    ("index_loss", {"S": 3}),
]


@pytest.mark.parametrize(("name", "variant"), GRADCHECKED, ids=str)
def test_gradcheck(name, variant):
    given = named(name, dtype=F64, **variant)
    args = trainable(name, tuple(given.values()))

    def finite(*args: Any) -> tuple[Tensor, ...]:
        out = public(name, **dict(zip(given, args, strict=True)))[: differentiable(name)]
        out = out[:1] if variant.get("bias") == "rows" else out  # the lowest bias leaves lse no digit
        return tuple(torch.where(t.isfinite(), t, 0.0) for t in out)

    assert torch.autograd.gradcheck(finite, args, fast_mode=name.startswith("mhc"))


# --- compilation --------------------------------------------------------------------------------------------


_SELECTION = [dict(zip(("B", "S", "S_kv", "r"), s, strict=True)) for s in ((5, 7, 9, 6), (3, 2, 30, 2), (2, 40, 40, 7))]
_LISTED = [dict(zip(("S", "S_kv", "n"), s, strict=True)) for s in ((6, 20, 9), (9, 31, 12), (17, 40, 33))]
_SCANS = ((40, 3), (33, 2), (300, 4), (5, 3), (32, 2), (31, 4), (2, 7), (40, 2))
_LENGTHS = ((6, 20), (9, 33), (12, 50))
GROWING: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {
    **dict.fromkeys(
        ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_single_pass"),
        ({"iters": 2}, [{"lead": (2, tokens)} for tokens in (2, 3, 64, 100)]),
    ),
    "e79_scan": ({"n": 4, "bias": "input", "state": False}, [{"T": steps, "B": batch} for steps, batch in _SCANS]),
    "selection_attention": ({"kind": "odd", "G": 3, "h": 4, "sink": True}, _SELECTION),
    "selection_attention, segments": ({"kind": "odd", "G": 3, "h": 4, "sink": True, "segments": "mixed"}, _SELECTION),
    "selection_list_attention": ({"kind": "odd", "h": 3, "Dk": 8}, _LISTED),
    "selection_entry_attention": ({"kind": "odd", "h": 3, "Dk": 8}, _LISTED),
    "selection_mask_attention": ({"kind": "biased", "shared_mask": "B"}, [{"S": s, "S_kv": t} for s, t in _LENGTHS]),
    "index_scores": ({"kind": "limits"}, [{"S": s, "T": t} for s, t in _LENGTHS]),
    "index_topk": ({"kind": "limits"}, [{"S": s, "T": t, "topk": t // 3} for s, t in _LENGTHS]),
    "index_loss": ({}, [{"S": 5, "T": 9}, {"S": 7, "T": 12}]),
}
"""Variants of sizes that one graph serves."""


def growing(case: str) -> Iterator[dict[str, Any]]:
    variant, sizes = GROWING[case]
    for size in sizes:
        yield named(case.partition(",")[0], **variant, **size)


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("case", GROWING)
def test_one_trace_serves_every_size(case, grads, fresh):
    name = case.partition(",")[0]
    counter = CompileCounter()
    compiled = torch.compile(called(name), backend=counter, fullgraph=True, dynamic=True)
    for given in growing(case):
        if grads:
            given = dict(zip(given, trainable(name, tuple(given.values())), strict=True))
        assert all(map(torch.equal, public(name, compiled, **given), public(name, **given)))
    # A batch and a number of tokens of 2 may share one symbol at first: at most one more trace.
    assert counter.frame_count <= 1 + name.startswith("mhc")


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *[(case, "inductor") for case in GROWING if case.startswith(("e79", "selection", "index_s", "index_t"))],
        *[(case, "mhc_inductor") for case in GROWING if case.startswith("index")],
    ],
)
def test_dynamic_sizes_with_gradients_compile_once(case, backend, fresh):
    name = case.partition(",")[0]
    compiled = torch.compile(called(name), backend=backend, fullgraph=True, dynamic=True)
    for k, given in enumerate(growing(case)):
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            if f"{name}_backward" not in registry.REFERENCE:
                assert all(map(torch.equal, public(name, compiled, **given), public(name, **given)))
            else:
                assert same(
                    trained(name, given, functools.partial(public, compiled=compiled)), trained(name, given), 1e-5
                )


COMPILED = {
    "inductor": (
        *[("e79_scan", case) for case in ("fixed", "none", "input", "bf16")],
        *[("selection_attention", case) for case in ("packed_keys", "segments")],
        *[("selection_mask_attention", case) for case in ("sink", "fp64", "no_keys_shown", "view")],
        ("selection_list_attention", "shared"),
    ),
    "mhc_inductor": (
        ("mhc_post_pre", "full"),
        *[("e79_scan", case) for case in ("fixed", "none", "input")],
        *[("selection_attention", case) for case in ("plain", "bf16_int64")],
        *[("selection_list_attention", case) for case in ("plain", "packed_keys", "bf16_int64")],
        *[("selection_entry_attention", case) for case in ("plain", "repeats")],
        *[("selection_mask_attention", case) for case in ("plain", "shared", "bf16", "fills")],
        ("index_loss", "plain"),
    ),
}


@pytest.mark.parametrize(
    ("backend", "name", "case"), [(backend, *case) for backend, cases in COMPILED.items() for case in cases]
)
def test_compiled_equals_eager(backend, name, case, fresh):
    given = named(name, **VARIANTS[name][case])
    compiled = functools.partial(public, compiled=torch.compile(called(name), backend=backend, fullgraph=True))
    assert same(trained(name, given, compiled), trained(name, given), 1e-5)
    with torch.no_grad():
        assert same([*compiled(name, **given)], [*public(name, **given)], 1e-5)
