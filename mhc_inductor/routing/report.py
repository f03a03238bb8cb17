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


def source_of(node: fx.Node | None) -> str:
    """Returns "file.py:line, in function: code" of the user's line that made ``node``, or "unknown"."""
    trace = node.meta.get("stack_trace") if node is not None else None
    if not trace:
        return "unknown"
    lines = [line.strip() for line in trace.strip().splitlines()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    for i in reversed([i for i in files if _TORCH not in lines[i]] or files):
        file, _, rest = lines[i].removeprefix('File "').partition('", line ')
        line, _, function = rest.partition(", in ")
        code = f": {lines[i + 1]}" if i + 1 < len(lines) else ""
        return f"{file}:{line}, in {function}{code}"
    return "unknown"


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


@dataclasses.dataclass(frozen=True)
class Routed:
    """A formula that became an op.

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

    def runs(self) -> str:
        """Returns what runs in place of the formula, as text."""
        kept = (_WOULD_KEEP,) if self.as_written and self.kernels != AS_WRITTEN else ()
        return "; ".join((", ".join(self.kernels), *kept))


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A formula that almost became an op: the op it resembles, the first node that does not fit, and why."""

    op: str
    reason: str
    source: str
    node: str = ""
    ordinary: bool = False
    """Whether nobody would expect this formula to be routed."""
    modules: Modules = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Fused:
    """Neighbouring ops that became one op: its name, the names of the ops it replaces, and the source line."""

    op: str
    parts: tuple[str, ...]
    source: str
    kernels: tuple[str, ...] = ()
    error: float | None = None
    note: str = ""
    modules: Modules = dataclasses.field(default=(), compare=False)
    cost: Cost | None = dataclasses.field(default=None, compare=False, repr=False)


_VERIFIED = "relative error"
"""What an error is called."""

Row = tuple[str, ...]
Section = tuple[str, Row, list[Row]]


@dataclasses.dataclass(repr=False)
class Report:
    """Everything that routing found in the graphs of one call.

    :meth:`table` has a line for each finding, as :func:`mhc_inductor.explain` prints it; ``str(report)`` says everything;
    :meth:`save` writes a page, and a notebook shows it. At a prompt a report is one line, since ``explain`` has printed
    it. ``graphs`` and ``nodes`` count what was analysed; ``seconds`` is the time that analysis and rewriting took.
    """

    routed: list[Routed] = dataclasses.field(default_factory=list)
    near_misses: list[NearMiss] = dataclasses.field(default_factory=list)
    fused: list[Fused] = dataclasses.field(default_factory=list)
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

    def sections(self) -> Iterator[Section]:
        """Yields title, headings and rows of each part that has rows. A row begins with its count and op, without headings.

        Equal findings share a row. Near misses that differ only in the node also share one, which names the first node.
        """
        routed: list[Row] = [
            (f"{n} x", r.op, r.source, r.detail, r.runs(), _error(r)) for r, n in _grouped(self.routed)
        ]
        fused: list[Row] = [
            (f"{n} x", f.op, " + ".join(f.parts), f.source, ", ".join(f.kernels), _error(f))
            for f, n in _grouped(self.fused)
        ]
        nodes = {dataclasses.replace(m, node=""): m.node for m in reversed(self.near_misses)}
        misses = _grouped(dataclasses.replace(m, node="") for m in self.near_misses)
        near: list[Row] = [(f"{n} x", m.op, m.reason, nodes[m], m.source) for m, n in misses]
        parts: list[Section] = [
            ("routed", ("source", "detail", "kernels", _VERIFIED), routed),
            ("fused", ("of", "source", "kernels", _VERIFIED), fused),
            ("near misses", ("why not", "node", "source"), near),
            ("problems", (), [(f"{n} x", p) for p, n in _grouped(self.problems)]),
        ]
        return (part for part in parts if part[2])

    def __repr__(self) -> str:
        return f"<Report: {self.totals()}>"

    def __str__(self) -> str:
        lines = []
        for title, headings, rows in self.sections():
            lines.append(f"{title}:")
            for count, first, *rest in rows:
                lines.append(f"  {count} {first}")
                pairs = zip(headings, rest, strict=True)
                lines += [f"      {heading}: {text}" for heading, text in pairs if text]
        return "\n".join([*lines, self.totals()])

    def table(self, width: int = 100) -> str:
        """Returns one line for each finding, at most ``width`` columns wide; equal findings of alike layers share it."""
        kinds: list[tuple[str, str, dict[Row, list[Any]]]] = [
            ("routed", "kernels", _alike(self.routed)),
            ("fused", "kernels", _alike(self.fused)),
            ("near misses", "why not", _alike(self.near_misses)),
            ("problems", "", {(problem,): [None] * n for problem, n in Counter(self.problems).items()}),
        ]
        rows = [("near misses", "module", "line"), *(row for _, last, lines in kinds for row in lines if last)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        widths = [min(have, most) for have, most in zip(widths, (22, width // 4, width * 26 // 100), strict=True)]
        shown: list[str] = []
        for title, last, lines in kinds:
            if lines:
                shown.append(
                    "      " + _columns((title, "module", "line", last) if last else (title,), widths, width - 6)
                )
            shown += [
                f"{len(alike):5} " + _columns(_with_error(row, alike), widths, width - 6)
                for row, alike in lines.items()
            ]
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


def _line(found: Routed | Fused | NearMiss) -> Row:
    module = ".".join("*" if part.isdigit() else part for part in module_name(found).split("."))
    place = found.source.partition(", in ")[0]
    if isinstance(found, NearMiss):
        return found.op, module, place, found.reason
    kernels = AS_WRITTEN if isinstance(found, Routed) and found.as_written else found.kernels
    first = re.split(r"[,;:]| formula", kernels[0])[0] if kernels else ""
    return found.op, module, place, first + (f" + {len(kernels) - 1} more" if len(kernels) > 1 else "")


def _with_error(row: Row, alike: list[Any]) -> Row:
    """Returns a line with the largest error of its findings, if they were verified."""
    errors = [one.error for one in alike if getattr(one, "error", None) is not None]
    return (*row[:-1], f"error {max(errors):.0e}, {row[-1]}") if errors else row


def module_name(found: Routed | Fused | NearMiss) -> str:
    """Returns the path of the innermost module around a finding; the class of explain's own argument."""
    path, kind = found.modules[-1] if found.modules else ("", "")
    return path or kind


def _columns(cells: Row, widths: list[int], width: int) -> str:
    """Returns the cells of a line in columns. Paths lose their beginning, other texts their end."""
    if len(cells) == 1:
        return _ended(cells[0], width)
    cut = (_ended(cells[0], widths[0]), _begun(cells[1], widths[1]), _begun(cells[2], widths[2]))
    return _ended("  ".join([*(c.ljust(w) for c, w in zip(cut, widths, strict=True)), cells[3]]), width)


def _ended(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _begun(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    cut = text[len(text) - width + 1 :]
    return "…" + cut[max(cut.find("/"), 0) :]


def _error(found: Routed | Fused) -> str:
    """Returns the verification result of a finding as text, or an empty string."""
    error = "" if found.error is None else f"{found.error:.2g}"
    return f"{error} ({found.note})" if error and found.note else error or found.note


def _grouped(found: Iterable[Any]) -> list[tuple[Any, int]]:
    return list(Counter(found).items())


def _counts(ops: Iterable[str]) -> str:
    return ", ".join(f"{n} {op}" for op, n in Counter(ops).items())


def _verified(found: Routed | Fused) -> str:
    text = _error(found)
    return f"; {_VERIFIED} {text}" if text else ""


def findings(report: Report) -> Iterator[str]:
    """Yields one line per finding, in the order of the sections."""
    for r in report.routed:
        detail, kernels = f" ({r.detail})" if r.detail else "", f" -> {', '.join(r.kernels)}" if r.kernels else ""
        yield f"routed {r.op} at {r.source}{detail}{kernels}{_verified(r)}"
    for f in report.fused:
        yield f"fused {' + '.join(f.parts)} to {f.op} at {f.source}{_verified(f)}"
    for m in report.near_misses:
        node = f" (node {m.node})" if m.node else ""
        yield f"near miss of {m.op} at {m.source}: {m.reason}{node}"
    for p in report.problems:
        yield f"problem: {p}"


def log_report(report: Report) -> None:
    """Logs the report of one graph on the logger ``mhc_inductor`` and as an artifact of ``TORCH_TRACE``.

    Writes one INFO line per finding and one with the totals. A graph without findings gets one DEBUG line only.
    """
    if report.empty:
        logger.debug("%s", report.totals())
        return
    for line in findings(report):
        logger.info("%s", line)
    logger.info("%s", report.totals())
    compat.routing.trace_artifact(ARTIFACT, lambda: str(report))


def show(report: Report, details: bool = False) -> None:
    """Prints the table of ``report``, and with ``details`` everything that it says."""
    print(report.table())
    if details:
        print(f"\n{report}")
    elif not report.empty:
        print("explain(..., details=True) says more; report.save('report.html') writes a page")
