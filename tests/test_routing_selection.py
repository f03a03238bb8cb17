# SPDX-License-Identifier: Apache-2.0
"""Attention under a mask of selected keys becomes one op, however both are written, and other attention does not.

The graphs come from Dynamo and run without Inductor; a sample runs through all of ``backend="mhc_inductor"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_inductor
from mhc_inductor.options import RoutingOptions
from mhc_inductor.routing import interface
from tests.formulas.reference_models_selection import REFERENCE_MODELS
from tests.formulas.spellings_selection import (
    AXES,
    KINDS,
    MUTATIONS,
    Attention,
    Settings,
    held,
    mutants,
    plain,
    singles,
    spellings,
)
from tests.oracles.mhc import relative
from tests.tools.attentions import routed, same
from tests.tools.capture import Captured, alike, difference, eager, looking, not_worse, reasons, run, through_inductor

CHUNK, RANDOM, SEED = 20, 150, 1
DENSE = "dense causal SDPA (cuDNN)"


def _run(one: Attention, dynamo: bool = True) -> tuple[Captured, Captured]:
    def fn(*given: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=one.settings.mode == "autocast"):
            return one(*given)

    given, grad = one.inputs(), one.settings.mode != "no_grad"
    options: Any = {"dynamic": None if one.settings.symbolic else False, "symbolic": one.symbolic, "dynamo": dynamo}
    called = fn if one.settings.mode == "autocast" else one
    return run(called, given, (), grad, **options), eager(called, given, (), grad)


def _exact(one: Attention) -> Captured:
    """Runs the attention in fp64 on the same numbers."""
    given = [t.double() if t.is_floating_point() else t for t in one.inputs()]
    return eager(one, given, (), one.settings.mode != "no_grad")


def assert_routed(one: Attention) -> None:
    got, unrouted = _run(one)
    assert dict(got.ops) == {"selection_attention": 1}, f"{one.name}: {reasons(got)}"
    names = [str(getattr(node.target, "__name__", node.target)) for node in got.graphs[0].graph.nodes]
    words = ("softmax", "matmul", "bmm", "einsum", "scaled_dot", "one_hot", "cumsum", "repeat_interleave")
    # In-place writes stay in the graph for the compiler to remove, since nothing reads them.
    left = [name for name in names if any(word in name for word in words)]
    assert not left or any(name.endswith("_") or name in ("iadd", "setitem") for name in names), f"{one.name}: {left}"
    not_worse(one.name, got, unrouted, _exact(one))


SINGLES = singles()


@pytest.fixture(autouse=True)
def selection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves indexers as they are: among scores of exactly 0, which two heads often give, index_topk takes others."""
    others = {name: make for name, make in interface._REGISTERED.items() if name != "index"}
    monkeypatch.setattr(interface, "_REGISTERED", others)


@pytest.mark.parametrize("start", range(0, len(SINGLES), CHUNK))
def test_every_way_to_write_each_part_is_routed(start: int) -> None:
    for one in SINGLES[start : start + CHUNK]:
        assert_routed(one)


@pytest.mark.parametrize("start", range(0, 15, 5))
def test_random_spellings_are_routed(start: int) -> None:
    """Tests one in five; tests/all_spellings.py tests all of them."""
    for one in spellings(RANDOM, SEED)[start::15]:
        assert_routed(one)


def test_the_spellings_hold_every_pick() -> None:
    picks = {(axis, pick) for one in SINGLES for axis, pick in one.picks.items()}
    assert picks == {(axis, pick) for axis, parts in AXES.items() for pick in parts}
    drawn = spellings(RANDOM, SEED)
    assert {one.kind for one in drawn} == set(KINDS)
    for axis in ("segments", "sink", "lists"):
        assert {one.picks[axis] for one in drawn if axis != "lists" or one.kind == axis} == set(AXES[axis])
    counts = held(drawn)
    assert min(counts.values()) >= RANDOM // 5, counts


LIMITS = {
    "ranges in segments": (plain(segments="ids"), "the mask also indexes a tensor by the key's position"),
    "ranges under padding": (plain(segments="padding"), "not a union of ranges"),
    "ids of dynamic sizes": (plain("lists", Settings(symbolic=True), segments="ids"), "has no graph node"),
    "positions of dynamic sizes": (plain("lists", Settings(symbolic=True), segments="positions"), "has no graph node"),
    "-1e9 in bf16": (plain("lists", Settings(dtype=torch.bfloat16), form="matmul", masked="large"), "set to -9.98"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_stays_of_segments_and_fills(name: str) -> None:
    one, reason = LIMITS[name]
    got, unrouted = _run(one)
    assert not got.ops and reason in reasons(got), f"{dict(got.ops)}: {reasons(got)}"
    assert difference(got, unrouted) == 0.0


# --- what is not a selection --------------------------------------------------------------------------------

RANGES = "not one of ranges from a start up to an end"
POSITIONS = "a bound that moves with the query is not its own key's"
UNION = "not a union of ranges"
ADDED = "the tensor added to the scores is not a mask: its values are not all 0 or at most -1e4"
READ = "the attention weights or scores are used elsewhere, too"
SINKS = "at most one sink a head"
BY_REASON = {
    RANGES: "end inclusive; start exclusive; start later; end earlier; keys counted from 1; no start; no end; from the query; "
    "starts of one range ends of another; differences late; loop of and; block after; keys of the block before; "
    "blocks shifted; block one too long; block one too short",
    UNION: "not selected; all ranges; in two ranges; in one range only; every block but these; block taken twice; inverted",
    POSITIONS: "strictly; one ahead; from the first key; tril of the first keys; tril one less; backwards; not causal",
    "keys outside the selected ranges are visible without a bound; expected a window or first keys": "or causal",
    "its heads are in another order": "tiled",
    "the mask differs between the heads of a group": "one head only",
    "scores of other keys are set to 0": "filled with 0",
    "scores of other keys are set to -50": "filled with a little",
    "scores of other keys are set to 1e+09": "fill positive",
    "the scores are changed by tanh": "capped",
    ADDED: "biased; biased after; a little added",
    "the attention weights are dropped out": "dropped; dropout",
    READ: "weights returned; scores used",
    "the weights of some keys are cut off": "sink twice; sink scaled",
    SINKS: "sink of each query; sink kept for the first key",
    "the attention weights are changed before their product": "sink as a gate",
    "the scores are changed by maximum": "sink of a key",
}
REASONS = {mutant: reason for reason, mutants in BY_REASON.items() for mutant in mutants.split("; ")}
SILENT = ("a window", "causal only", "documents", "sigmoid", "over queries", "multiplied")
"""Attention that does not resemble a selection, or whose weights are not a softmax: no near miss is reported."""


@pytest.mark.parametrize("start", range(0, len(MUTATIONS), CHUNK))
def test_a_mutant_is_not_routed_and_the_report_says_why(start: int) -> None:
    for one in mutants()[start : start + CHUNK]:
        got, unrouted = _run(one, dynamo=False)
        assert not got.ops and not got.report.problems, f"{one.mutant} is routed, or fails: {got.report.problems}"
        assert REASONS.get(one.mutant, "") in reasons(got), f"{one.mutant}: {reasons(got)}"
        assert one.mutant not in SILENT or got.report.empty, f"{one.mutant}: {reasons(got)}"
        assert difference(got, unrouted) == 0.0, one.mutant
        assert all(m.op == "selection_attention" and "selection.py" in m.source for m in got.report.near_misses)


# --- reference models in the style of other projects --------------------------------------------------------


def _reference_model(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...], Sequence[tuple[str, Tensor]]]:
    make, given = REFERENCE_MODELS[name]
    torch.manual_seed(0)
    fn = make()
    return fn, given, list(fn.named_parameters()) if isinstance(fn, nn.Module) else ()


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_reference_models_are_routed(name: str, grad: bool) -> None:
    fn, given, named = _reference_model(name)
    assert not routed(fn, given, grad, named=named).report.near_misses


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_reference_models_in_bf16(name: str) -> None:
    """Compares in bf16: the picks come from the same bf16 scores.

    Modules that select by a product of their own may round it differently.
    """
    make, given = REFERENCE_MODELS[name]
    torch.manual_seed(0)
    fn = make()
    fn = fn.bfloat16() if isinstance(fn, nn.Module) else fn
    given = tuple(t.bfloat16() if t.is_floating_point() else t for t in given)
    routed(fn, given, False, bound=2e-2)


@pytest.mark.parametrize("name", ["DeepSeek sparse attention", "packed, no batch", "ranges", "window and blocks"])
def test_one_graph_serves_other_lengths(name: str) -> None:
    """Checks that one dynamic graph serves all lengths, with as many compiles as without routing."""
    fn, given, _ = _reference_model(name)
    dims = {"DeepSeek sparse attention": (1,), "ranges": (1, None, None, 1), "packed, no batch": (0, 0, 0, 1)}
    at = dims.get(name, (2, 2, 2, 1))

    plain = torch._dynamo.testing.CompileCounter()
    compiled, reports = looking(fn, dynamic=True, fullgraph=True)
    for call in (compiled, torch.compile(fn, backend=plain, dynamic=True, fullgraph=True)):
        for cut in (0, 1, 2):
            less = (t if d is None else t.narrow(d, 0, t.shape[d] - cut) for t, d in zip(given, at, strict=True))
            same = tuple(t.clone() for t in less)
            with torch.no_grad():
                assert relative(call(*same), fn(*same)) < 2e-6
        torch._dynamo.reset()
    assert [[r.op for r in report.routed] for report in reports] == [["selection_attention"]] * plain.frame_count


# --- what the op gets ---------------------------------------------------------------------------------------


def _arguments(got: Captured) -> tuple[torch.fx.Node, ...]:
    (call,) = got.nodes("mhc_inductor.selection_attention.default")
    return call.args  # type: ignore[return-value]


def test_ranges_go_in_as_they_are() -> None:
    got, _ = _run(plain())
    assert _arguments(got)[3].op == "placeholder"


@pytest.mark.parametrize("form", ["sdpa", "einsum", "bmm", "grouped", "grouped_matmul"])
def test_queries_and_keys_are_views_of_the_models_tensors(form: str) -> None:
    """Checks that the op reads views of the model's q, k and v, whatever copies the model made for its heads."""
    got, _ = _run(plain(form=form, spread="contiguous"))
    for node in _arguments(got)[:3]:
        while node.op != "placeholder":
            assert node.target in ("unflatten", "permute", "squeeze", "unsqueeze", "getitem"), node.format_node()
            node = node.args[0]  # type: ignore[assignment]


def test_blocks_of_none_need_no_condition() -> None:
    got, _ = _run(plain("blocks", Settings(negative=True), blocks="equal_masked"))
    ranges = _arguments(got)[3]
    names, todo = set(), [ranges]
    while todo:
        node = todo.pop()
        names.add(str(getattr(node.target, "__name__", node.target)))
        todo += node.all_input_nodes
    assert not names & {"where", "ne"}


def test_scale_and_groups_are_those_of_the_model() -> None:
    got, _ = _run(plain(form="bmm", scale="both"))
    args = _arguments(got)
    assert args[7] == pytest.approx(0.35)
    assert args[0].meta["example_value"].shape == (2, 12, 2, 3, 8)
    assert args[1].meta["example_value"].shape == (2, 2, 16, 8)


# --- rows without keys --------------------------------------------------------------------------------------


def _empty_rows(masked: str, form: str = "matmul", **options: Any) -> tuple[Captured, Captured, Tensor]:
    """Runs an attention whose ranges are empty for every third query; returns both results and these queries."""
    one = plain(form=form, masked=masked, softmax="plain")
    *given, picked = one.inputs()
    none = torch.arange(picked.shape[1]) % 3 == 0
    picked[:, none] = 0
    return run(one, (*given, picked), **options), eager(one, (*given, picked)), none


@pytest.mark.parametrize("form", ["sdpa", "sdpa_float", "sdpa_groups"])
def test_rows_without_keys_are_those_of_sdpa(form: str) -> None:
    got, unrouted, none = _empty_rows("fill", form)
    assert got.ops and difference(got, unrouted) < 2e-6
    assert not bool(got.outputs[0][:, none].any())


@pytest.mark.parametrize("masked", ["fill", "where", "add_zeros"])
def test_rows_without_keys_are_0_where_the_model_has_nan(masked: str) -> None:
    """Sets the option that makes such rows zero."""
    got, unrouted, none = _empty_rows(masked, options=RoutingOptions(empty_rows="zero"))
    assert got.ops and bool(unrouted.outputs[0][:, none].isnan().all())
    assert not bool(got.outputs[0][:, none].any())
    assert all(g is None or bool(g.isfinite().all()) for g in got.grads.values())
    assert relative(got.outputs[0][:, ~none], unrouted.outputs[0][:, ~none]) < 2e-6


_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda s, seen: s.masked_fill(~seen, -math.inf),
    "added": lambda s, seen: s + torch.zeros_like(s).masked_fill(~seen, -math.inf),
    "filled_lowest": lambda s, seen: s.masked_fill(~seen, torch.finfo(s.dtype).min),
    "added_lowest": lambda s, seen: s + torch.zeros_like(s).masked_fill(~seen, torch.finfo(s.dtype).min),
    "both": lambda s, seen: s.masked_fill(~seen, -math.inf) + torch.zeros_like(s).masked_fill(~seen, -math.inf),
}
_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda s, seen: s.softmax(-1),
    "written out": lambda s, seen: (lambda e: e / e.sum(-1, True))((s - s.amax(-1, True)).exp()),
    "safe": lambda s, seen: torch.ops.aten._safe_softmax(s, -1),
    "nan_to_num": lambda s, seen: s.softmax(-1).nan_to_num(),
    "filled": lambda s, seen: s.softmax(-1).masked_fill(~seen, 0.0),
    "where": lambda s, seen: torch.where(seen, s.softmax(-1), 0.0),
    "times": lambda s, seen: s.softmax(-1) * seen,
    "nan_to_num_times": lambda s, seen: s.softmax(-1).nan_to_num() * seen,
    "hidden": lambda s, seen: torch.where((s == -math.inf).all(-1, keepdim=True), 0.0, s.softmax(-1)),
}
_NAN = {("both", "plain"), ("both", "written out"), ("both", "times")}
_STAYS = {True: {("both", x) for x in _WEIGHTS if x != "safe"}, False: _NAN}
"""What routing leaves alone with gradients and without: those to keys whose scores are filled, or added to, differ."""


@pytest.mark.parametrize("weights", _WEIGHTS)
@pytest.mark.parametrize("scores", _SCORES)
@pytest.mark.parametrize("grad", [True, False])
def test_rows_without_keys_are_those_of_the_formula(scores: str, weights: str, grad: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, picked: Tensor) -> Tensor:
        at = torch.arange(k.shape[-2])
        seen = ((at >= picked[..., :1]) & (at < picked[..., 1:]))[:, None]
        return _WEIGHTS[weights](_SCORES[scores](q @ k.mT, seen), seen) @ v

    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=grad) for n in (12, 16, 16))
    start = torch.randint(0, 12, (2, 12, 1))
    picked = torch.cat([start, start + 4], -1)
    picked[:, ::3] = 0
    got = same(attend, (q, k, v, picked), 1e-6, grad=grad)
    assert bool(got.ops) == ((scores, weights) not in _STAYS[grad]), reasons(got)


def test_nan_of_keys_that_nobody_selects_stays_there() -> None:
    one = plain(form="matmul")
    q, k, v, picked = one.inputs()
    picked = picked.clamp(max=10)
    k[:, 12:], v[:, 12:] = float("nan"), float("inf")
    got = run(one, (q, k, v, picked), options=RoutingOptions(empty_rows="zero"))
    assert got.ops and bool(got.outputs[0].isfinite().all()) and bool(got.grads["input 0"].isfinite().all())  # type: ignore[union-attr]


# --- the surroundings of the attention ----------------------------------------------------------------------


def _mask(ranges: Tensor, T: int) -> Tensor:
    t = torch.arange(T)
    return ((t >= ranges[..., :1]) & (t < ranges[..., 1:])).any(-2)


def _given() -> tuple[Tensor, ...]:
    q, k, v, ranges = plain(settings=Settings(S=16, h=1, Dv=8)).inputs()
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ranges.transpose(1, 2)


Around = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""Of q, k, v [2, 2, 16, 8] and ranges [2, 2, 16, 3, 2]."""


def _layers(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    mask = _mask(ranges, k.shape[2])
    for _ in range(3):
        q = q + F.scaled_dot_product_attention(q, k, v, mask)
    return q


def _needed_elsewhere(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    mask = _mask(ranges, k.shape[2])
    q = q + F.scaled_dot_product_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)


def _inner(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, _mask(ranges, k.shape[2]))


def _changed_in_between(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    mask = _mask(ranges[..., :1, :], k.shape[2])
    first = F.scaled_dot_product_attention(q, k, v, mask)
    mask |= _mask(ranges[..., 1:, :], k.shape[2])
    return first + F.scaled_dot_product_attention(q, k, v, mask)


def _filled(q: Tensor, k: Tensor, ranges: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~_mask(ranges, k.shape[2]), float("-inf")).softmax(-1)


def _without_gradients(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros(q.shape[:3] + k.shape[2:3]).masked_fill(~_mask(ranges, k.shape[2]), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, mask)


AROUND: dict[str, tuple[Around, int]] = {
    "layers share a mask": (_layers, 3),
    "one layer that needs the mask keeps it for no other": (_needed_elsewhere, 1),
    "checkpointed": (lambda *given: torch.utils.checkpoint.checkpoint(_inner, *given, use_reentrant=False), 1),
    "masks changed in between are two": (_changed_in_between, 2),
    "masks without gradients": (_without_gradients, 1),
}


@pytest.mark.parametrize("name", AROUND)
def test_surroundings_in_which_it_is_routed(name: str) -> None:
    fn, count = AROUND[name]
    got = routed(fn, _given(), ops={"selection_attention": count}, bound=5e-6)
    assert ("dropped out" in reasons(got)) == ("needs the mask" in name)


@pytest.mark.parametrize("lists", [False, True])
def test_a_mask_that_a_loss_reads_again_and_the_graph_returns(lists: bool) -> None:
    """The loss of an indexer compares its scores with the attention's weights, summed over heads, at the chosen keys."""

    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> tuple[Tensor, ...]:
        if lists:
            chosen = ranges[:, 0].flatten(-2).clamp(0, 15)
            mask = q.new_full((2, 1, 16, 16), -math.inf).scatter(-1, chosen[:, None], 0.0)
        else:
            mask = torch.zeros(2, 1, 16, 16).masked_fill(~_mask(ranges, k.shape[2])[:, :1], -math.inf)
        o = F.scaled_dot_product_attention(q, k, v, mask)
        with torch.no_grad():
            target = (q @ k.mT + mask).softmax(-1).mean(1)
        return o, F.kl_div((q.mean(1) @ k.mean(1).mT + mask[:, 0].clamp(min=-1e9)).log_softmax(-1), target), mask

    routed(fn, _given(), bound=5e-6)


def _ranges_changed(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    ranges = ranges.clamp(0, 100)
    mask = _mask(ranges, k.shape[2])
    ranges += 1
    return F.scaled_dot_product_attention(q, k, v, mask)


def _weights_without_gradients(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    with torch.no_grad():
        weights = _filled(q, k, ranges)
    return weights @ v


@pytest.mark.parametrize(
    ("fn", "reason"), [(_ranges_changed, "written in place"), (_weights_without_gradients, "gradients are switched")]
)
def test_surroundings_that_forbid_it(fn: Around, reason: str) -> None:
    assert reason in reasons(routed(fn, _given(), ops={}, bound=0.0))


def test_values_changed_afterwards_forbid_it() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        v = v * 1.0
        weights = _filled(q, k, ranges)
        k = k * 1.0
        out = weights @ v
        v.add_(1.0)
        return out + v.sum()

    alike(fn, _given(), grad=False, within=2e-6)


def test_keys_without_gradients_keep_none() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        scores = torch.einsum("bhsd,bhtd->bhst", q, k.detach())
        return scores.masked_fill(~_mask(ranges, k.shape[2]), float("-inf")).softmax(-1) @ v

    assert routed(fn, _given(), bound=5e-6).grads["input 1"] is None


def test_plain_attention_is_no_near_miss() -> None:
    """Runs causal, sliding, padded, capped, ALiBi and unmasked attention, none of which is reported."""

    def fn(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        S, T = q.shape[2], k.shape[2]
        rows, t = torch.arange(S)[:, None], torch.arange(T)
        causal, lowest = t <= rows, torch.finfo(q.dtype).min
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, causal),
            F.scaled_dot_product_attention(q, k, v, causal & (t > rows - 4)),
            F.scaled_dot_product_attention(q, k, v, causal & padding[:, None, None, :]),
            F.scaled_dot_product_attention(q, k, v, torch.where(causal, -(rows - t) * 0.1, float("-inf"))),
            torch.softmax(q @ k.mT * 0.3, -1) @ v,
            *((q @ k.mT).masked_fill(~causal, fill).softmax(-1) @ v for fill in (-math.inf, lowest, -1e4)),
            (3 * torch.tanh(q @ k.mT)).masked_fill(~(causal & padding[:, None, None]), -math.inf).softmax(-1) @ v,
            (q @ k.mT + torch.where(causal, -(rows - t) * 0.1, float("-inf"))).softmax(-1) @ v,
            torch.softmax(q, -1),
        ]
        return tuple(outs)

    q, k, v, _ = _given()
    got = routed(fn, (q, k, v, torch.rand(2, 16) > 0.2), False, ops={}, bound=0.0)
    assert got.report.empty, reasons(got)


# --- through Inductor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("name", ["DeepSeek sparse attention", "selected blocks", "loop over ranges"])
def test_compiled_with_inductor(name: str, mode: str) -> None:
    given = *_reference_model(name), mode == "training"
    got = through_inductor(*given, fullgraph=True)
    assert got.ops["selection_attention"] == 1 and difference(got, eager(*given)) < 1e-5


def test_explain_names_the_attention(capsys: pytest.CaptureFixture[str]) -> None:
    fn, given, _ = _reference_model("selected blocks")
    report = mhc_inductor.explain(fn, *given)
    (routed,) = report.routed
    assert routed.op == "selection_attention" and "reference_models_selection.py" in routed.source
    assert "scaled_dot_product_attention" in routed.source
    assert routed.detail == "2 groups of 2 heads, 4 blocks of 4 keys a query; rows without keys give 0"
    assert "selection_attention" in capsys.readouterr().out


def test_explain_says_why_not() -> None:
    torch._dynamo.reset()
    one = dataclasses.replace(plain(), mutant="end inclusive")
    report = mhc_inductor.explain(one, *one.inputs())
    assert not report.routed and [m.op for m in report.near_misses] == ["selection_attention"]
    assert "key < end + 1" in report.near_misses[0].reason


def test_the_committed_counts_hold_segments_sinks_and_lists() -> None:
    from tests.all_spellings import RESULT

    found = json.loads(RESULT.read_text())["selection"]
    assert found["checked"] == found["as_expected"] == RANDOM
    assert all(found.get(what, 0) > 0 for what in ("segments", "sinks", "lists")), found
