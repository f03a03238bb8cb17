# SPDX-License-Identifier: Apache-2.0
"""The report of a routing pass, which ``explain``, the log and the tlparse artifact show."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mhc_inductor import compat
from mhc_inductor.log import logger

ARTIFACT = "mhc_inductor_routing"
"""Name of the artifact in a ``TORCH_TRACE`` log."""

AS_WRITTEN = ("kept as written: Inductor's code is faster on this device",)
"""Shown instead of kernels for a formula that a compile kept as the model wrote it."""
_WOULD_KEEP = "a compile keeps the formula as written, which is faster on this device"


_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)(?:\n(?! *File ") *(.+))?', re.M)
"""A frame of a stack trace: file, line, function and code."""


def source_of(node: fx.Node | None) -> str:
    """Returns "file.py:line, in function: code" of the user's line that made ``node``, or "unknown"."""
    trace = node.meta.get("stack_trace") if node is not None else None
    if not trace:
        return "unknown"
    frames: list[tuple[str, ...]] = _FRAME.findall(trace)
    own = [frame for frame in frames if _TORCH not in frame[0]] or frames
    if not own:
        return "unknown"
    file, line, function, code = own[-1]
    return f"{file}:{line}, in {function}" + (f": {code}" if code else "")


Modules = tuple[tuple[str, str], ...]
"""Path and class of each module around a line, outermost first. The path of explain's argument is empty."""

_OWN = re.compile(r"^[LG]\['(?:target|self|args|fn)'\]|__closure__\[\d+\]\.cell_contents|\b_(?:orig_mod|modules)\b")


def modules_of(node: fx.Node | None) -> Modules:
    """Returns the modules in whose ``forward`` the user's line of ``node`` runs."""
    stack = (node.meta.get("nn_module_stack") or {}) if node is not None else {}
    return tuple((_path(path), _class(kind)) for path, kind in stack.values())


def _path(path: str) -> str:
    parts = re.split(r"[.\[\]'\"]+", _OWN.sub("", path))
    return ".".join(part for part in parts if part not in ("", "L", "G"))


def _class(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


@dataclasses.dataclass
class Cost:
    """What an op does in its forward, from the shapes that ``explain`` saw.

    ``tensors`` describes what it reads and returns; ``bytes`` is their size, each counted once; ``flops`` is the op's flop
    formula. ``times`` are the seconds that the compiled formula and the compiled op took if they were measured, with
    gradients where the graph had them; ``note`` says why they were not.
    """

    tensors: tuple[str, ...] = ()
    bytes: int = 0
    flops: int = 0
    times: tuple[float, float] | None = None
    note: str = ""


Said = Iterator[tuple[str, str]]
"""Headings with texts, of which some may be empty."""


@dataclasses.dataclass(frozen=True)
class Routed:
    """A formula that became an op, or neighbouring ops that became one: then ``parts`` are their names.

    ``source`` is "file.py:line, in function: code" in the user's file. ``error`` is the op's largest relative error
    over outputs and gradients, compared with the formula in higher precision, if it was verified. ``note`` says why it
    was not verified, or what it was compared with instead. ``as_written`` says that a compile keeps the formula as the
    model wrote it, since Inductor's code for it is faster on this device: there ``kernels`` run only if the op is called.
    ``modules`` are the modules around the line. ``cost`` is known where ``explain`` made the report.
    """

    op: str
    source: str
    detail: str = ""
    kernels: tuple[str, ...] = ()
    error: float | None = None
    note: str = ""
    as_written: bool = False
    modules: Modules = dataclasses.field(default=(), compare=False)
    cost: Cost | None = dataclasses.field(default=None, compare=False, repr=False)
    parts: tuple[str, ...] = ()

    def runs(self) -> str:
        """Returns what runs in place of the formula, as text."""
        kept = (_WOULD_KEEP,) if self.as_written and self.kernels != AS_WRITTEN else ()
        return "; ".join((", ".join(self.kernels), *kept))

    def said(self) -> Said:
        """Yields what a report says of it."""
        yield "of", " + ".join(self.parts)
        yield "detail", self.detail
        yield "kernels", self.runs()
        error = "" if self.error is None else f"{self.error:.2g}"
        yield "relative error", f"{error} ({self.note})" if error and self.note else error or self.note


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A formula that almost became an op: the op it resembles, the first node that does not fit, and why.

    Near misses that differ only in the node are equal, so that they share a row, which names the first node.
    """

    op: str
    reason: str
    source: str
    node: str = dataclasses.field(default="", compare=False)
    ordinary: bool = False
    """Whether nobody would expect this formula to be routed."""
    modules: Modules = dataclasses.field(default=(), compare=False)

    def said(self) -> Said:
        """Yields what a report says of it."""
        yield "why not", self.reason
        yield "node", self.node


Row = tuple[str, str, str, str]


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
        lines = []
        for kind, found in self.kinds().items():
            if found:
                lines.append(f"{kind}:")
            for one, n in Counter(found).items():
                lines.append(f"  {n} x {one.op}")
                lines += [f"      {name}: {text}" for name, text in (("source", one.source), *one.said()) if text]
        if self.problems:
            lines += ["problems:", *(f"  {n} x {problem}" for problem, n in Counter(self.problems).items())]
        return "\n".join([*lines, self.totals()])

    def table(self, width: int = 100) -> str:
        """Returns one line for each finding, at most ``width`` columns wide; equal findings of alike layers share it."""
        kinds = {kind: _alike(found) for kind, found in self.kinds().items()}
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
        if self.problems:
            shown.append("      problems")
        shown += [f"{n:5} {_ended(problem, width - 6)}" for problem, n in Counter(self.problems).items()]
        return "\n".join([*(line.rstrip() for line in shown), *textwrap.wrap(self.totals(), width)])

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the report as one HTML page, which needs no network: totals, modules, source lines, sizes, times.

        Args:
            path: the file to write, such as "report.html". It is replaced if it exists.

        Returns:
            The path.

        Raises:
            OSError: if the file cannot be written.
        """
        from mhc_inductor import page

        file = pathlib.Path(path)
        file.write_text(page.whole(self), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        from mhc_inductor import page

        return page.part(self)


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


def module_name(found: Routed | NearMiss) -> str:
    """Returns the path of the innermost module around a finding; the class of explain's own argument."""
    path, kind = found.modules[-1] if found.modules else ("", "")
    return path or kind


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
    if details:
        print(f"\n{report}")
    elif not report.empty:
        print("explain(..., details=True) says more; report.save('report.html') writes a page")
