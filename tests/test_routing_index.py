# SPDX-License-Identifier: Apache-2.0
"""Indexers in plain PyTorch become index_topk: spellings, masks, models, modes, and what is left alone and named."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mhc_inductor.routing.operators.index.check import Check
from tests.formulas.spellings_index import CHOICES, MASKS, NEAR, SCORES, SILENT, UNSCORED, D, H, K
from tests.tools.capture import Captured, alike, difference, eager, reasons, run

B, S, T = 2, 7, 9


def given(seed: int = 0, dtype: torch.dtype = torch.bfloat16, s: int = S, t: int = T) -> list[Tensor]:
    """Returns q, k, w, a mask, positions and padding."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(B, s, H, D, generator=g).to(dtype), torch.randn(B, t, D, generator=g).to(dtype)
    w = torch.randn(B, s, H, generator=g).to(dtype)
    seen = torch.rand(B, s, t, generator=g) < 0.5
    seen[0, 0] = False
    pos = torch.cat([torch.arange(min(3, s)), torch.arange(max(0, s - 3))]).expand(B, s).contiguous()
    pad = torch.ones(B, t, dtype=torch.bool)
    pad[1, :3] = False
    return [q, k, w, seen, pos, pad]


def routed(got: Captured, count: int = 1) -> None:
    """Asserts that the graph has the op and no tensor of all heads' products."""
    assert [r.op for r in got.report.routed] == ["index_topk"] * count, reasons(got)
    assert got.ops["index_topk"] == count
    for node in got.nodes():
        shape = getattr(node.meta.get("example_value"), "shape", ())
        assert len(shape) != 4 or node.op == "placeholder" or H not in shape or T not in shape, node


def same_choice(mine: Tensor, theirs: Tensor, scores: Tensor, tolerance: float = 1e-5) -> None:
    """Asserts that ``mine`` are distinct keys whose scores are those of ``theirs``."""
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    ordered = mine.long().sort(-1).values
    assert int(ordered.min()) >= 0 and int(ordered.max()) < scores.shape[-1]
    assert bool((ordered.diff(dim=-1) > 0).all())
    a, b = (scores.double().gather(-1, x.long()).sort(-1).values for x in (mine, theirs))
    assert torch.equal(a.isfinite(), b.isfinite())
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def spelled(name: str, mask: str, choice: str) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """Returns an indexer and its masked scores."""

    def masked(q: Tensor, k: Tensor, w: Tensor, seen: Tensor, pos: Tensor, pad: Tensor) -> Tensor:
        return MASKS[mask](SCORES[name](q, k, w), seen, pos, pad)

    return lambda *given: CHOICES[choice](masked(*given)).sort(-1).values, masked


def cases() -> list[Any]:
    """Returns every spelling of the scores and of the mask, each with others drawn at random."""
    draw = random.Random(16)
    names = [(n, draw.choice([*MASKS]), draw.choice([*CHOICES])) for n in SCORES]
    names += [(draw.choice([*SCORES]), m, draw.choice([*CHOICES])) for m in MASKS for _ in range(2)]
    return [pytest.param(*n, i, id=" | ".join(n)) for i, n in enumerate(names)]


@pytest.mark.parametrize(("name", "mask", "choice", "seed"), cases())
def test_spellings(name: str, mask: str, choice: str, seed: int) -> None:
    fn, masked = spelled(name, mask, choice)
    x = given(seed, (torch.bfloat16, torch.float32, torch.float16)[seed % 3])
    dynamic = seed % 4 == 0
    symbolic = [(0, 1), (2, 1), (3, 1), (4, 1), (1, 1), (3, 2), (5, 1)] if dynamic else []
    got = run(fn, x, grad=seed % 2 == 0, dynamic=None, symbolic=symbolic)
    routed(got)
    assert "spellings_index" in got.report.routed[0].source and got.report.routed[0].error == 0.0
    loose = 3e-2 if name == "matmul of 16 bits" else 1e-5
    same_choice(got.outputs[0], eager(fn, x, grad=False).outputs[0], masked(*x), loose)


def test_at_least_forty_spellings_and_twenty_near_misses() -> None:
    assert len(cases()) >= 40 and len(NEAR) >= 20


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    fn, reason = NEAR[name]
    x = given()[:4]
    got = alike(fn, x, ops={} if name in UNSCORED else {"index_scores": 1}, grad=False, within=1e-6)
    ours = [m.reason for m in got.report.near_misses if m.op == "index_topk"]
    assert ours and any(re.search(reason, m) for m in ours), reasons(got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_scores_that_something_else_reads_have_gradients(dtype: torch.dtype, dynamic: bool) -> None:
    """A loss reads masked scores next to the choice, as in training of an indexer; the mask is data."""

    def fn(q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        scores = SCORES["DeepSeek-V3.2"](q, k, w) + mask
        best = scores.topk(K, -1)
        return best.indices, best.values.relu(), scores.transpose(1, 2).log_softmax(1).sum(-1)

    q, k, w, seen = given(3, dtype)[:4]
    x = [q, k, w, torch.where(seen, 0.0, -1e9)]
    symbolic = [(0, 1), (2, 1), (3, 1), (1, 1), (3, 2)] if dynamic else []
    within = 2e-6 if dtype is torch.float32 else 1e-2
    got = alike(fn, x, ops={"index_scores": 1}, within=within, dynamic=None, symbolic=symbolic)
    assert "values of topk are used" in reasons(got)


def test_two_choices_share_their_scores() -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        scores = SCORES["Hy4"](q, k, w)
        return (scores + mask).topk(K, -1).indices, scores.topk(K, -1, largest=False).indices

    x = given()[:4]
    x[3] = torch.where(x[3], 0.0, -math.inf)
    alike(fn, x, ops={"index_scores": 1}, grad=False)


@pytest.mark.parametrize("name", SILENT)
def test_other_choices_are_not_mentioned(name: str) -> None:
    got = run(SILENT[name], given()[:4], grad=False)
    assert not got.report.routed and not [m for m in got.report.near_misses if m.op == "index_topk"]


# --- modes, gradients, regions -------------------------------------------------------------------------------


def v4(q: Tensor, k: Tensor, w: Tensor, seen: Tensor, pos: Tensor, pad: Tensor) -> Tensor:
    scores = SCORES["DeepSeek-V4"](q, k, w)
    return MASKS["compressed"](scores, seen, pos, pad).topk(K, -1).indices.sort(-1).values


def v32(q: Tensor, k: Tensor, w: Tensor, seen: Tensor, pos: Tensor, pad: Tensor) -> Tensor:
    scores = SCORES["DeepSeek-V3.2"](q, k, w)
    return MASKS["given"](scores, seen, pos, pad).topk(K, -1).indices.sort(-1).values


def test_prefixes_become_a_limit_and_no_mask() -> None:
    for mask in ("causal", "causal, triu", "causal, where", "causal, added", "causal, bf16", "causal, finfo.min"):
        fn, _ = spelled("DeepSeek-V3.2", mask, "method")
        limit, given_mask = run(fn, given(), grad=False).nodes("index_topk")[0].args[5:7]
        assert limit is not None and given_mask is None, mask
        limits = torch.arange(S) + 1 + T - S
        trace = torch.fx.Interpreter(torch.fx.GraphModule({}, _upto(limit)))
        assert torch.equal(trace.run().long(), limits.expand(B, S)), mask


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_that_the_model_makes_keep_nothing_apart(dynamic: bool) -> None:
    symbolic = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (5, 1)] if dynamic else []
    for mask, proved in (("own positions", True), ("own positions, apart", False)):
        fn, masked = spelled("DeepSeek-V3.2", mask, "method")
        x = given(t=S)
        got = run(fn, x, grad=False, dynamic=None, symbolic=symbolic)
        assert [r.op for r in got.report.routed] == ["index_topk"], reasons(got)
        assert (got.nodes("index_topk")[0].args[6] is None) == proved, mask
        same_choice(got.outputs[0], eager(fn, x, grad=False).outputs[0], masked(*x))


def _upto(node: torch.fx.Node) -> torch.fx.Graph:
    """Returns the graph of a node that depends on no input."""
    graph, at = torch.fx.Graph(), {}
    for n in node.graph.nodes:
        if n.op.startswith("call_") and all(a in at for a in n.all_input_nodes):
            at[n] = graph.node_copy(n, at.__getitem__)
    graph.output(at[node])
    return graph


def test_the_op_reads_16_bits_where_the_model_casts_them() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k = run(v32, given(dtype=dtype), grad=False).nodes("index_topk")[0].args[:2]
        assert {n.meta["example_value"].dtype for n in (q, k)} == {dtype}


@pytest.mark.parametrize("fn", [v32, v4])
@pytest.mark.parametrize("mode", ["grad", "no_grad around", "no_grad inside", "inference"])
def test_grad_modes(fn: Callable[..., Tensor], mode: str) -> None:
    def indexer(q: Tensor, k: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        q2 = q * 2.0
        if mode == "no_grad inside":
            with torch.no_grad():
                return fn(q2, k, w, *rest), q2 * w.mean()
        return fn(q2, k, w, *rest), q2 * w.mean()

    with torch.inference_mode(mode == "inference"):
        got, want = (do(indexer, given(3), grad="inside" in mode or mode == "grad") for do in (run, eager))
    routed(got)
    assert difference(Captured([], got.grads), Captured([], want.grads)) == 0.0
    assert [g is None for g in got.grads.values()] == [g is None for g in want.grads.values()]


@pytest.mark.parametrize("reentrant", [False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def layer(q: Tensor, k: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        chosen = v4(q, k, w, *rest)
        return q.sum((2, 3)).unsqueeze(-1) * k.sum(-1)[:, None].expand(-1, q.shape[1], -1).gather(-1, chosen)

    def fn(*x: Tensor) -> Tensor:
        return checkpoint(layer, *x, use_reentrant=reentrant) + checkpoint(layer, *x, use_reentrant=reentrant)

    x = given(4, torch.float32)
    x[0], x[1] = x[0].abs(), x[1].abs()  # no scores of 0, which tie
    x[4] = torch.arange(S).expand(B, S).contiguous() + 2 * T  # every query sees every key
    got, want = run(fn, x), eager(fn, x)
    assert [r.op for r in got.report.routed] == ["index_topk"] * 2, reasons(got)
    torch.testing.assert_close(got.outputs[0].sort(-1).values, want.outputs[0].sort(-1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    def fn(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return v32(*x)

    x = given(5, dtype)
    got = run(fn, x, grad=False)
    routed(got)
    assert got.nodes("index_topk")[0].args[0].meta["example_value"].dtype is torch.bfloat16
    rounded = [t.bfloat16() if t.is_floating_point() else t for t in x]
    exact = MASKS["given"](SCORES["DeepSeek-V3.2"](*rounded[:3]), *x[3:])
    same_choice(got.outputs[0], exact.topk(K, -1).indices, exact, 2e-2)


def test_verification_finds_wrong_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhc_inductor.routing.operators.index.emit import _Emission

    def negated(self: Any, groups: Any, sign: float, dtype: Any) -> Any:
        return self.emit("neg", self._placed(self.one.weights[0], groups, dtype))

    changes: dict[str, Callable[..., Any]] = {
        "_filled": lambda self, chosen, *_: self.emit("to", self.emit("abs", chosen), torch.int64),
        "_mask": lambda self: None,
        "_weights": negated,
        "_last": lambda self, mask: self.emit(
            "sub", self._spread(self.emit("amax", self.emit("to", mask, torch.int64), -1)), 1
        ),
    }
    for name, changed in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(_Emission, name, changed)
            got = run(v32, given(6, t=12, s=11), grad=False)
        assert not got.report.routed and "verified on random data" in reasons(got), name


def test_rows_without_keys_nan_and_infinity() -> None:
    for mask in ("given", "causal and padding"):
        fn, masked = spelled("DeepSeek-V3.2", mask, "method")
        x = given(8, torch.float32)
        x[0][0, 2, 0, 0] = float("nan")  # a query: all its scores are NaN
        x[1][0, 1, 0] = float("nan")  # a key that some queries see
        x[2][1, 3, 1] = float("inf")
        x[3][1, 1] = False
        got, scores = run(fn, x, grad=False), masked(*x)
        routed(got)
        mine = got.outputs[0]
        assert bool((mine.sort(-1).values.diff(dim=-1) > 0).all()) and int(mine.min()) >= 0 and int(mine.max()) < T
        a, b = (torch.sort(scores.gather(-1, i).nan_to_num(1e9), -1).values for i in (mine, scores.topk(K, -1).indices))
        torch.testing.assert_close(a, b)


def test_float_masks_of_unknown_values_stay_with_the_choice() -> None:
    def added(q: Tensor, k: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return (SCORES["DeepSeek-V3.2"](q, k, w) + mask).topk(K, -1).indices.sort(-1).values

    q, k, w, seen = given()[:4]
    got = run(added, [q, k, w, torch.where(seen, 0.0, float("-inf"))], grad=False)
    assert got.ops == {"index_scores": 1} and "cannot see" in reasons(got) and "bool mask" in reasons(got)


def test_two_indexers_share_a_mask_and_two_results_one_choice() -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        first = SCORES["DeepSeek-V3.2"](q, k, w).masked_fill(~seen, float("-inf")).topk(K, -1)
        second = SCORES["Hy4"](q * 0.5, k, w + 1).masked_fill(~seen, float("-inf")).topk(K, -1)
        return tuple(i.sort(-1).values for i in (first.indices, first[1].int(), second.indices))

    got = run(fn, given()[:4], grad=False)
    routed(got, 2)
    assert torch.equal(got.outputs[0], got.outputs[1].long())


def test_too_many_keys_are_chosen_by_topk() -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return SCORES["DeepSeek-V4"](q, k, w).topk(4097, -1).indices

    got = run(fn, given(s=1, t=4100)[:3], grad=False)
    assert got.ops == {"index_scores": 1} and "up to 4096" in reasons(got)


def test_explain_names_the_line_and_decoding_is_routed() -> None:
    import mhc_inductor

    report = mhc_inductor.explain(v32, *given(s=1), verify=True)
    assert [r.op for r in report.routed] == ["index_topk"]
    assert "topk(K, -1)" in report.routed[0].source and "index_topk" in str(report)


@pytest.mark.parametrize("fill", [-math.inf, -3e38, -65504.0])
def test_a_hidden_key_in_place_of_a_visible_one_is_a_difference(fill: float) -> None:
    formula = SimpleNamespace(met=[SimpleNamespace(dtype=torch.float16)])
    check = Check(cast(Any, SimpleNamespace(formula=formula, visible=SimpleNamespace(masks=[], limits=[], fill=fill))))
    scores = torch.tensor([[0.5, 3.0, fill, fill, 1.0, math.nan]])

    def same(*picked: int) -> bool:
        return check.compare([torch.tensor([[1, 4]])], [torch.tensor([picked])], scores) == 0.0

    assert same(4, 1) and not any(same(1, other) for other in (0, 2, 3, 5))
    assert check.compare([torch.tensor([[1, 2]])], [torch.tensor([[1, 3]])], scores) == 0.0
    assert check.compare([torch.tensor([[2]])], [torch.tensor([[5]])], scores) == math.inf
