# SPDX-License-Identifier: Apache-2.0
"""The rule that chooses between the op and dense attention: what it decides, from which figures, and what it says."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mhc_inductor
from benchmarks.source_hash import ROOT
from mhc_inductor.report import NearMiss, Routed
from mhc_inductor.routing.operators.selection import profit
from tests.tools.fakecuda import fake_cuda, without_a_gpu

DENSE = "dense causal SDPA (cuDNN)"
WIDTH, BLOCK, WINDOW = 128, 64, 128
Fn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# --- what it decides --------------------------------------------------------------------------------------------


def _sizes(**changes: Any) -> profit.Sizes:
    return profit.Sizes(
        **{"device": "cuda", "dtype": torch.bfloat16, "heads": 4, "width": 128, "values": 128, **changes}
    )


V32 = {"heads": 1, "width": 192, "selected": 2048, "groups": 32, "fused": True, "latent": profit.Latent(32, 512, 64, 1)}
V4 = {"heads": 64, "width": 512, "values": 512, "selected": 640}
A_LIST_A_HEAD = {"heads": 1, "groups": 16, "selected": 512, "fused": True}
FEWEST: dict[str, tuple[dict[str, Any], bool | None, int]] = {
    "ranges, 1 head": ({"queries": 16384, "heads": 1, "selected": 1024}, None, 16384),
    "ranges, 3 heads": ({"queries": 16384, "heads": 3, "selected": 1024}, None, 9460),
    "ranges, 4 heads": ({"queries": 16384, "selected": 1024}, None, 8192),
    "ranges of any length": ({"queries": 16384, "selected": None}, None, 8192),
    "ranges, 16 heads": ({"queries": 16384, "heads": 16, "selected": 1024}, None, 4096),
    "ranges, 17 queries": ({"queries": 17, "heads": 1, "selected": 1024}, None, 16384),
    "ranges, 16 queries": ({"queries": 16, "heads": 1, "selected": 1024}, None, 2048),
    "DeepSeek-V3.2": (V32, False, 12813),
    "DeepSeek-V3.2, training": (V32, True, 13552),
    "DeepSeek-V4": (V4, False, 293),
    "DeepSeek-V4, training": (V4, True, 437),
    "a list a head": (A_LIST_A_HEAD, False, 30147),
    "a list a head, training": (A_LIST_A_HEAD, True, 44641),
    "decoding by lists": ({"queries": 1, "heads": 16, "groups": 8, "selected": 2048, "fused": True}, False, 7537),
}
"""Sizes, whether gradients are needed (None: ranges), and the fewest keys from which on the op replaces dense attention."""


def _case(name: str, keys: int) -> tuple[str, profit.Sides]:
    """Returns why the op does not replace dense attention over so many keys, and both figures."""
    given, training, _ = FEWEST[name]
    sizes = _sizes(**{"queries": keys, **given}, keys=keys)
    if training is None:
        return profit.refusal(sizes), profit.range_sides(sizes)
    return profit.list_refusal(sizes, training), profit.list_sides(sizes, training)


def test_what_no_kernel_takes_is_refused_whatever_it_costs() -> None:
    def refusal(**changes: Any) -> str:
        return profit.refusal(_sizes(**{"queries": 16384, "keys": 16384, "selected": 1024, **changes}))

    assert not refusal() and refusal(selected=4096).startswith("dense attention is faster: ")
    assert "up to 64" in refusal(heads=65) and "up to 512" in refusal(width=576)
    assert "float64" in refusal(dtype=torch.float64)
    assert not refusal(device="cpu", keys=16, dtype=torch.float64)


@pytest.mark.parametrize("name", FEWEST)
def test_the_fewest_keys_from_which_on_the_op_is_chosen_and_the_words_of_the_decision(name: str) -> None:
    """The side that is named first has the smaller figure, and is the one that is chosen."""
    fewest = FEWEST[name][2]
    assert _case(name, fewest - 1)[0].startswith("dense attention is faster: ")
    assert not _case(name, fewest)[0] and not _case(name, 4 * fewest)[0]
    for times in (0.25, 0.9, 1, 1.1, 4):
        refused, sides = _case(name, int(fewest * times))
        words = sides.words()
        found = re.match(rf"(.+) (?:is|are) faster: ([\d.e+-]+) {sides.unit}, (.+?) ([\d.e+-]+) {sides.unit} \(", words)
        assert found is not None, words
        assert (found[1], found[3]) == ((sides.other, sides.keys) if refused else (sides.keys, sides.other))
        assert float(found[2]) <= float(found[4]) and refused in ("", words)
        shown = [float(found[i]) for i in ((4, 2) if refused else (2, 4))]
        assert shown == pytest.approx([sides.op, sides.dense], rel=5e-3)
        assert words.endswith("estimated from one H200 in bf16)")


# --- from which figures -----------------------------------------------------------------------------------------


def _kept(name: str) -> Any:
    """Returns measurements that are committed."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _times() -> dict[tuple[int, str], dict[int, dict[str, float]]]:
    """Returns the measured times by heads a group and what was run, then by the number of keys and the side."""
    found: dict[tuple[int, str], dict[int, dict[str, float]]] = {}
    for row in _kept("selection")["crossing"]:
        if row["variant"] in ("ops", DENSE):
            assert row["ranges"] * BLOCK == 1024 and row["S"] == row["S_kv"]
            found.setdefault((row["h"], row["what"]), {}).setdefault(row["S_kv"], {})[row["variant"]] = row["median_us"]
    return found


def _crossing(times: dict[int, dict[str, float]]) -> float:
    """Returns the number of keys at which both sides take as long, on a line between measurements in logarithms."""
    gains = [(math.log(keys), math.log(t[DENSE] / t["ops"])) for keys, t in sorted(times.items()) if len(t) == 2]
    ((x, a), (y, b)) = next(pair for pair in itertools.pairwise(gains) if pair[0][1] <= 0 < pair[1][1])
    return math.exp(x - a * (y - x) / (b - a))


def test_the_rule_of_ranges_follows_the_crossings() -> None:
    """Recomputes what a key costs the op: from the forward; gradients make dense attention slower still."""
    times = _times()
    assert {heads for heads, _ in times} == {4, 16}
    for (heads, what), measured in times.items():
        figure = _crossing(measured) / 1024 * math.sqrt(heads)
        if what == "fwd":
            assert figure == pytest.approx(profit.RANGE_KEY, rel=0.08), heads
        else:
            assert figure <= profit.RANGE_KEY, heads


def test_the_rule_of_few_queries_is_a_bound() -> None:
    """Decoding costs the op less for a key than the rule says; what was measured is what the page says."""
    kept = _kept("selection")["rows"]
    rows = {r["variant"]: r for r in kept if (r["case"], r["select"], r["what"]) == ("decode", "corr", "fwd")}
    op, dense = rows["ops"], rows[DENSE]
    assert op["S"] <= profit.FEW_QUERIES and dense["note"] == "K and V repeated beforehand"
    figure = op["median_us"] / (op["ranges"] * BLOCK) / (dense["median_us"] / dense["S_kv"])
    assert figure <= profit.FEW_QUERIES_KEY and f"{figure:.1f} times was measured" in _page()


def test_the_rule_of_ranges_chooses_the_side_that_was_faster() -> None:
    """Compares the choice with each pair that was measured: within 5 % it is the faster side, the dense one causal."""
    kept = _kept("selection")
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in (*kept["rows"], *kept["crossing"]):
        if row["variant"] in ("ops", DENSE) and row["select"] == "corr":
            key = *(row[x] for x in ("S", "S_kv", "h", "D", "ranges")), row["what"]
            pairs.setdefault(key, {})[row["variant"]] = row["median_us"]
    both = {key: times for key, times in pairs.items() if len(times) == 2}
    assert len(both) >= 17 and {key[2] for key in both} == {4, 16}
    for key, times in both.items():
        queries, keys, heads, width, ranges, _ = key
        routed = not profit.refusal(profit.Sizes("cuda", torch.bfloat16, queries, keys, heads, width, 64 * ranges))
        chosen, other = (times[x] for x in (("ops", DENSE) if routed else (DENSE, "ops")))
        assert chosen <= 1.05 * other, key


def test_the_rule_of_lists_follows_the_measurements() -> None:
    """Recomputes what the rule assumes of the list kernels from their results: no more speed than was measured."""
    kept = _kept("lists")
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for row in kept["rows"]:
        if row["variant"] == "ops" and row["case"] != "decode":
            measured.setdefault(row["case"], {})[row["what"]] = row
    assert measured
    for case, rows in measured.items():
        fwd, training = rows["fwd"], rows["fb"]
        operations = 2 * fwd["S"] * fwd["n"] * fwd["h"] * (fwd["Dk"] + fwd["Dv"])
        seconds = operations / (0.9 * profit.LIST_FLOPS)
        assert fwd["median_us"] * 1e-6 <= seconds, case
        wide = fwd["Dk"] + fwd["Dv"] >= profit.WIDE
        slower = profit.WIDE_LIST_TRAINING if wide else profit.LIST_TRAINING
        assert training["median_us"] * 1e-6 <= slower * seconds, case


def test_the_rule_follows_what_dense_attention_takes() -> None:
    """Recomputes the figures of the dense side: a large product, and a softmax that is written out."""
    rows = {(r["variant"], r["what"]): r for r in _kept("rule")["rows"] if "tokens" not in r}
    product = rows["torch", "product"]
    assert 2 * product["size"] ** 3 / (product["median_us"] * 1e-6) >= profit.PRODUCT_FLOPS
    for what, times in (("fwd", 1.0), ("fb", profit.WRITTEN_TRAINING)):
        whole, alone = rows["softmax written out", what], rows["products alone", what]
        scores = whole["batch"] * whole["heads"] * whole["queries"] * whole["keys"]
        seconds = (whole["median_us"] - alone["median_us"]) * 1e-6 / scores
        assert seconds == pytest.approx(profit.WRITTEN * times, rel=0.05), what


@pytest.mark.parametrize("what", ["fwd", "fb"])
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_the_rule_chooses_the_side_that_was_faster(length: int, what: str) -> None:
    """Compares the rule's estimates and its choice with a layer of DeepSeek-V3.2 that was measured both ways."""
    kept = (r for r in _kept("rule")["rows"] if (r.get("tokens"), r["what"]) == (length, what))
    rows = {r["variant"]: r["median_us"] * 1e-6 for r in kept}
    sizes, training = _sizes(**V32, queries=length, keys=length), what == "fb"
    assert profit.dense_seconds(sizes, training) == pytest.approx(rows["dense"], rel=0.08)
    assert rows["ops"] < profit.list_seconds(sizes, training) * 1.05 < rows["ops"] * 1.6
    assert (not profit.list_refusal(sizes, training)) is (rows["ops"] < rows["dense"])


# --- what explain says ------------------------------------------------------------------------------------------


def blocks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Each query attends to 16 blocks of 64 keys."""
    at = x[..., : k.shape[2] // BLOCK].topk(16, -1).indices
    none = torch.zeros(*x.shape[:-1], k.shape[2] // BLOCK, dtype=torch.bool, device=q.device)
    mask = none.scatter(-1, at, True).repeat_interleave(BLOCK, -1)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def spans(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Each query attends to two ranges of any length."""
    start, end = x[..., :2].long(), x[..., 2:4].long()
    t = torch.arange(k.shape[2], device=q.device)
    mask = ((t >= start[..., None]) & (t < end[..., None])).any(-2)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def picks(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Each query attends to 512 keys."""
    mask = torch.zeros(x.shape, dtype=torch.bool, device=q.device).scatter(-1, x.topk(512, -1).indices, True)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def gathered(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Each query attends to 512 keys that are gathered for it."""
    at, batch = x.topk(512, -1).indices[:, 0], torch.arange(q.shape[0], device=q.device)[:, None, None]
    keys, values = k[:, 0][batch, at], v[:, 0][batch, at]
    return torch.einsum("bhsk,bskd->bhsd", torch.einsum("bhsd,bskd->bhsk", q, keys).softmax(-1), values)


def window(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """A sliding window that leaves out padding."""
    t, kept = torch.arange(q.shape[2], device=q.device), x[:, :, :1] > 0
    mask = ((t <= t[:, None]) & (t > t[:, None] - WINDOW))[None, None] & kept
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _found(
    fn: Fn, keys: int, heads: int, groups: int, training: bool = False, device: str = "cuda"
) -> Routed | NearMiss:
    """Returns the one finding of attention that ``explain`` reports for ``fn`` at these sizes."""
    with fake_cuda() if device == "cuda" else contextlib.nullcontext(), FakeTensorMode():
        q = torch.empty(1, heads, keys, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=training)
        k, v = (torch.empty(1, groups, keys, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
        report = mhc_inductor.explain(fn, q, k, v, torch.empty(1, 1, keys, keys, device=device), details=True)
    assert not report.problems
    found: list[Routed | NearMiss] = [*report.routed, *report.near_misses]
    assert len(found) == 1
    return found[0]


LISTS = "estimated from one H200 in bf16)"
RANGES = f"a unit is a key in dense attention, {LISTS}"


def _said(routed: bool, op: str, dense: str, keys: str, unit: str = "ms", other: str = "dense attention") -> str:
    """Returns the words for both sides' figures, those of the side that is chosen first."""
    ours = "ranges of keys" if unit == "units" else "lists of keys"
    sides = [(f"{ours} are", ours, op), (f"{other} is", other, dense)]
    (first, _, less), (_, second, more) = sides if routed else sides[::-1]
    return f"{first} faster: {less} {unit}, {second} {more} {unit} ({keys}; {RANGES if unit == 'units' else LISTS}"


def _ranges(keys: int, op: int, units: int, heads: int, assumed: str = "") -> tuple[Any, ...]:
    said = f"{assumed}1024 of {keys} keys a query, {units} units each with {heads} heads a group"
    return str(op), str(keys), said, "units"


SAID: list[tuple[Fn, tuple[Any, ...], bool, str]] = [
    (fn, sizes, routed, _said(routed, *given))
    for fn, sizes, routed, given in (
        (blocks, (16384, 16, 1), True, _ranges(16384, 4096, 4, 16)),
        (blocks, (2048, 16, 1, True), False, _ranges(2048, 4096, 4, 16)),
        (spans, (16384, 16, 1), True, _ranges(16384, 4096, 4, 16, "an assumed ")),
        (spans, (4096, 8, 2), False, _ranges(4096, 8192, 8, 4, "an assumed ")),
        (picks, (2048, 64, 1), True, ("0.0916", "0.398", "512 of 2048 keys a query, 64 heads a group")),
        (
            picks,
            (2048, 8, 1, True),
            False,
            ("0.706", "0.259", "512 of 2048 keys a query, 8 heads a group, with gradients"),
        ),
        *(
            (gathered, (2048, heads, 1, True), routed, ("0.706", time, said, "ms", "gathering the keys"))
            for heads, routed, time in ((64, True, "1.02"), (8, False, "0.568"))
            for said in [f"512 of 2048 keys a query, {heads} heads a group, with gradients"]
        ),
        (window, (4096, 16, 1), True, ("0.0458", "0.398", "128 of 4096 keys a query, 16 heads a group")),
        (window, (4096, 16, 16), False, ("0.733", "0.398", "128 of 4096 keys a query, 1 heads a group")),
    )
]


@without_a_gpu
@pytest.mark.parametrize(("fn", "sizes", "routed", "said"), SAID, ids=[f"{c[0].__name__}-{c[2]}" for c in SAID])
def test_explain_says_both_figures(
    fn: Fn, sizes: tuple[Any, ...], routed: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _found(fn, *sizes)
    assert said in " ".join(capsys.readouterr().out.split())
    if routed:
        assert isinstance(found, Routed) and found.detail.endswith("; " + said), found
    else:
        assert isinstance(found, NearMiss) and found.reason == said, found
        assert found.ordinary is (fn is window), "nobody expects a window to be routed"


@pytest.mark.parametrize("fn", [blocks, picks])
def test_on_a_cpu_nothing_is_compared(fn: Fn) -> None:
    found = _found(fn, 2048, 8, 1, device="cpu")
    assert isinstance(found, Routed) and "faster" not in found.detail and found.as_written


def _page() -> str:
    return " ".join((ROOT / "docs" / "operators" / "selection.md").read_text().split())


@pytest.mark.parametrize("said", [c[3] for c in SAID if c[0] in (blocks, picks)])
def test_the_page_shows_what_is_said(said: str) -> None:
    assert f"`{said}`" in _page()
