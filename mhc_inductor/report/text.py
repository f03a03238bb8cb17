# SPDX-License-Identifier: Apache-2.0
"""The table of a report, as :func:`mhc_inductor.explain` prints it, and all that it says, as text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mhc_inductor.report.findings import AS_WRITTEN, NearMiss, Routed, module_name

if TYPE_CHECKING:
    from mhc_inductor.report import Report

Row = tuple[str, str, str, str]


def whole(report: Report) -> str:
    """Returns all that a report says, over many lines."""
    lines = []
    for kind, found in report.kinds().items():
        if found:
            lines.append(f"{kind}:")
        for one, n in Counter(found).items():
            lines.append(f"  {n} x {one.op}")
            lines += [f"      {name}: {text}" for name, text in (("source", one.source), *one.said()) if text]
    if report.problems:
        lines += ["problems:", *(f"  {n} x {problem}" for problem, n in Counter(report.problems).items())]
    return "\n".join([*lines, report.totals()])


def table(report: Report, width: int = 100) -> str:
    """Returns one line for each finding, at most ``width`` columns wide; equal findings of alike layers share it."""
    kinds = {kind: _alike(found) for kind, found in report.kinds().items()}
    rows = [("near misses", "module", "line"), *(row for lines in kinds.values() for row in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    widths = [min(have, most) for have, most in zip(widths, (22, width // 4, width * 26 // 100), strict=True)]
    shown: list[str] = []
    for kind, lines in kinds.items():
        head = (kind, "module", "line", "why not" if kind == "near misses" else "kernels")
        if lines:
            shown.append("      " + _columns(head, widths, width - 6))
        for row, alike in lines.items():
            shown.append(f"{len(alike):5} " + _columns(_with_error(row, alike), widths, width - 6))
    if report.problems:
        shown.append("      problems")
    shown += [f"{n:5} {_ended(problem, width - 6)}" for problem, n in Counter(report.problems).items()]
    return "\n".join([*(line.rstrip() for line in shown), *textwrap.wrap(report.totals(), width)])


def _alike(found: Iterable[Any]) -> dict[Row, list[Any]]:
    """Returns the findings that share a line of a table, by op, module, line and what is said of them."""
    lines: dict[Row, list[Any]] = {}
    for one in found:
        lines.setdefault(_line(one), []).append(one)
    return lines


def _line(found: Routed | NearMiss) -> Row:
    module = ".".join("*" if part.isdigit() else part for part in module_name(found).split("."))
    place = found.source.partition(", in ")[0]
    if isinstance(found, NearMiss):
        return found.op, module, place, found.reason
    kernels = AS_WRITTEN if found.as_written else found.kernels
    first = re.split(r"[,;:]| formula", kernels[0])[0] if kernels else ""
    return found.op, module, place, first + (f" + {len(kernels) - 1} more" if len(kernels) > 1 else "")


def _with_error(row: Row, alike: list[Any]) -> Row:
    """Returns a line with the largest error of its findings, if they were verified."""
    errors = [one.error for one in alike if getattr(one, "error", None) is not None]
    return (*row[:-1], f"error {max(errors):.0e}, {row[-1]}") if errors else row


def _columns(cells: Row, widths: list[int], width: int) -> str:
    """Returns the cells of a line in columns. Paths lose their beginning, other texts their end."""
    cut = (_ended(cells[0], widths[0]), _begun(cells[1], widths[1]), _begun(cells[2], widths[2]))
    return _ended("  ".join([*(c.ljust(w) for c, w in zip(cut, widths, strict=True)), cells[3]]), width)


def _ended(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _begun(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    cut = text[len(text) - width + 1 :]
    return "…" + cut[max(cut.find("/"), 0) :]
