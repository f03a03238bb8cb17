# SPDX-License-Identifier: Apache-2.0
"""Every rewrite of a formula runs on a few tokens in fp64 before it is made, and a wrong op is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import mhc_inductor
from benchmarks import deepseek_model
from mhc_inductor.report import Report
from mhc_inductor.routing import cutter, few_tokens
from mhc_inductor.routing.edit import Edit
from mhc_inductor.routing.few_tokens import FewTokens
from mhc_inductor.routing.interface import Verdict
from mhc_inductor.routing.verify import Trial
from tests import test_routing_lists, test_routing_segments
from tests.formulas import reference_models_mhc as reference
from tests.formulas.reference_models_selection import window_and_blocks
from tests.formulas.spellings_e79 import plain
from tests.test_routing_e79 import _by_scan, _given
from tests.test_routing_verify_process import CONTEXTS, watched
from tests.tools.capture import difference, eager, interpreted, run, through_inductor

N, WIDTH, ITERS, EPS = 4, 16, 3, 1e-6
EVERY = {"mhc_pre", "mhc_post"}
MODEL = reference.parameters()
Fn = Callable[..., Any]


def site(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, f: Tensor, device: Any = None) -> Tensor:
    """A pre with iterations, and a post: x is [B, S, n, D]."""
    b, s = x.shape[:2]
    flat = x.reshape(b * s, N * WIDTH)
    h = torch.nn.functional.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS), phi)
    pre, post, res = h.split([N, N, N * N], -1)  # Dynamo of 2.13 breaks the graph at unflatten under a function mode
    pre = torch.sigmoid(pre * alpha[0] + bias[:N]) + EPS
    post = 2 * torch.sigmoid(post * alpha[1] + bias[N : 2 * N])
    res = (res * alpha[2] + bias[2 * N :]).view(b, s, N, N)
    res = reference._balanced(res.to(device or x.device), ITERS)
    h_in = (pre.view(b, s, N, 1) * x).sum(2)
    return post.view(b, s, N, 1) * (h_in * f).unsqueeze(2) + torch.matmul(res.transpose(-1, -2), x)


def given(*lead: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(*lead, N, WIDTH), (2 * N + N * N, N * WIDTH), (3,), (2 * N + N * N,), (*lead, WIDTH)]
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def compared(fn: Fn, inputs: Sequence[Tensor], symbolic: Sequence[Any] = (), check: Any = None) -> tuple[Any, Report]:
    """Routes ``fn`` under a check of its own, or under ``check``."""
    few, how = check or FewTokens(), {"dynamic": None if symbolic else False, "symbolic": symbolic}
    report = run(fn, inputs, (), inputs[0].is_floating_point(), dynamo=True, check=few, **how).report
    assert not report.problems
    return few, report


def wrong(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[..., Any]) -> None:
    """Emits calls of ``op`` with the arguments that ``change`` returns."""
    right = Edit.emit

    def emit(self: Edit, target: Any, *args: Any, **options: Any) -> fx.Node:
        made = change(*args) if str(target) == f"mhc_inductor.{op}.default" else args
        return right(self, target, *made, **options)

    monkeypatch.setattr(Edit, "emit", emit)


def number(at: int, value: Any) -> Callable[..., Any]:
    return lambda *args: (*args[:at], value, *args[at + 1 :])


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "norm_eps": ("mhc_pre", number(5, 2e-6)),
    "norm_eps outside": ("mhc_pre", lambda *args: (*args[:12], "outside")),
    "hc_eps": ("mhc_pre", number(6, 2e-6)),
    "factor": ("mhc_pre", number(7, 2.001)),
    "added": ("mhc_pre", number(8, 1e-6)),
    "one iteration fewer": ("mhc_pre", number(9, ITERS - 1)),
    "sinkhorn_eps": ("mhc_pre", number(10, 1e-3)),
    "orientation": ("mhc_post", lambda *args: (*args[:4], not args[4])),
}
LEADS = {"unlike": (3, 50), "as the streams": (4, 4), "as the width": (2, 16)}
LEADS |= {"one sequence": (1, 24), "one token": (1, 1)}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("symbolic", [(), ((0, 1), (4, 1))], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_formula_is_compared_and_routed(lead: str, symbolic: Sequence[Any], dtype: torch.dtype) -> None:
    inputs = given(*LEADS[lead], dtype=dtype)
    few, report = compared(site, inputs, symbolic if LEADS[lead][1] > 1 else ())
    assert {r.op for r in report.routed} == EVERY and few.runs == 2 and not few.left
    if dtype is torch.float32:
        assert difference(run(site, inputs), eager(site, inputs)) < 1e-5


@pytest.mark.parametrize("lead", [(2, 4), (4, 4), (3, 32)], ids=str)
def test_sizes_are_told_apart_where_tokens_are_one_dimension(lead: tuple[int, int]) -> None:
    """Sizes of tokens that are those of streams or of the width too, and a formula that joins batch and sequence."""
    few, report = compared(lambda x: reference.liger(x, MODEL), [torch.randn(*lead, reference.N, reference.WIDTH)])
    assert {r.op for r in report.routed} == EVERY and few.runs == 2 and not few.left


@pytest.mark.parametrize("lead", ["unlike", "as the streams"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_op_is_refused(name: str, lead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in bf16, whose rounding is larger than what most of these change."""
    op, change = WRONG[name]
    wrong(monkeypatch, op, change)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = given(*LEADS[lead], dtype=dtype)
        report = compared(site, inputs, check=lambda *_: Verdict())[1]
        assert {r.op for r in report.routed} == EVERY  # what finds formulas does not see what is emitted
        report = compared(site, inputs)[1]
        assert op not in {r.op for r in report.routed}
        assert [m.op for m in report.near_misses if "verified on random data" in m.reason] == [op]


def test_a_wrong_op_is_refused_where_sizes_are_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, *WRONG["orientation"])
    assert {r.op for r in compared(site, given(3, 50), ((0, 1), (4, 1)))[1].routed} == {"mhc_pre"}


def test_a_compile_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compile gives where an op is refused is the formula, gradients included."""
    wrong(monkeypatch, *WRONG["factor"])
    inputs = given(2, 3)
    assert difference(through_inductor(site, inputs), eager(site, inputs)) < 1e-5
    report = mhc_inductor.explain(site, *inputs)
    assert not report.routed and [m for m in report.near_misses if "verified on random data" in m.reason]


# --- attention and indexers: a few queries, all keys ---------------------------------------------------------------

Q, T, DIM, PICKS = 24, 24, 8, 6
"""Queries, keys, width and keys of a list. As many queries as keys: sizes do not tell them apart."""


def scored(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Returns attention of the keys that are seen."""
    return (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def in_list(indices: Tensor, keys: int = T) -> Tensor:
    return torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device).scatter(-1, indices, True)


def windowed(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """A causal window of 5 keys."""
    at = torch.arange(T, device=q.device)
    return scored(q, k, v, (at <= at[:, None]) & (torch.arange(T) > torch.arange(Q)[:, None] - 5))


def ranged(q: Tensor, k: Tensor, v: Tensor, _: Tensor, __: Tensor, ranges: Tensor) -> Tensor:
    """The keys from a place that each query names up to another."""
    at = torch.arange(T)
    return scored(q, k, v, ((at >= ranges[..., :1]) & (at < ranges[..., 1:]))[:, None])


def listed(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *_: Tensor) -> Tensor:
    """The keys that a list names."""
    return scored(q, k, v, in_list(indices, k.shape[2])[:, None])


def padded(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, kept: Tensor, _: Tensor) -> Tensor:
    """A list of keys under a mask of padding."""
    return scored(q, k, v, in_list(indices, k.shape[2])[:, None] & kept[:, None, None])


def indexer(q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
    """The keys with the largest scores, of those up to the query."""
    scores = (torch.einsum("bhsd,btd->bsht", q, k[:, 0]).relu() * q.mean(-1).transpose(1, 2).unsqueeze(-1)).sum(2)
    return (
        scores.masked_fill(torch.ones(Q, T, dtype=torch.bool).triu(1), -torch.inf).topk(4, -1).indices.sort(-1).values
    )


def anchored(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *_: Tensor) -> Tensor:
    """A list of keys, and for every query those up to the third, counted from the first query."""
    near = torch.arange(T) < torch.arange(Q)[:1, None] + 3
    return scored(q, k, v, (in_list(indices) | near)[:, None])


def checkpointed(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, kept: Tensor, _: Tensor) -> Tensor:
    """A causal window of 5 keys under a mask of padding, in a region that is given the mask."""
    ago = torch.arange(Q)[:, None] - torch.arange(T)
    mask = ((ago >= 0) & (ago < 5))[None, None] & kept[:, None, None]
    return checkpoint(scored, q, k, v, mask, use_reentrant=False)


LIST = "selection_list_attention"
ATTENTIONS: dict[str, tuple[Fn, str]] = {
    "window": (windowed, LIST),
    "ranges": (ranged, "selection_attention"),
    "list": (listed, LIST),
    "padded list": (padded, LIST),
    "list and the first keys": (anchored, LIST),
    "window in a checkpoint": (checkpointed, LIST),
    "indexer": (indexer, "index_topk"),
}


def attended(heads: int = 3, batch: int = 2) -> list[Tensor]:
    """q, k, v [B, H, S, D], indices [B, S, n], what is no padding [B, T], and ranges [B, S, 2]."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, s, DIM, generator=g) for h, s in ((heads, Q), (1, T), (1, T)))
    indices = torch.rand(batch, Q, T, generator=g).argsort(-1)[..., :PICKS]
    indices[..., 0] = torch.arange(Q) % 16
    kept = torch.arange(T).expand(batch, T) < torch.tensor([T, 20])[:batch, None]
    first = torch.randint(0, 12, (batch, Q, 1), generator=g)
    return [q, k, v, indices, kept, torch.cat([first, first + 3 + first % 9], -1)]


def watched_shapes(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, ...]]]:
    """Returns what gets the shapes of the tensors that each run reads."""
    shapes, results = list[set[tuple[int, ...]]](), Trial._results

    def seen(self: Any, piece: Any, feed: Any, *args: Any, **options: Any) -> Any:
        shapes.append({tuple(t.shape) for t in feed.values() if isinstance(t, Tensor)})
        return results(self, piece, feed, *args, **options)

    monkeypatch.setattr(Trial, "_results", seen)
    return shapes


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_few_queries_are_compared_with_all_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, op = ATTENTIONS[name]
    shapes = watched_shapes(monkeypatch)
    few, report = compared(fn, attended())
    assert [r.op for r in report.routed] and few.runs == 1 and not few.left, (report.near_misses, few.left)
    assert few_queries(shapes)
    if op != "index_topk":  # which hidden keys the first queries pick, nobody sees
        assert difference(run(fn, attended()), eager(fn, attended())) < 1e-5


def test_a_few_heads_are_compared_where_all_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of 2 queries of all heads have more elements than a tensor may have here, and the inputs fewer."""
    monkeypatch.setattr(cutter, "_ELEMENTS", 1100)
    shapes = watched_shapes(monkeypatch)
    few, report = compared(listed, attended(heads=16))
    assert report.routed and few.runs == 1 and not few.left, (report.near_misses, few.left)
    assert {shape[1] for each in shapes for shape in each if len(shape) == 4} <= {1, 2, 3, 5, 7}


def few_queries(shapes: list[set[tuple[int, ...]]], heads: int = 3, keys: int = T) -> set[int]:
    """Returns the numbers of queries in the runs, which read all keys. Keys may have as many heads as queries."""
    assert any((2, h, keys, DIM) in shapes[0] for h in (1, heads))
    found = {shape[2] for each in shapes for shape in each if len(shape) == 4 and shape[1] == heads} - {keys}
    assert found == {2, 3}
    return found


BENT: dict[str, tuple[str, Callable[..., Any]]] = {
    "scale": ("ranges", number(7, 0.36)),
    "keys as values": ("ranges", lambda q, k, v, *rest: (q, v, k, *rest)),
    "no values": ("list", number(2, None)),
    "scale of a list": ("list", number(9, 0.36)),
    "scale of a window": ("window", number(9, 0.36)),
    "scale under a mask": ("padded list", number(9, 0.36)),
    "scale in a checkpoint": ("window in a checkpoint", number(9, 0.36)),
    "no scores": ("indexer", number(4, 0.0)),
    "future keys": ("indexer", lambda *args: (*args[:5], *[None] * (len(args) - 5))),
}


@pytest.mark.parametrize("open_sizes", [(0,), (0, 2)], ids=["batch", "batch and length"])
def test_a_right_attention_of_open_sizes_is_not_refused(open_sizes: tuple[int, ...]) -> None:
    """The op reads its sizes from tensors that are cut: positions that it makes of them count from the same place."""
    blocks = (torch.arange(16) // 4).view(1, 16, 1).repeat(2, 1, 2) * torch.tensor([1, 0])
    g = torch.Generator().manual_seed(0)
    inputs = [*(torch.randn(2, 3, 16, width, generator=g) for width in (8, 8, 6)), blocks]
    symbolic = [(i, 1 if i == 3 and d else d) for i in range(4) for d in open_sizes]
    few, report = compared(window_and_blocks, inputs, symbolic)
    assert report.routed and few.runs == 1 and not few.left, (report.near_misses, few.left)


@pytest.mark.parametrize("name", test_routing_lists.LOOKUPS)
def test_a_right_attention_that_picks_places_is_not_refused(name: str) -> None:
    """Its mask reads the first query's row, and looks up positions: among a few queries other ones stand there."""
    fn, inputs = test_routing_lists.looked_up(name), test_routing_lists.inputs(packed=True)
    report = compared(fn, inputs)[1]
    assert report.routed, report.near_misses


def test_picks_among_a_segment_are_picks_of_its_keys() -> None:
    few, report = compared(test_routing_segments.scaled_before, test_routing_segments.given())
    assert report.routed and few.runs == 1 and not few.left, (report.near_misses, few.left)


@pytest.mark.parametrize("second", ["prefix", "spare", "counted"])
def test_numbers_that_queries_and_keys_share_are_cut_for_each(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query finds its packed sequence at its own place, and that of a key at the key's."""
    shapes = watched_shapes(monkeypatch)
    fn = test_routing_lists._model("packed", second, False, test_routing_lists.library)
    entries = test_routing_lists.ENTRIES
    few, report = compared(fn, test_routing_lists.inputs(packed=True, entries=entries))
    assert report.routed and few.runs == 1 and not few.left, (report.near_misses, few.left)
    assert few_queries(shapes, test_routing_lists.HEADS, test_routing_lists.S + entries)


def region(fn: Fn) -> Fn:
    return lambda *given: checkpoint(fn, *given, use_reentrant=False)


@pytest.mark.parametrize(("window", "second"), [("padded", "counted"), ("packed", "spare")])
def test_a_mask_that_is_scattered_around_a_region_is_not_refused(window: str, second: str) -> None:
    """A scatter into all rows with an index for a few would write the first rows, and the queries lie elsewhere."""
    fn = test_routing_lists._model(window, second, False, region(test_routing_lists.written))
    given = test_routing_lists.inputs(window == "packed", "left", test_routing_lists.ENTRIES)
    assert compared(fn, given)[1].routed


def test_a_mask_that_two_regions_pass_on_is_not_drawn_at_random() -> None:
    """The region inside knows it as what the graph around both computes, and has its result alone."""
    fn = test_routing_lists._model("padded", "scattered", False, region(region(test_routing_lists.written)))
    few, report = compared(fn, test_routing_lists.inputs(False, "left", test_routing_lists.ENTRIES))
    assert report.routed and few.runs == 0, (report.near_misses, few.left)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ["window", "ranges", "list"])
def test_an_attention_with_wrong_gradients_is_refused(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, op = ATTENTIONS[name]
    right = Edit.emit

    def emit(self: Edit, target: Any, *args: Any, **options: Any) -> fx.Node:
        if str(target) == f"mhc_inductor.{op}.default":
            args = (*args[:at], right(self, "detach", args[at]), *args[at + 1 :])
        return right(self, target, *args, **options)

    monkeypatch.setattr(Edit, "emit", emit)
    report = compared(fn, attended())[1]
    assert not report.routed and any("gradient" in m.reason for m in report.near_misses), report.near_misses


@pytest.mark.parametrize("name", BENT)
def test_a_wrong_attention_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spelling, change = BENT[name]
    fn, op = ATTENTIONS[spelling]
    wrong(monkeypatch, op, change)
    report = compared(fn, attended(), check=lambda *_: Verdict())[1]
    assert report.routed, report.near_misses
    report = compared(fn, attended())[1]
    assert not report.routed and any("verified on random data" in m.reason for m in report.near_misses)


SWAPS: dict[str, Callable[..., Any]] = {
    "loop": lambda kvqm, b_s, b_m, *rest: (kvqm, b_m, b_s, *rest),
    "scan": lambda kvqm, b_s, b_m, S, M, *rest: (kvqm, b_s, b_m, M, S, *rest),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("how", SWAPS)
def test_a_recurrence_is_compared_with_fewer_sequences_and_steps(
    how: str, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swapped:
        wrong(monkeypatch, "e79_scan", SWAPS[how])
    few, report = compared(*((loop := plain()), loop.inputs()) if how == "loop" else (_by_scan, _given(T=40, B=6)))
    assert 1 <= few.runs <= 1 + (how == "scan") and not few.left
    assert [r.op for r in report.routed] == ["e79_scan"] * (not swapped)


def test_only_a_few_tokens_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is not here, too: the graph's tensors are on ``meta``."""
    largest = []
    data = Trial.data

    def measured(self: Any, *args: Any) -> Any:
        feed = data(self, *args)
        largest.append(max(t.numel() for t in feed.values() if isinstance(t, Tensor)))
        assert all(t.device.type == "cpu" for t in feed.values() if isinstance(t, Tensor))
        return feed

    monkeypatch.setattr(Trial, "data", measured)
    report, few = Report(), FewTokens()
    inputs = [t.to("meta") for t in given(64, 4096)]
    torch._dynamo.reset()
    torch.compile(site, backend=interpreted(report, [], few), dynamic=False)(*inputs)
    assert {r.op for r in report.routed} == EVERY and few.runs == 2 and not few.left
    assert max(largest) <= (2 * N + N * N) * N * WIDTH


def test_the_layers_of_a_model_are_compared_once() -> None:
    model = deepseek_model.build(deepseek_model.TINY, torch.device("cpu"), torch.float32).train()
    fn, ids = (lambda ids: model(ids).logits), deepseek_model.tokens(deepseek_model.TINY, torch.device("cpu"))
    few, report = compared(fn, [ids])
    assert few.runs == 5 and not few.left
    assert {r.op for r in report.routed} >= EVERY | {"mhc_head"}


LEFT: dict[str, tuple[str, Any]] = {
    "RuntimeError: no": ("_differs", RuntimeError("no")),
    "as much as is compared of a graph was compared": ("_WORK", -1),
    "it has more than 9 calls": ("_CALLS", 9),
    "a tensor is too large": ("_ELEMENTS", 100),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_not_run_passes_and_is_told(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = LEFT[why]

    def failing(*_: Any) -> str:
        raise value

    module = few_tokens if hasattr(few_tokens, name) else cutter
    monkeypatch.setattr(module, name, failing if isinstance(value, Exception) else value)
    few, report = compared(site, given(2, 3))
    assert {r.op for r in report.routed} == EVERY and not few.runs
    assert sorted(few.left) == [f"mhc_post: {why}", f"mhc_pre: {why}"]
    report = mhc_inductor.explain(site, *given(2, 3))
    assert {r.note for r in report.routed} == {f"not compared on a few tokens: {why}"}
    assert f"not compared on a few tokens: {why}" in str(report)


@pytest.mark.parametrize("during", ["a compile", "no compile"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_nothing_of_the_process_changes(name: str, during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a formula draws random numbers; modes and hooks around the compile do not see the runs."""
    few = FewTokens()
    report = watched(name, during, few, site, [t.requires_grad_() for t in given(2, 3)], monkeypatch)
    assert not few.left
    if (name, during) != ("inference", "no compile"):  # a graph with gradients is not routed there
        assert few.runs == 2 and {r.op for r in report.routed} == EVERY


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=["text", "device"])
def test_devices_that_a_formula_names_are_not_used(device: Any) -> None:
    few, report = FewTokens(), Report()
    torch._dynamo.reset()
    inputs = [t.to("meta") for t in given(2, 3)]
    torch.compile(site, backend=interpreted(report, [], few), dynamic=False)(*inputs, device)
    assert {r.op for r in report.routed} == EVERY and few.runs == 2 and not few.left


@pytest.mark.few_objects
def test_nothing_is_kept_after_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, init = list[weakref.ref[FewTokens]](), FewTokens.__init__

    def counted(self: FewTokens) -> None:
        checks.append(weakref.ref(self))
        init(self)

    monkeypatch.setattr(FewTokens, "__init__", counted)
    torch._dynamo.reset()
    torch.compile(site, backend="mhc_inductor")(*given(2, 3))
    gc.collect()
    assert checks and all(check() is None for check in checks)
