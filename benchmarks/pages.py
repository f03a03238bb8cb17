# SPDX-License-Identifier: Apache-2.0
"""Results in the pages: ``python -m benchmarks readme`` writes each block between its markers, and the pictures.

A block begins with ``<!-- results: NAME -->`` and ends with ``<!-- end of results -->``.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import index_cases, lists, lists_cases
from .e79_cases import AUTHORS
from .imports import diagram
from .mhc_cases import COMPILE, EAGER
from .report import is_ours, markdown, sources_of
from .selection_cases import DENSE, FLA
from .source_hash import ROOT

RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

Row = dict[str, Any]
Results = Callable[[str], dict[str, Any]]


def pages(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Returns the README and every page of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def read(name: str, folder: pathlib.Path = RESULTS) -> dict[str, Any]:
    """Returns a results file as it was written."""
    return json.loads((folder / f"{name}.json").read_text())


def filled(page: str, results: Results = read) -> str:
    """Returns a page with each of its blocks made from the results. Raises KeyError for a block of another name."""
    return BLOCK.sub(lambda m: f"{m.group(1)}{BLOCKS[m.group('name')](results)}\n{m.group(3)}", page)


# ---- numbers


def _row(rows: Sequence[Row], **where: Any) -> Row:
    """Returns the one row with these values. Raises LookupError where there is none, or more than one."""
    found = [r for r in rows if all(r.get(k) == v for k, v in where.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {where}; expected one")
    return found[0]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _by_variant(rows: Sequence[Row], case: str, what: str) -> dict[str, float]:
    """Returns the times in ms of one case of selection attention by implementation, without its version."""
    of = [r for r in rows if (r["case"], r["select"], r["what"]) == (case, "corr", what) and "median_ms" in r]
    return {r["variant"].partition(" 0.")[0]: r["median_ms"] for r in of}


def _measured(result: dict[str, Any]) -> str:
    """Returns the device, the versions, and the commit, or the hash of the sources where the tree differed from it."""
    v = result["versions"]
    unknown = result["dirty"] or result["commit"] is None
    of = f"sources {sources_of(result)}" if unknown else f"commit {result['commit'][:7]}"
    return f"{result['device']['name']}, torch {v['torch'].partition('+')[0]}, Triton {v['triton']}, {of}"


def _block(headings: list[str], lines: list[list[str]], where: str, result: Row, more: str = "") -> str:
    """Returns a table, and below it what it is of and the run that measured it."""
    return f"{markdown(headings, lines)}\n\n{where}. {_measured(result)}.{more}"


# ---- blocks


APART = "ops, one after the other"


def _mhc(results: Results) -> str:
    result = results("mhc")
    lines = []
    for what, name, dim in (
        ("pre", "`mhc_pre`", 4096),
        ("post", "`mhc_post`", 4096),
        ("fb", "both, with gradients", 4096),
        ("fb", "both, with gradients", 7168),
    ):
        of = {r["variant"]: r for r in result["rows"] if (r["what"], r["dim"]) == (what, dim)}
        peers = of["ops"]["measured_separately_us"]
        compiled = _short(of[COMPILE]["median_us"]) if COMPILE in of else f"{_short(peers[COMPILE])}\\*"
        other = min((n for n in peers if n not in (COMPILE, EAGER)), key=peers.__getitem__)
        times = [_short(of["ops"]["median_us"]), _short(of["ops"]["floor_us"]), compiled]
        lines.append([name, str(dim), *times, f"{other} {_short(peers[other])}\\*"])
    one, parts = (_row(result["rows"], what="single_pass", dim=4096, variant=v) for v in ("ops", APART))
    times = [_short(one["median_us"]), _short(one["floor_us"]), "", f"its parts {_short(parts['median_us'])}"]
    lines.append(["V4.1: post, collapse, coefficients", "4096", *times])
    # One boundary between two sublayers in decoding, in a chain of launches.
    few = [_row(result["decode"], what="post_pre", tokens=t, variant="ops, chain of 20") for t in (1, 64)]
    times = [" / ".join(_short(r[k]) for r in few) for k in ("median_us", "floor_us")]
    lines.append(["decoding, 1 / 64 tokens: post, next pre", "4096", *times, "", ""])
    headings = ["mHC, µs", "D", "this package", "floor", "torch.compile", "fastest other"]
    where = "8192 tokens, n = 4, bf16 streams, fp32 weights"
    return _block(headings, lines, where, result, "\nFloor: every byte moved once at 4.3 TB/s.")


def _e79(results: Results) -> str:
    result = results("e79")
    lines = []
    for n in (32, 64, 96, 128):
        rows = [_row(result["rows"], what=what, n=n, variant="ops") for what in ("fwd", "fb")]
        others = [f"{_short(r['measured_separately_us'][AUTHORS])}\\*" for r in rows]
        lines.append([str(n), *(_short(r["median_us"]) for r in rows), *others])
    headings = ["E79, µs a step: n", "forward", "with gradients", "authors' CUDA", "with gradients (wrong)"]
    first = result["rows"][0]
    return _block(headings, lines, f"{first['B']} sequences of {first['T']} steps, fp32", result)


_SELECTION = {
    "c1": "16384 tokens, 4 x 16 heads",
    "c2": "16384 tokens, 8 x 4 heads",
    "c3": "32768 tokens, 4 x 16 heads",
    "2K": "2048 tokens, 4 x 16 heads",
    "decode": "decoding: 16 queries, 65536 keys",
}


def _selection(
    results: Results, cases: Sequence[str] = tuple(_SELECTION), more: Sequence[list[str]] = (), end: str = ""
) -> str:
    result = results("selection")
    lines = []
    for case in cases:
        times = [_by_variant(result["rows"], case, what) for what in ("fwd", "fb")]
        cells = (" / ".join(_short(t[v]) for t in times if v in t) for v in ("ops", DENSE, FLA))
        lines.append([_SELECTION[case], *cells])
    headings = ["selection attention, ms: forward / with gradients", "this package", "dense, cuDNN", FLA]
    return _block(headings, [*lines, *more], "bf16, D = 128, 16 blocks of 64 keys a query", result, end)


def _selection_of_the_readme(results: Results) -> str:
    """Returns selection attention without two of its sizes, a list of keys, and the loss of an indexer."""
    of_lists, of_index = results("lists"), results("index")
    name = index_cases.SHAPES[0].name
    loss = _short(_row(of_index["rows"], name=name, what=index_cases.LOSS, variant="ops")["median_ms"])
    listed = _cell(of_lists["rows"], case="B", variant="ops")
    more = [
        ["lists: 4096 queries, 2048 of 16384 keys, 128 heads", listed, "", ""],
        [f"loss of an indexer, 8192 tokens, {name}, 2048 keys a query", loss, "", ""],
    ]
    made_of = ", ".join(dict.fromkeys(map(sources_of, (of_lists, of_index))))
    end = f"\nLists (576 wide), loss: sources {made_of}."
    return _selection(results, ("c1", "2K", "decode"), more, end)


def _cell(rows: Sequence[Row], **where: Any) -> str:
    """Returns the times in ms of "fwd" and "fb" of the rows with these values, or why there is none, in two words."""
    of = [r for what in ("fwd", "fb") for r in rows if r["what"] == what and all(r[k] == v for k, v in where.items())]
    said = [_short(r["median_ms"]) if "median_ms" in r else r.get("reason", "failed").partition(":")[0] for r in of]
    if not any("median_ms" in r for r in of):
        return " / ".join(dict.fromkeys(said)) or "not measured"
    return " / ".join(said)


def _lists(result: Row) -> str:
    rows = result.get("peers") or result["rows"]
    variants = ("ops", lists_cases.RANGES, lists_cases.GATHER, lists_cases.DENSE_MASKED)
    lines = []
    for name, meaning in lists_cases.MEANINGS.items():
        first = next((r for r in result["rows"] if (r["case"], r["variant"]) == (name, "ops")), None)
        if first is None:
            continue
        queries = f"{first['B']} x {first['S']}" if first["B"] > 1 else str(first["S"])
        shape = f"{queries} queries, {first['n']} of {first['S_kv']} keys, {first['h']} heads, {first['Dk']} / {first['Dv']}"
        lines.append([meaning, shape, *(_cell(rows, case=name, variant=v) for v in variants)])
    headings = ["lists of keys, ms: forward / with gradients", "", "this package"]
    headings += ["ranges of one key", "torch.compile, gathered keys", "dense SDPA, mask"]
    picture = "![Lists of keys and dense attention by the length of the lists](../../benchmarks/results/lists.png)"
    figures = "[All figures](../../benchmarks/results/lists.md)."
    where = f"bf16, random causal keys, all of one run. {_measured(lists.part_of(result, 'peers'))}."
    dense = f"Lists and dense attention of one run. {_measured(lists.part_of(result, 'crossing'))}."
    return "\n\n".join([markdown(headings, lines), where, _lists_crossing(result), dense, picture, figures])


def _lists_crossing(result: Row) -> str:
    lines = []
    for case, what, tokens in lists.places(result):
        points, dense = lists.curve(result, case, what, tokens)
        passes = {"fwd": "forward", "fb": "with gradients"}[what]
        if dense is None:
            of = [r for r in result["crossing"] if (r["case"], r["what"], r["S"]) == (case, what, tokens)]
            why = {_cell([r], variant=r["variant"]) for r in of if "median_us" not in r and not is_ours(r)}
            lines.append([case, passes, str(tokens), ", ".join(sorted(why)), ""])
        else:
            lines.append([case, passes, str(tokens), _short(dense["median_ms"]), lists.up_to(points, dense)])
    return markdown(["next to dense causal attention", "", "tokens", "dense, ms", "lists are faster up to"], lines)


def _index(result: Row) -> str:
    lines = []
    for shape in index_cases.SHAPES:
        for what in (index_cases.SCORES, index_cases.BOTH, index_cases.LOSS):
            of = {
                r["variant"]: r
                for r in result["rows"]
                if (r["name"], r["what"]) == (shape.name, what) and "median_ms" in r
            }
            times = [_short(of[v]["median_ms"]) if v in of else "" for v in ("ops", index_cases.COMPILE)]
            lines += [[shape.name, what, *times]] if times[0] else []
    long = [r for r in result["memory"] if r["tokens"] == index_cases.LONG.tokens]
    memory = "".join(f"At S = T = {r['tokens']} a choice takes {_short(r['peak_above_mb'])} MB. " for r in long)
    shape = index_cases.SHAPES[0]
    where = f"S = T = {shape.tokens}, causal, bf16, D = {shape.dim}, topk {shape.topk}. {memory}\n{_measured(result)}."
    table = markdown(["index scores, ms", "", "this package", "torch.compile of the formula"], lines)
    return "\n\n".join([table, where, "[All figures](../../benchmarks/results/index.md)."])


def _deepseek(results: Results) -> str:
    result = results("deepseek_v4")
    lines = []
    for part, name in (
        ("forward", "forward"),
        ("training", "training step"),
        ("checkpointed", "the same, checkpointed"),
    ):
        rows = [_row(result["rows"], part=part, variant=v) for v in (COMPILE, "mhc_inductor")]
        cells = [_short(r["median_ms"]) for r in rows] + [_short(r["compile_s"]) for r in rows]
        lines.append([name, *cells, " / ".join(f"{r['peak_gib']:.1f}" for r in rows)])
    headings = ["DeepSeek-V4 of transformers", "torch.compile, ms", "with this package, ms"]
    where = "4 layers, D = 2048, 4096 tokens, 155 M parameters, bf16"
    return _block([*headings, "compile, s", "with, s", "peak, GiB"], lines, where, result)


_SPARSE = {
    "deepseek_v4": "DeepSeek-V4, small, 4 layers",
    "deepseek_v32": "DeepSeek-V3.2, small, 2 layers",
    "deepseek_v4_published": "DeepSeek-V4-Flash's widths, 4 layers",
    "deepseek_v32_published": "DeepSeek-V3.2's widths, 1 layer",
}


_GRAPHS = "mhc_inductor+graphs"


def _models(results: Results, cases: tuple[str, ...] = ()) -> str:
    """Returns the table of whole models with sparse attention: those of ``cases``, or all that were measured."""
    runs = [results(name) for name in ("sparse_models", "sparse_models-published")]
    lines = []
    for result, case in ((run, case) for run in runs for case in run["settings"]["cases"]):
        name = f"{case['model']}-{case['batch']}x{case['seq']}-{case['part']}"
        rows = {r["variant"]: r for r in result["rows"] if r["case"] == name and "median_ms" in r}
        if "mhc_inductor" not in rows or (cases and name not in cases):
            continue
        found = [rows.get(v, {}) for v in (COMPILE, "mhc_inductor", _GRAPHS)]
        times = [_short(r["median_ms"]) if r else "" for r in found]
        memory, compiles = ([f"{r[k]:.1f}" if r else "" for r in found[:2]] for k in ("peak_gib", "compile_s"))
        size = f"{case['batch']} x {case['seq']}"
        lines.append([_SPARSE[case["model"]], size, case["part"], *times, " / ".join(memory), " / ".join(compiles)])
    headings = ["of transformers, unmodified", "tokens", "", "torch.compile, ms", "with this package, ms"]
    table = markdown([*headings, "in CUDA graphs, ms", "peak, GiB", "compile, s"], lines)
    small, wide = map(_measured, runs)
    where = f"{small}; published widths: {wide.rpartition(', ')[2]}"
    return f"{table}\n\nbf16; peak, compile: torch.compile / ours. {where}."


_OF_THE_README = (
    "deepseek_v4-2x2048-training",
    "deepseek_v4_published-1x8192-forward",
    "deepseek_v32-1x16384-training",
)


def _single_pass(results: Results) -> str:
    """Returns the table of single-pass mHC: the fused op and its parts, with bars."""
    result = results("mhc")
    lines = []
    for what, name in (("single_pass", "forward"), ("single_pass_fb", "with all gradients")):
        fused, parts = (_row(result["rows"], what=what, dim=4096, variant=v) for v in ("ops", APART))
        figures = (fused["median_us"], parts["median_us"], fused["floor_us"], fused["bar_us"])
        lines.append([name, *map(_short, figures)])
    where = "8192 tokens, n = 4, D = 4096, bf16 streams, fp32 weights"
    return _block(["single pass, µs", "one op", "its parts", "floor", "bar"], lines, where, result)


def _rule(results: Results) -> str:
    """Returns the table of one layer of latent attention computed both ways, by tokens."""
    result = results("rule")
    rows = {(r["tokens"], r["variant"], r["what"]): _short(r["median_ms"]) for r in result["rows"] if "tokens" in r}
    lines = [
        [str(tokens), *(" / ".join(rows[tokens, v, what] for what in ("fwd", "fb")) for v in ("dense", "ops"))]
        for tokens in sorted({t for t, *_ in rows})
    ]
    headings = ["tokens", "dense, ms: forward / with gradients", "lists, ms"]
    where = "One layer of DeepSeek-V3.2 from its latent, 32 heads, 2048 keys a query, bf16"
    return _block(headings, lines, where, result)


def _speed(results: Results) -> str:
    """Returns the sentence of the README's first screen: how much faster, of which model and where."""
    of = {name: "deepseek_v4_published-1x8192-forward" for name in ("mhc_inductor", "torch.compile")}
    rows = results("sparse_models-published")["rows"]
    alone = {name: _row(rows, case=case, variant=name)["median_ms"] for name, case in of.items()}
    runs = {run["name"]: run for run in results("fsdp_v4")["runs"]}
    ours, theirs = runs["mhc_inductor"], runs["torch.compile"]
    return (
        f"Four layers of DeepSeek-V4 at published widths run forward over 8192 tokens in {_short(alone['mhc_inductor'])} ms on "
        f"one H200, where\ntorch.compile takes {_short(alone['torch.compile'])}. A small one trains "
        f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.1f} times as fast as with torch.compile on two of them, "
        f"under FSDP2, in {ours['peak_bytes'] / theirs['peak_bytes']:.0%} of the memory."
    )


def _fsdp(results: Results) -> str:
    """Returns the table of DeepSeek-V4 trained under FSDP2 in three ways."""
    runs = results("fsdp_v4")["runs"]
    rows = {
        "tokens a second": [f"{r['tokens_per_second']:,.0f}" for r in runs],
        "peak memory of a rank, GiB": [f"{r['peak_bytes'] / 2**30:.2f}" for r in runs],
        "first step, which compiles, s": [f"{r['first_step_seconds']:.1f}" for r in runs],
        "loss of the first step, nats a byte": [f"{r['losses'][0]:.4f}" for r in runs],
    }
    return markdown(["", *(r["name"] for r in runs)], [[name, *cells] for name, cells in rows.items()])


def _readme(results: Results) -> str:
    picture = (
        "![Time on one H200 of this package, torch.compile and other implementations](benchmarks/results/overview.png)"
    )
    parts = [_models(results, _OF_THE_README), _selection_of_the_readme(results)]
    more = "Tables of [mHC](docs/operators/mhc.md), [E79](docs/operators/e79.md) and [attention](docs/operators/selection.md)."
    return "\n\n".join([picture, *parts, more])


def _counts(results: Results) -> str:
    spellings, programs, fuzz = results("routing_spellings"), results("adversarial"), results("routing_fuzz")
    kinds = ("mhc", "mhc mutants", "e79", "selection")
    lines = [
        [f"spellings: {kind}", str(spellings[kind]["checked"]), str(len(spellings[kind]["problems"]))] for kind in kinds
    ]
    lines += [["random programs, against eager", str(programs["programs"]), str(len(programs["differences"]))]]
    earlier = "" if fuzz["routing_sha256"] == programs["routing_sha256"] else ", of an earlier routing"
    lines += [[f"random models and formulas{earlier}", str(fuzz["compiled"]), str(len(fuzz["problems"]))]]
    return markdown(["checked", "number", "wrong"], lines)


def _versions(results: Results) -> str:
    """Returns what ran with each torch: tests on a CPU, cases compiled for absent GPUs, kernels on a GPU, what is off."""
    from mhc_inductor.versions import minor, written

    compiled = results("offline")
    ran = {run["versions"]["triton"]: run for run in results("tritons")["runs"]}
    lines = []
    for row in results("versions")["rows"]:
        of, gpu = compiled[written(minor(row["triton"]))], ran.get(row["triton"])
        cases, others = sum(of["passed"].values()), len(of["others"])
        device = f"{gpu['device']}, torch {gpu['versions']['torch'].partition('+')[0]}" if gpu else ""
        tests = f"{sum(row['passed'].values())} / {len(row['failed'])}"
        off = ", ".join(row["kernels_off"]) or "none"
        lines.append([row["torch"], row["triton"], off, tests, f"{cases} / {others}", device])
    headings = ["torch", "Triton", "kernels that are off", "tests on a CPU: passed / failed"]
    headings += ["kernels compiled for six GPUs: cases / failed", "timed on a GPU"]
    parts = ", ".join(results("versions")["rows"][0]["passed"])
    return f"{markdown(headings, lines)}\n\nTests of: {parts}."


def _families(results: Results) -> str:
    """Returns what is routed of each family of transformers, from the table that the tests of whole models assert."""
    from tests.formulas import sparse_families

    lines = []
    for name, family in sparse_families.FAMILIES.items():
        for attention in family.implementations:
            (most, _), *others = sparse_families.by_result(name, attention).items()
            apart = [f"{i} + {a} in {', '.join(m.replace(',', '') for m in modes)}" for (i, a), modes in others]
            cells = [f"{family.indexers} + {family.attentions}", "; ".join(["{} + {}".format(*most), *apart])]
            lines.append([family.model.partition("For")[0], attention, *cells])
    return markdown(["transformers 5.23", "attention", "indexers + sparse attentions", "of these routed"], lines)


def _picture(name: str, results: Results) -> str:
    from . import pictures  # which reads the results as this module does

    return pictures.block(f"operator-{name}", results)


BLOCKS: Mapping[str, Callable[[Results], str]] = {
    "speed": _speed,
    "readme": _readme,
    "mhc": _mhc,
    "e79": _e79,
    "selection": _selection,
    "lists": lambda results: _lists(results("lists")),
    "index": lambda results: _index(results("index")),
    "deepseek_v4": _deepseek,
    "sparse_models": _models,
    "rule": _rule,
    "fsdp_v4": _fsdp,
    "single_pass": _single_pass,
    "counts": _counts,
    "versions": _versions,
    "families": _families,
    "imports": lambda results: f"```mermaid\n{diagram(ROOT)}\n```",
    **{f"picture-{name}": functools.partial(_picture, name) for name in ("mhc", "e79", "selection", "index")},
}


# ---- files


def write(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Writes every page's blocks and every picture. Returns the pages that changed."""
    from . import pictures

    changed = []
    for page in pages(root):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            changed.append(page)
    for name in pictures.PICTURES:
        pictures.draw(pictures.picture(name), pictures.path(name))
    return changed
