# SPDX-License-Identifier: Apache-2.0
"""The selection-attention benchmark: its inputs and formula, its outputs on a CPU, its tables and plots."""

from __future__ import annotations

import functools
import pathlib
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks import attention, lists_cases, lists_peers, selection, selection_layer, selection_peers
from benchmarks import selection_cases as cases
from benchmarks.accuracy import relative
from benchmarks.selection_cases import Shape
from tests.tools import toy_runs

CPU = torch.device("cpu")
# The shapes are tiny, and one worker makes the run that most tests read.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("benchmarks_selection")]
TINY = Shape("tiny", 48, 2, 3, dim=8, block=8, picks=5)
LATE = Shape("late", 3, 2, 2, keys=40, batch=2, dim=8, block=8, picks=5)
SINGLE = Shape("single", 5, 2, 2, keys=30, dim=8, tokens=9)
run, settings = (functools.partial(f, "selection") for f in (toy_runs.run, toy_runs.settings))


@pytest.fixture
def result() -> dict[str, Any]:
    return toy_runs.whole("selection")


# ---- targets, selections and the formula


def test_the_bar_of_random_selections() -> None:
    rand = cases.target("c1", "fwd", "rand")
    assert rand is not None and rand.bar == pytest.approx(1.35 * 3900) and rand.goal is None
    assert cases.target("2K", "fwd", "corr") is None


@pytest.mark.parametrize("select", cases.SELECTS)
@pytest.mark.parametrize("shape", [TINY, LATE], ids=lambda s: s.name)
def test_blocks_are_distinct_and_causal(shape: Shape, select: str) -> None:
    torch.manual_seed(0)
    blocks = cases.blocks(shape, select, CPU)
    assert blocks.shape == (shape.batch, shape.queries, shape.groups, shape.picks)
    own = cases.positions(shape, CPU) // shape.block
    for b, s, g in ((0, 0, 0), (0, shape.queries - 1, 1), (shape.batch - 1, shape.queries // 2, 0)):
        chosen = [int(i) for i in blocks[b, s, g] if i >= 0]
        assert len(set(chosen)) == len(chosen) == min(int(own[s]) + 1, shape.picks)
        assert {0, int(own[s]), max(0, int(own[s]) - 1)} <= set(chosen)
        assert max(chosen) == int(own[s])


def test_neighbours_share_blocks_as_in_the_survey() -> None:
    """Checks the published counts at c1: unions of 26.6 blocks for 4 neighbours, and of 51 for 16."""
    torch.manual_seed(0)
    shape = Shape("c1", 16384, 1, 1)
    blocks = cases.blocks(shape, "corr", CPU)
    found = selection.union_sizes(types.SimpleNamespace(shape=shape, blocks=blocks))
    assert found["4"] == pytest.approx(26.6, rel=0.02)
    assert found["16"] == pytest.approx(51, rel=0.03)


def test_tokens_are_distinct_and_causal() -> None:
    torch.manual_seed(0)
    at = cases.tokens(SINGLE, CPU)
    assert at.shape == (1, 5, 2, 9) and at.min() >= 0
    assert (at.amax((0, 2, 3)) <= cases.positions(SINGLE, CPU)).all()
    assert (at.sort(-1).values.diff(dim=-1) > 0).all() and not (at.diff(dim=-1) > 0).all()
    with pytest.raises(ValueError, match="fewer than 31"):
        cases.tokens(Shape("few", 5, 2, 2, keys=30, tokens=31), CPU)


def test_single_keys_ascend_and_are_all_keys_where_there_are_fewer() -> None:
    shape = Shape("single", 40, 2, 2, dim=8, tokens=9)
    ranges = cases.single_keys(shape)
    mask, causal = cases.mask_of(ranges, 40)[0], torch.ones(40, 40).tril().bool()[:, None]
    count, reach = mask.sum(-1), torch.arange(1, 41).clamp(max=9)
    assert (ranges[..., 0].diff(dim=-1) >= 0).all() and not (mask & ~causal).any()
    assert torch.equal(count, reach[:, None].expand(-1, 2))


def test_the_mask_is_the_union() -> None:
    ranges = torch.tensor([[[0, 2], [1, 3], [5, 4]], [[-3, 1], [6, 99], [9, 9]]])
    want = [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 1]]
    assert cases.mask_of(ranges, 8).int().tolist() == want


Made = Callable[[], attention.Case]


def _ranges(shape: Shape, sink: bool = False, select: str = "corr") -> Made:
    return functools.partial(cases.make_case, shape, select, CPU, dtype=torch.float32, sink=sink)


SHARED = lists_cases.Shape("shared", 12, 20, 3, 12, 8, 5)
APART = lists_cases.Shape("apart", 20, 20, 2, 8, 8, 7, shared=False, sink=True)
SHAPES_OF_LISTS = (SHARED, APART, lists_cases.C.small(), lists_cases.DECODE.small())
LISTS: dict[str, Made] = {
    s.name: functools.partial(lists_cases.make_case, s, CPU, dtype=torch.float32) for s in SHAPES_OF_LISTS
}
RANGES = {f"{s.name}{', sinks' * sink}": _ranges(s, sink) for s in (TINY, LATE, SINGLE) for sink in (False, True)}
EVERY = {**RANGES, **{f"lists, {name}": made for name, made in LISTS.items()}}
"""Cases of attention over ranges and over lists of keys."""


def _close(got: attention.Named, want: attention.Named, bar: float) -> bool:
    return got.keys() <= want.keys() and all(relative(t, want[k]) < bar for k, t in got.items())


@pytest.mark.parametrize("name", EVERY)
def test_the_op_and_dense_attention_are_the_formula_in_a_sample_and_whole(name: str) -> None:
    torch.manual_seed(0)
    case = EVERY[name]()
    at = attention.sample_of(case.shape.queries, 7, CPU)
    want = attention.exact(case, at)
    got = attention.picked(case.forward() | case.both(case.leaves()), at)
    assert got["o"].shape == want["o"].shape and got.keys() == want.keys() == {"o", "lse", "dq"}
    assert _close(got, want, 1e-6)
    dense = attention.sampled(case, at)
    assert dense.keys() == {"o", "dq"} and _close(dense, want, 1e-6)
    want, got = case.dense(torch.float64), case.both(case.leaves())
    assert got.keys() == want.keys() == {"o", *(f"d{k}" for k in case.inputs)} and _close(got, want, 2e-6)
    dense = case.dense(torch.float32)
    assert dense.keys() == want.keys() and _close(dense, want, 2e-6)


def _whole() -> cases.Case:
    """Returns a case in which each query has all keys before it."""
    case = _ranges(TINY)()
    whole = cases.positions(TINY, CPU)[:, None] + torch.tensor([-(2**20), 1])
    case.ranges = whole[None, :, None, None].expand(1, -1, TINY.groups, 1, 2)
    return case


PEERS: dict[str, tuple[Made, Callable[..., Any]]] = {
    "dense, grouped": (_whole, selection_peers.dense),
    "masked": (_ranges(TINY, select="rand"), selection_peers.masked),
    "gather": (_ranges(SINGLE, select="rand"), selection_peers.gather),
    **{
        f"{peer}, {name}": (made, functools.partial(lists_peers.make, peer))
        for name, made in LISTS.items()
        for peer in (lists_cases.DENSE_MASKED, lists_cases.RANGES, lists_cases.GATHER)
    },
    "attn-gym": (LISTS["C"], functools.partial(lists_peers.make, lists_cases.ATTN_GYM)),
}


@pytest.mark.parametrize("peer", PEERS)
def test_peers_compute_the_same(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_peers, "compiled", toy_runs.uncompiled)
    torch.manual_seed(0)
    made, call = PEERS[peer]
    case = made()
    want = case.both(case.leaves())
    (forward, how), (both, _) = ((made(), how) for made, how in (call(case, what) for what in ("fwd", "fb")))
    assert how == "grouped" or call is not selection_peers.dense
    assert forward.keys() == {"o"} and both.keys() == want.keys()
    for name, t in (*forward.items(), *both.items()):
        t = t if t.shape == want[name].shape else t.transpose(1, 2).reshape(want[name].shape)
        assert relative(t, want[name]) < 1e-5, name


def test_fla_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that fla's function is called on ``[B, T, heads, D]`` and the blocks, without the rest of its layer."""
    seen = {}

    class Stand:
        @staticmethod
        def apply(q: Any, k: Any, v: Any, blocks: Any, *rest: Any) -> torch.Tensor:
            seen.update(q=q.shape, k=k.shape, v=v.shape, blocks=blocks.shape, rest=rest)
            return q * 2

    monkeypatch.setitem(sys.modules, "fla.ops.nsa.parallel", types.SimpleNamespace(ParallelNSAFunction=Stand))
    case = cases.make_case(TINY, "corr", CPU, dtype=torch.float32)
    out = selection_peers.fla_selected(case, "fwd")()
    assert torch.equal(out["o"], 2 * case.q.flatten(2, 3))
    assert seen["q"] == (1, 48, 6, 8) and seen["k"] == seen["v"] == (1, 48, 2, 8) and seen["blocks"] == (1, 48, 2, 5)
    assert seen["rest"] == (5, 8, 8**-0.5, None)
    assert not selection_peers.fla_takes(case)


# ---- a run


def test_what_a_run_holds(result: dict[str, Any]) -> None:
    assert {r["variant"] for r in result["crossing"]} == {"ops", cases.DENSE} and len(result["crossing"]) == 16
    dense = result["cpu_dense"]
    assert {(r["what"], r["dtype"]) for r in dense} == {(w, d) for w in ("fwd", "fb") for d in ("float32", "bfloat16")}
    assert all(("times_dense" in r) is (r["variant"] == "ops") for r in dense)
    assert {(r["dtype"], r["logits_std"]) for r in result["errors"]} == {
        *((d, 1.0) for d in ("bfloat16", "float16", "float32")),
        *((d, 24.0) for d in ("bfloat16", "float16")),
    }
    for rows, count in ((result["errors"], 9 + 8 * 4), (result["cpu_errors"], 2 * 2 * 4)):
        assert len([e for r in rows for k, e in r["errors"].items() if k != "lse"]) == count


def test_a_wrong_result_misses_its_bar(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.Case.both
    monkeypatch.setattr(cases.Case, "both", lambda *a: {k: t * 1.02 for k, t in right(*a).items()})
    wrong = run(tmp_path / "x.json", parts=("errors",))
    assert not any(r["errors"]["dk"]["met"] for r in wrong["errors"] if "dk" in r["errors"])


def test_what_is_compiled_side_by_side() -> None:
    """Checks that the jobs of a GPU's run reach another process."""
    jobs = selection.JOBS | selection.FLA_JOBS
    assert pickle.loads(pickle.dumps(jobs)) == jobs and {"c1", "decode", "fp16", "fla dkv"} <= jobs.keys()
    runner = selection.Run(settings(), lambda _: None, lambda _: None)
    assert runner.jobs().keys() == (jobs if runner.fla else selection.JOBS).keys()


# ---- tables and plots --------------------------------------------------------------------------------------


def test_where_sparse_passes_dense() -> None:
    ours = [(n, float(n)) for n in (2048, 4096, 8192)]
    for scale, want in ((5000, 5000), (1000, 2048), (10**6, None)):
        points = {"ops": ours, cases.DENSE: [(n, n * n / scale) for n, _ in ours]}
        at = selection.crossings(points)
        assert at is None if want is None else at == pytest.approx(want)


# ---- the command line


def test_layers_are_timed_whole_and_in_parts(result: dict[str, Any]) -> None:
    """Times the sparse and the dense layer, forward and with all gradients, and the parts of the sparse forward."""
    rows = result["layers"]
    assert all(r["median_us"] > 0 for r in rows)
    whole = [(r["variant"], r["what"]) for r in rows if not r["what"].startswith("of ")]
    kinds = (selection_layer.SPARSE, selection_layer.DENSE)
    assert whole[:4] == [(k, w) for k in kinds for w in ("forward", "forward + backward")]
    parts = {r["what"].removeprefix("of its forward: ") for r in rows} - {"forward", "forward + backward"}
    assert parts == {"compressing keys", "compressed branch", "choosing blocks", "selected branch", "window"}
    assert "choosing blocks" in selection.table(result)


def test_the_dense_layer_is_causal_attention_on_groups() -> None:
    torch.manual_seed(0)
    size = selection_layer.Layer(7, 12, 4, 2, 6)
    layer = selection_layer.Dense(size)
    x = torch.randn(1, 7, 12)
    q, k, v = (p(x).view(7, -1, 6) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    want = torch.zeros(7, 4, 6)
    for s in range(7):
        for head in range(4):
            p = torch.softmax(k[: s + 1, head // 2] @ q[s, head] / 6**0.5, 0)
            want[s, head] = p @ v[: s + 1, head // 2]
    assert torch.allclose(layer(x)[0], layer.o_proj(want.flatten(1)), atol=1e-5)
