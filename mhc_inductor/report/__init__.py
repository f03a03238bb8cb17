# SPDX-License-Identifier: Apache-2.0
"""The report of a routing pass, which ``explain``, the log and the tlparse artifact show.

It says what routing found (``findings``), as a table (``text``), as a page (``page``), and what its ops compute and move
(``counts``).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mhc_inductor import compat
from mhc_inductor.log import logger
from mhc_inductor.report import page, text
from mhc_inductor.report.counts import OpCounts
from mhc_inductor.report.findings import AS_WRITTEN, Cost, Modules, NearMiss, Routed, module_name

__all__ = [
    "ARTIFACT",
    "AS_WRITTEN",
    "Cost",
    "Modules",
    "NearMiss",
    "Report",
    "Routed",
    "log_report",
    "module_name",
    "show",
]

ARTIFACT = "mhc_inductor_routing"
"""Name of the artifact in a ``TORCH_TRACE`` log."""


@dataclasses.dataclass(repr=False)
class Report:
    """Everything that routing found in the graphs of one call.

    :meth:`table` has a line for each finding, as :func:`mhc_inductor.explain` prints it; ``str(report)`` says everything;
    :meth:`save` writes a page, and a notebook shows it. At a prompt a report is one line, since ``explain`` has printed
    it. ``graphs`` and ``nodes`` count what was analysed; ``seconds`` is the time that analysis and rewriting took.
    """

    routed: list[Routed] = dataclasses.field(default_factory=list)
    near_misses: list[NearMiss] = dataclasses.field(default_factory=list)
    fused: list[Routed] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    graphs: int = 0
    nodes: int = 0
    seconds: float = 0.0

    def extend(self, other: Report) -> None:
        """Adds the findings of ``other``."""
        for name, found in vars(other).items():  # each is a list or a number
            setattr(self, name, getattr(self, name) + found)

    @property
    def empty(self) -> bool:
        """Returns whether there is nothing to report: no formula, no near miss that counts as a finding, no problem."""
        close = [m for m in self.near_misses if not m.ordinary]
        return not (self.routed or close or self.fused or self.problems)

    def totals(self) -> str:
        """Returns one line with the number of findings of each kind."""
        ops = _counts(r.op for r in self.routed)
        near, graphs = len(self.near_misses), self.graphs
        return (
            f"routed {ops or 'nothing'}; fused {_counts(f.op for f in self.fused) or 'nothing'}; "
            f"{near} near miss{'' if near == 1 else 'es'}, {len(self.problems)} problems; "
            f"{self.nodes} nodes of {graphs} graph{'' if graphs == 1 else 's'} in {self.seconds:.2f} s"
        )

    def kinds(self) -> dict[str, list[Any]]:
        """Returns the findings other than problems, by kind."""
        return {"routed": self.routed, "fused": self.fused, "near misses": self.near_misses}

    def __repr__(self) -> str:
        return f"<Report: {self.totals()}>"

    def __str__(self) -> str:
        return text.whole(self)

    def table(self, width: int = 100) -> str:
        """Returns one line for each finding, at most ``width`` columns wide; equal findings of alike layers share it."""
        return text.table(self, width)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the report as one HTML page, which needs no network: totals, modules, source lines, sizes, times.

        Args:
            path: the file to write, such as "report.html". It is replaced if it exists.

        Returns:
            The path.

        Raises:
            OSError: if the file cannot be written.
        """
        file = pathlib.Path(path)
        file.write_text(page.whole(self), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        return page.part(self)


def _counts(ops: Iterable[str]) -> str:
    return ", ".join(f"{n} {op}" for op, n in Counter(ops).items())


def log_report(report: Report) -> None:
    """Logs the report of one graph on the logger ``mhc_inductor`` and as an artifact of ``TORCH_TRACE``.

    Writes one INFO line per finding and one with the totals. A graph without findings gets one DEBUG line only.
    """
    if report.empty:
        logger.debug("%s", report.totals())
        return
    for kind, found in report.kinds().items():
        for one in found:
            said = "".join(f"; {name}: {text}" for name, text in one.said() if text)
            logger.info("%s", f"{kind.removesuffix('es')} {one.op} at {one.source}{said}")
    for problem in report.problems:
        logger.info("%s", f"problem: {problem}")
    logger.info("%s", report.totals())
    compat.routing.trace_artifact(ARTIFACT, lambda: str(report))


def show(report: Report, details: bool = False) -> None:
    """Prints the table of ``report``, and with ``details`` everything that it says."""
    print(report.table())
    counts = OpCounts.of(report)
    if counts.ops:
        print(f"\nof each forward, with every tensor once:\n{counts}\n")
    if details:
        print(f"\n{report}")
    elif not report.empty:
        print("explain(..., details=True) says more; report.save('report.html') writes a page")
