# SPDX-License-Identifier: Apache-2.0
"""Tables and the picture of a run of the sparse models, made from its JSON alone."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .processes import counted, document, figure, met
from .report import Result, facts, markdown
from .sparse_cases import COMPILE, COMPILE_GRAPHS, EAGER, FORWARD, OURS, OURS_GRAPHS, OURS_LAYERS, VARIANTS, Case

_COLORS = {EAGER: "#bdbdbd", COMPILE: "#b2abd2", OURS: "#1b7837", COMPILE_GRAPHS: "#5e3c99", OURS_GRAPHS: "#00441b"}
_COLORS[OURS_LAYERS] = "#a6dba0"
_NAMES = {EAGER: "eager", COMPILE: "torch.compile", OURS: 'backend="mhc_inductor"'}
_NAMES[OURS_LAYERS] = f"{_NAMES[OURS]}, layer by layer"
_NAMES |= {v: f'{_NAMES[of]}, mode="reduce-overhead"' for v, of in ((COMPILE_GRAPHS, COMPILE), (OURS_GRAPHS, OURS))}


def _note(row: Result) -> str:
    """Returns why a row has no figures, and which later run measured it."""
    said = [row["error"].splitlines()[0].replace("|", "/")[:100]] if "error" in row else []
    said += [f"run of {row['of_run']['date'][:10]}, commit {row['of_run']['commit'][:7]}"] if "of_run" in row else []
    return "; ".join(said)


def _rows(result: Result) -> Iterator[list[str]]:
    for case in (Case(**made) for made in result["settings"]["cases"]):
        of = {r["variant"]: r for r in result["rows"] if r["case"] == case.name}
        base = of.get(COMPILE, {}).get("median_ms")
        for variant in reversed([v for v in VARIANTS if v in of]):
            row = of[variant]
            times = f"{base / row['median_ms']:.2f}" if base and "median_ms" in row else ""
            yield [
                *(case.model, f"{case.batch} x {case.seq}", case.part, _NAMES[variant]),
                *(figure(row, "median_ms", ".2f"), times, figure(row, "peak_gib", ".2f")),
                *(figure(row, "compile_s", ".1f"), figure(row, "error_logits", ".2g")),
                *(figure(row, "error_gradients", ".2g"), _note(row)),
            ]


def _parts(result: Result) -> Iterator[str]:
    headings = ["model", "tokens", "", "run by", "ms", "x torch.compile", "peak, GiB", "compile, s"]
    yield markdown([*headings, "error, logits", "error, gradients", "note"], [*_rows(result)])
    if result["verdicts"]:
        rows = [
            [v["case"], v["what"], f"{v['value']:.2f}", met(v, "bar", "g"), met(v, "goal", "g")]
            for v in result["verdicts"]
        ]
        yield markdown(["case", "of this package", "", "bar", "goal"], rows)
    for e in result["errors"]:
        if e["within"] is False:
            yield f"- **error out of bounds**: {e['case']}, {e['what']}: {e['value']:.2g} > {e['bound']:.2g}"
    rows = []
    for r in (r for r in result["rows"] if "routing" in r):
        ops = counted(Counter({**r["routing"]["routed"], **r["routing"]["fused"]}), "nothing")
        reasons = "; ".join(r.get("reasons", [])).replace("|", "/")
        rows.append([r["case"], ops, f"{r['routing']['seconds']:.2f}", reasons])
    if rows:
        yield markdown(["case", "routed", "seconds of routing", "near misses"], rows)


def table(result: Result) -> str:
    """Returns the run as Markdown."""
    lines = [
        *facts(result),
        f"transformers {result['versions']['transformers']}, unmodified, random weights",
        "medians of calls on the host's clock; each job in a process of its own with cold caches",
        "errors: relative, against the same weights run eagerly in fp32",
    ]
    return document("Models with sparse attention, end to end", lines, *_parts(result))


def _points(result: Result, model: str, part: str, variant: str, what: str) -> list[tuple[int, float]]:
    """Returns (tokens, figure) of one line of the picture, by length."""
    cases = (Case(**made) for made in result["settings"]["cases"])
    sizes = {c.name: c.batch * c.seq for c in cases if (c.model, c.part) == (model, part)}
    rows = [r for r in result["rows"] if r["case"] in sizes and r["variant"] == variant and what in r]
    return sorted((sizes[r["case"]], r[what]) for r in rows)


def plot(result: Result, path: pathlib.Path) -> None:
    """Draws time and memory against the number of tokens, a column for each model and part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = list(dict.fromkeys((c["model"], c["part"]) for c in result["settings"]["cases"]))
    memory = any("peak_gib" in r for r in result["rows"])
    figures = [("median_ms", "ms"), *([("peak_gib", "peak, GiB")] if memory else [])]
    size = (3.4 * len(places), 2.9 * len(figures) + 0.6)
    drawn, axes = plt.subplots(len(figures), len(places), figsize=size, squeeze=False, layout="constrained")
    for line, (what, label) in enumerate(figures):
        for column, (model, part) in enumerate(places):
            _draw(axes[line][column], {v: _points(result, model, part, v, what) for v in VARIANTS}, label)
            if line == 0:
                axes[line][column].set_title(f"{model}, {'forward' if part == FORWARD else 'forward + backward'}")
    axes[0][0].legend(frameon=False)
    v = result["versions"]
    drawn.suptitle(f"{result['device']['name']}, torch {v['torch']}, transformers {v['transformers']}", fontsize=9)
    drawn.savefig(path, dpi=140)
    plt.close(drawn)


def _draw(axis: Any, lines: dict[str, list[tuple[int, float]]], label: str) -> None:
    for variant, points in lines.items():
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", color=_COLORS[variant], label=_NAMES[variant])
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
    axis.grid(alpha=0.3)
