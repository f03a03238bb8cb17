# SPDX-License-Identifier: Apache-2.0
"""Tables of a run of the index benchmark, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator

from .mhc_report import Result, Section, _number, _title, _yes, document, facts, sections_of
from .selection_report import _time, _timed, _times, determinism_section, verdict


def speed_section(result: Result) -> Section:
    rows = []
    for r in result["rows"]:
        time, quartiles, note = _timed(r)
        rate = f"{r['tflops']:.0f}" if "tflops" in r else ""
        if "beyond_scores_us" in r:
            note = "; ".join(filter(None, (note, f"{_time(r['beyond_scores_us'])} beyond the scores alone")))
        verdicts = [_time(r.get("bar_us")), _time(r.get("goal_us")), verdict(r), _times(r, "times_compiled")]
        sizes = [r["name"], str(r["tokens"]), str(r["dim"]), str(r["topk"])]
        rows.append([*sizes, r["what"], _title(r), time, quartiles, rate, *verdicts, note])
    headings = ["case", "S = T", "D", "topk", "", "implementation", "time", "quartiles", "TFLOP/s", "bar", "goal", ""]
    return (
        "Speed: causal, bf16 q and k, fp32 w (TFLOP/s: of visible pairs)",
        [*headings, "x torch.compile", "note"],
        rows,
    )


def errors_section(result: Result) -> Section:
    rows = []
    for r in result["errors"]:
        for what, e in r["errors"].items():
            figures = [f"{_number(e[k]):.3g}" for k in ("relative", "plain", "bar")]
            wrong = str(r["wrongly_chosen"]) if what == "scores" else ""
            rows.append(
                [r["name"], what, str(r["queries"]), *figures, wrong, _yes(e["met"] and not (wrong and int(wrong)))]
            )
    headings = ["case", "", "queries", "error", "the formula's in fp32", "bar", "keys wrongly chosen", ""]
    return "Scores and losses of sampled queries against fp64, and the keys chosen", headings, rows


def memory_section(result: Result) -> Section:
    rows = []
    for r in result["memory"]:
        figures = [f"{r['peak_above_mb']:.0f}", f"{r['bar_mb']:.0f}", f"{r['goal_mb']:.0f}", verdict(r)]
        rows.append([r["name"], str(r["tokens"]), str(r["heads"]), *figures, f"{r['seconds']:.3g}"])
    headings = ["case", "S = T", "heads", "peak, MB", "bar", "goal", "", "seconds of one call"]
    return "Peak memory of one choice or loss beyond inputs and outputs", headings, rows


_SECTIONS = {
    "rows": speed_section,
    "errors": errors_section,
    "determinism": determinism_section,
    "memory": memory_section,
}


def sections(result: Result) -> Iterator[Section]:
    return sections_of(result, _SECTIONS)


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    return document("Index scores", [*facts(result), f"{result['settings']['timing']}; medians"], sections(result))
