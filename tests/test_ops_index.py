# SPDX-License-Identifier: Apache-2.0
"""The index ops and public functions: opcheck, gradients, validation, vmap, autocast, compilation on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.func import grad, vmap
from torch.library import opcheck

import mhc_inductor
from mhc_inductor import index_scores, index_topk
from mhc_inductor.reference import index as reference
from tests.oracles import index as h
from tests.oracles.op_contract import check_outputs, op, trainable
from tests.tools.deterministic import deterministic_algorithms

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = torch.ops.mhc_inductor
NONE = (None,) * 4
pytestmark = pytest.mark.usefixtures("one_thread")


def error(a, b):
    """Returns the relative difference of scores or gradients, 1 where the same entries are not hidden."""
    a, b = a.double(), b.double()
    if not torch.equal(a == -torch.inf, b == -torch.inf):
        return 1.0
    a, b = (t.masked_fill(t == -torch.inf, 0.0) for t in (a, b))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


# --- samples of the ops -------------------------------------------------------------------------------------


def scores_sample(kind="causal", **kwargs):
    args = h.make_inputs(**kwargs)
    return (*args, 0.5, *h.visibility(kind, *args[:2]))


def backward_sample(kind="causal", **kwargs):
    args = scores_sample(kind, **kwargs)
    scores = OPS.index_scores(*args)
    return (torch.randn(scores.shape, dtype=scores.dtype), *args)


def topk_sample(kind="causal", topk=4, **kwargs):
    args = scores_sample(kind, **kwargs)
    return (*args[:3], topk, *args[3:])


VARIANTS = {
    **{kind: {"kind": kind} for kind in h.KINDS},
    "fp64": {"dtype": F64},
    "bf16": {"dtype": BF16, "kind": "everything"},
    "fp16-weights": {"dtype": F16, "w_dtype": F16},
    "one_query": {"S": 1},
}
MAKERS = {
    "index_scores": scores_sample,
    "index_scores_backward": backward_sample,
    **dict.fromkeys(("index_topk", "index_topk_scores"), topk_sample),
}
SAMPLES = [
    pytest.param(name, sample, v, id=f"{name}-{k}") for name, sample in MAKERS.items() for k, v in VARIANTS.items()
]


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_opcheck(name, sample, variant):
    args = sample(**variant)
    # The backward op raises when differentiated, by design; the choice is of integers.
    opcheck(op(name), trainable(args) if name == "index_scores" else args)


@pytest.mark.parametrize(("name", "sample", "variant"), SAMPLES)
def test_outputs_are_fresh_contiguous_and_as_the_fake_says(name, sample, variant):
    args = sample(**variant)
    if "topk" not in name:
        return check_outputs(name, args, error)
    got = op(name)(*args)
    fake = op(name)(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args])
    for a, b in zip(got, fake, strict=True) if isinstance(got, tuple) else [(got, fake)]:
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    return None


@pytest.mark.parametrize("kind", h.KINDS)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_the_scores_of_chosen_keys_are_those_of_index_scores(kind, dtype):
    args = topk_sample(kind, dtype=dtype)
    q, k, w = (t.abs_() for t in args[:3])  # no product of 0, whose NaN would be chosen first
    w[0], q[1, 1, 1, 0], k[1, 0, 0] = -torch.inf, torch.nan, torch.inf
    chosen, scores = OPS.index_topk_scores(*args)
    assert torch.equal(chosen, OPS.index_topk(*args))
    want = OPS.index_scores(*args[:3], *args[4:]).gather(-1, chosen.long().clamp(min=0))
    torch.testing.assert_close(scores, want.masked_fill(chosen < 0, -torch.inf), equal_nan=True)
    assert (scores == -torch.inf)[chosen >= 0].any(), "a score of -inf hides no key"


# --- the public functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", h.KINDS)
def test_functions_against_fp64(kind):
    args = h.make_inputs(2, 6, 40, 3, 8)
    visible = h.visibility(kind, *args[:2])
    named = dict(zip(("limit", "mask", "segments_q", "segments_k"), visible, strict=True))
    assert error(index_scores(*args, scale=0.3, **named), h.oracle(*args, 0.3, visible)) < 1e-6
    h.check_topk(index_topk(*args, 7, scale=0.3, **named), args, 7, 0.3, visible)


@pytest.mark.parametrize("shape", [(), (40,), (1,), (6, 40), (6, 1), (1, 6, 40), (2, 1, 40), (2, 6, 1), (2, 6, 40)])
def test_masks_broadcast(shape):
    args = h.make_inputs(2, 6, 40, 3, 8)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    wide = mask.expand(2, 6, 40)
    assert torch.equal(index_scores(*args, mask=mask), index_scores(*args, mask=wide.contiguous()))
    assert torch.equal(index_topk(*args, 9, mask=mask), index_topk(*args, 9, mask=wide))
    h.check_topk(index_topk(*args, 9, mask=mask), args, 9, 1.0, (None, wide, None, None))


def test_the_wildcard_is_seen_by_every_query():
    q, k, w = h.make_inputs(1, 3, 4, 2, 8)
    ids = torch.tensor([[0, 1, -(2**31), 7]])
    scores = index_scores(q, k, w, segments_q=torch.tensor([[0, 1, 5]]), segments_k=ids)
    assert (scores > -torch.inf).tolist() == [
        [[True, False, True, False], [False, True, True, False], [False, False, True, False]]
    ]


def test_the_scale_is_inside_the_relu_and_1_unless_given():
    args = h.make_inputs()
    assert torch.equal(index_scores(*args), index_scores(*args, scale=1))
    assert error(index_scores(*args, scale=2.0), 2 * index_scores(*args)) < 1e-6
    assert (index_scores(*args, scale=0.0) == 0).all()


@pytest.mark.parametrize(("B", "S", "T"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)])
def test_sizes_of_none_and_one(B, S, T):
    args = h.make_inputs(B, S, T, 1, 1)
    args = tuple(t.requires_grad_() for t in args)
    scores = index_scores(*args)
    assert scores.shape == (B, S, T)
    assert [g.shape for g in torch.autograd.grad(scores.sum(), args)] == [t.shape for t in args]
    assert index_topk(*args, min(T, 1)).shape == (B, S, min(T, 1))
    assert index_topk(*args, 0).shape == (B, S, 0)


@pytest.mark.parametrize(("H", "D", "topk"), [(130, 8, 3), (3, 300, 3), (1, 1, 40)])
def test_sizes_beyond_the_kernels(H, D, topk):
    args = h.make_inputs(1, 4, 40, H, D)
    h.check_topk(index_topk(*args, topk), args, topk, 1.0, NONE)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("needed", [(0, 1, 2), (0,), (1,), (2,)])
def test_gradients_against_fp64(dtype, needed):
    args = h.make_inputs(2, 6, 20, 3, 8, dtype)
    visible = h.visibility("everything", *args[:2])
    g = torch.randn(2, 6, 20, dtype=F64, generator=torch.Generator().manual_seed(4))
    see = h.seen(*args[:2], visible)

    def run(args, scores):
        leaves = [a.detach().requires_grad_(i in needed) for i, a in enumerate(args)]
        out = scores(*leaves).masked_fill(~see, 0.0)
        return torch.autograd.grad(out, [leaves[i] for i in needed], g.to(out.dtype))

    got = run(args, lambda q, k, w: OPS.index_scores(q, k, w, 0.3, *visible))
    want = run([a.double() for a in args], lambda q, k, w: h.oracle(q, k, w, 0.3, visible))
    for i, a, b in zip(needed, got, want, strict=True):
        assert a.dtype is args[i].dtype
        assert error(a, b) < 2 * torch.finfo(a.dtype).eps + (1e-13 if dtype is F64 else 1e-6)


def test_only_what_is_needed_is_computed_and_indices_have_no_gradient():
    q, k, w = (t.requires_grad_() for t in h.make_inputs())
    assert not index_topk(q, k, w, 3).requires_grad
    scores = index_scores(q, k, w)
    (dq,) = torch.autograd.grad(scores.sum(), q)
    assert dq.shape == q.shape


def test_double_backward_raises():
    q, k, w = (t.requires_grad_() for t in h.make_inputs())
    (dq,) = torch.autograd.grad(index_scores(q, k, w).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported: index_scores_backward"):
        dq.sum().backward()


# --- torch.func, autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "row_mask", "everything"])
@pytest.mark.parametrize("batched", ["all", "queries"])
def test_vmap(kind, batched):
    args = h.make_inputs(4, 5, 9)
    visible = h.visibility(kind, *args[:2])
    inputs = [None if t is None else t.unflatten(0, (2, 2)) for t in (*args, *visible)]
    dims = [None if t is None else 0 for t in inputs]
    if batched == "queries":
        for i in (1, 4, 6):
            if inputs[i] is not None:
                inputs[i], dims[i] = inputs[i][0], None

    def scores(q, k, w, *visible):
        return OPS.index_scores(q, k, w, 0.5, *visible)

    def choice(q, k, w, *visible):
        return OPS.index_topk(q, k, w, 3, 0.5, *visible)

    for fn in (scores, choice):
        rows = [fn(*[t if d is None else t[i] for t, d in zip(inputs, dims, strict=True)]) for i in range(2)]
        assert torch.allclose(vmap(fn, in_dims=tuple(dims))(*inputs).double(), torch.stack(rows).double())
    moved = [t if d is None else t.movedim(0, 1) for t, d in zip(inputs, dims, strict=True)]
    rows = [scores(*[t if d is None else t[i] for t, d in zip(inputs, dims, strict=True)]) for i in range(2)]
    got = vmap(scores, in_dims=tuple(None if d is None else 1 for d in dims))(*moved)
    assert torch.allclose(got, torch.stack(rows))


def test_vmap_of_grad():
    q, k, w = h.make_inputs(4, 5, 9)
    each = vmap(grad(lambda q, k, w: index_scores(q, k, w).square().sum(), argnums=(0, 1, 2)))
    got = each(*(t.unflatten(0, (2, 2)) for t in (q, k, w)))
    leaves = [t.clone().requires_grad_() for t in (q, k, w)]
    want = torch.autograd.grad(index_scores(*leaves).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.flatten(0, 1), b, rtol=1e-5, atol=1e-5)


def test_autocast_changes_nothing():
    args = h.make_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(index_scores(*args), index_scores(*args)) and index_scores(*args).dtype is F32
        chosen, scores = index_topk(*args, 3), index_scores(*args)
    assert torch.equal(chosen, index_topk(*args, 3)) and torch.equal(scores, index_scores(*args))


def test_two_runs_are_equal_in_deterministic_mode():
    args = h.make_inputs(1, 30, 60)
    with deterministic_algorithms():
        assert torch.equal(index_scores(*args), index_scores(*args))
        assert torch.equal(index_topk(*args, 9), index_topk(*args, 9))


# --- validation ---------------------------------------------------------------------------------------------


def _changed(**changes):
    q, k, w = h.make_inputs()
    return {"q": q, "k": k, "w": w, "topk": 3, **changes}


WRONG = {
    "q": (ValueError, "q must have shape .B, S, H, D", {"q": torch.zeros(2, 5, 8)}),
    "k": (ValueError, r"k must have shape \[B, T, D\]", {"k": torch.zeros(2, 9, 7)}),
    "k_batch": (ValueError, r"k must have shape \[B, T, D\]", {"k": torch.zeros(3, 9, 8)}),
    "w": (ValueError, r"w must have shape \[B, S, H\]", {"w": torch.zeros(2, 5, 4)}),
    "heads": (ValueError, "H of at least 1", {"q": torch.zeros(2, 5, 0, 8), "w": torch.zeros(2, 5, 0)}),
    "width": (ValueError, "D of at least 1", {"q": torch.zeros(2, 5, 3, 0), "k": torch.zeros(2, 9, 0)}),
    "k_dtype": (TypeError, "k must have q's dtype", {"k": torch.zeros(2, 9, 8, dtype=BF16)}),
    "w_fp64": (TypeError, "w may be float64 only where q is", {"w": torch.zeros(2, 5, 3, dtype=F64)}),
    "topk_above": (ValueError, "topk must be at most T = 9, the number of keys, got 10", {"topk": 10}),
    "topk_below": (ValueError, "topk must be at least 0, got -1", {"topk": -1}),
    "scale": (
        ValueError,
        "scale must be finite and at least 0 .put a negative scale into w., got -1.0",
        {"scale": -1.0},
    ),
    "scale_inf": (ValueError, "scale must be finite", {"scale": float("inf")}),
    "limit": (ValueError, r"limit must have shape \[B, S\]", {"limit": torch.zeros(2, 4, dtype=torch.int32)}),
    "limit_dtype": (TypeError, "limit must be int32 or int64", {"limit": torch.zeros(2, 5)}),
    "mask": (
        ValueError,
        r"mask must broadcast to \[B, S, T\] = \[2, 5, 9\], got \[2, 5, 8\]",
        {"mask": torch.ones(2, 5, 8).bool()},
    ),
    "mask_dims": (ValueError, r"mask must broadcast to .* got \[1, 2, 5, 9\]", {"mask": torch.ones(1, 2, 5, 9).bool()}),
    "mask_dtype": (TypeError, "mask must be bool, got torch.float32", {"mask": torch.ones(2, 5, 9)}),
    "segments": (
        ValueError,
        "segments_k must be given where segments_q is",
        {"segments_q": torch.zeros(2, 5, dtype=torch.int32)},
    ),
    "segments_q": (
        ValueError,
        "segments_q must be given where segments_k is",
        {"segments_k": torch.zeros(2, 9, dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_named(case):
    kind, message, changes = WRONG[case]
    with pytest.raises(kind, match="^index_topk: (q.* must have )?" + message):
        index_topk(**_changed(**changes))
    if "topk" not in changes:
        given = _changed(**changes)
        del given["topk"]
        with pytest.raises(kind, match="^index_scores: (q.* must have )?" + message):
            index_scores(**given)


def test_bad_input_is_named_while_tracing():
    given = _changed(topk=10)
    with pytest.raises(Exception, match="index_topk: topk must be at most T = 9"):
        torch.compile(lambda: index_topk(**given), backend="eager", fullgraph=True)()
    torch._dynamo.reset()


# --- memory -------------------------------------------------------------------------------------------------


def test_products_are_held_in_chunks(monkeypatch):
    largest = []
    products = reference.products

    def watched(q, k):
        x = products(q, k)
        largest.append(x.numel())
        return x

    monkeypatch.setattr(reference, "products", watched)
    monkeypatch.setattr(reference, "CHUNK", 2000)
    args = h.make_inputs(2, 50, 40, 3, 8)
    index_scores(*args)
    index_topk(*args, 5)
    leaves = [a.requires_grad_() for a in args]
    index_scores(*leaves).sum().backward()
    assert max(largest) <= 2000 and sum(largest) >= 3 * 2 * 50 * 40 * 3


# --- compiled on a CPU --------------------------------------------------------------------------------------


def _step(q, k, w, limit, topk):
    chosen = index_topk(q, k, w, topk, scale=0.5, limit=limit)
    scores = index_scores(q, k, w, scale=0.5, limit=limit)
    picked = scores.gather(-1, chosen.clamp(min=0).long())
    return chosen, torch.where(chosen >= 0, picked, 0.0).sum(-1)


@pytest.mark.parametrize("backend", ["inductor", "mhc_inductor"])
def test_compiled_on_a_cpu(backend):
    """Checks one graph for several sizes, with gradients."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(_step, backend=counter, fullgraph=True, dynamic=True)
    for S, T in ((6, 20), (9, 33), (12, 50)):
        args = [t.requires_grad_() for t in h.make_inputs(2, S, T, 3, 8)]
        limit = h.visibility("limits", *args[:2])[0]
        results = []
        for fn in (_step, compiled):
            chosen, value = fn(*args, limit, T // 3)
            results.append((chosen, value, *torch.autograd.grad(value.sum(), args)))
        assert torch.equal(results[0][0], results[1][0])
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_the_public_functions_are_exported():
    assert mhc_inductor.index_topk is index_topk and mhc_inductor.index_scores is index_scores
