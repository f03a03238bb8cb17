# SPDX-License-Identifier: Apache-2.0
"""The benchmark of selection attention over lists of keys: its rows, how one run measures them, its tables and picture.

A peer's call above ``long_us`` is timed once, on the host's clock. The result is written after every case. What the run
has no time for is a row with the reason, and the run is not complete; a later one goes on from its file.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import attention, report, running, timing
from . import lists_cases as cases
from . import lists_peers as peers
from .accuracy import relative
from .attention import Named
from .lists_cases import Case, Shape, make_case
from .report import Result, Row, Table
from .variants import Variant

PARTS = ("speed", "errors", "memory", "crossing", "peers")
QUICK = {"parts": ("speed", "errors"), "rounds": 8}
SAMPLED, CHECKED = 32, 8
LISTS_OF = {
    "speed": ("rows",),
    "errors": ("errors", "determinism"),
    "memory": ("memory",),
    "crossing": ("crossing",),
    "peers": ("peers",),
}
"""The lists of the result that each part fills."""
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NARROW_AND_FULL = {"A": (BF16, F16, F32), "D": (BF16, F16, F32)}
"""Dtypes in which gradients are compared with fp64; bf16 alone elsewhere."""
PLACES = ("crossing", "peers")
"""Parts that a later run goes on with place by place; the others take seconds and are kept or made as a whole."""
WRONG = 0.05
"""A relative error against fp64 above which an output in bf16 is not the formula's."""
TIMES = {
    cases.DENSE_MASKED: "times_masked",
    cases.DENSE_ALL: "times_dense",
    cases.GATHER: "times_gather",
    cases.RANGES: "times_ranges",
    cases.TILELANG: "times_tilelang",
    cases.ATTN_GYM: "times_attn_gym",
}
"""How many times as long each peer takes, by its name, in the op's row."""


@dataclasses.dataclass
class Settings(running.Settings):
    """Settings of one run. ``earlier``: the result of a run to go on from; ``budget_s`` includes compiling."""

    parts: tuple[str, ...] = PARTS
    shapes: tuple[str, ...] = tuple(cases.SHAPES)
    budget_s: float = 480.0
    earlier: Row | None = None


class Run(attention.Run):
    operator = "lists"
    lists = tuple(name for names in LISTS_OF.values() for name in names)
    long_us = 200e3

    def __init__(self, settings: Settings, save: Callable[[Row], None], report: Callable[[str], None]) -> None:
        super().__init__(settings, save, report)
        self.result["skipped"][cases.FLA] = cases.NO_FLA
        self.earlier = settings.earlier or {}
        if self.earlier:
            running.same(self.result, self.earlier, "operator", "kernel_sources_sha256", *MACHINE)
            self.result["resumed"] = [*self.earlier.get("resumed", ()), self.earlier["date"]]

    @property
    def shapes(self) -> list[Shape]:
        return [self.sized(cases.SHAPES[name]) for name in self.s.shapes]

    def jobs(self) -> running.Jobs:
        return jobs(self.s.shapes, self.s.parts)

    def part(self, name: str) -> None:
        if name in PLACES or name not in self.earlier.get("seconds_of", {}) or name in self.earlier["skipped"]:
            super().part(name)
        else:
            self.result |= {of: self.earlier[of] for of in LISTS_OF[name]}

    def place(self, part: str, wanted: list[Row]) -> Iterator[None]:
        """Fills the ``wanted`` rows of one place of a part: as the earlier run has them, measured, or with a reason.

        Yields once if they are to be measured. A place is measured as a whole, because its rows are compared with each
        other.
        """
        rows = self.result[part]
        kept = [r for w in wanted if (r := _found(w, self.earlier.get(part, ()))) is not None]
        if len(kept) == len(wanted):
            rows += kept
            return
        begun = len(rows)
        if not self.spent:
            yield
        rows += [w | {"reason": running.SPENT} for w in wanted if not _found(w, rows[begun:])]
        self.save(self.result)

    def variant(self, case: Case, what: str, name: str) -> Variant:
        if name == "ops":
            return self.ours(case, what)
        return self.peer(case, what, name, functools.partial(peers.make, name))

    def whats(self, shape: Shape) -> tuple[str, ...]:
        return ("fwd",) if shape.decodes else ("fwd", "fb")

    # ---- running

    def time(self, case: Case, found: list[Variant], to: str, pairs: int) -> None:
        """Builds, times and checks variants of one case; appends their rows and writes the result."""
        at = attention.sample_of(case.shape.queries, CHECKED, self.device)
        want = attention.exact(case, at)

        def check(row: Row, got: Named) -> Row:
            added: Row = {"finite": attention.finite(got)}
            if row["variant"] in cases.OTHER_KEYS:
                return added
            errors = {n: relative(t, want[n]) for n, t in attention.picked(got, at).items() if n != "lse"}
            return added | {f"{n}_error": e for n, e in errors.items()}

        name = f"{case.shape.name}, {case.shape.entries} keys"
        figures = functools.partial(self.add_figures, case.shape, pairs)
        self.timed(to, name, found, lambda v: _header(case.shape, v.what, v.variant), figures, check)

    def add_figures(self, shape: Shape, pairs: int, row: Row, t: timing.Timing) -> None:
        """Adds to a row its times and rate."""
        row |= t.in_ms()
        if row["variant"] not in cases.OTHER_KEYS and self.gpu:
            row["tflops"] = round(cases.operations(shape, pairs, row["what"]) / row["median_us"] / 1e6, 1)

    def add_published(self, row: Row) -> None:
        """Adds to a row of the op the bars and the figures of others that it has."""
        key = (row["case"], row["what"])
        if "median_us" in row and self.gpu:
            self.add_bars(row, cases.TARGETS.get(key))
            row |= {"published": cases.PUBLISHED[key]} if key in cases.PUBLISHED and not self.s.small else {}

    # ---- parts

    def speed(self) -> None:
        """Measures the op at the shapes that have bars."""
        for shape in self.shapes:
            case = make_case(shape, self.device)
            found = [self.ours(case, what) for what in self.whats(shape)]
            self.time(case, found, "rows", case.pairs)
        for row in self.result["rows"]:
            self.add_published(row)

    def peers(self) -> None:
        """Measures the other implementations at the same shapes next to the op, and how many times as long they take."""
        for shape in self.shapes:
            for what in self.whats(shape):
                names = ("ops", *self.packages(shape, what), *shape.peers)
                wanted = [_header(shape, what, name) for name in names]
                for _ in self.place("peers", wanted):
                    case = make_case(shape, self.device)
                    self.each("peers", case, what, names, case.pairs)
                    self.compare(shape.name, what)

    def packages(self, shape: Shape, what: str) -> list[str]:
        """Returns the other packages to measure at a shape; why one cannot be measured here goes into the result."""
        reasons = {name: peers.missing(name) for name in shape.packages(what)}
        self.result["skipped"] |= {name: reason for name, reason in reasons.items() if reason}
        return [name for name, reason in reasons.items() if not reason]

    def each(self, part: str, case: Case, what: str, names: Iterable[str], pairs: int) -> None:
        """Times variants one at a time, because several would not fit into memory together, while there is time."""
        for name in names:
            before = _found(_header(case.shape, what, name), self.earlier.get(part, ()))
            if name != "ops" and before is not None and "error" in before:
                self.result[part].append(before)  # not again: it may have ended the earlier run
            elif name == "ops" or not self.spent:
                self.time(case, [self.variant(case, what, name)], part, pairs)

    def compare(self, name: str, what: str) -> None:
        """Adds to the op's row of the peers how many times as long each of them takes."""
        timed = _of(self.result["peers"], case=name, what=what)
        for r in (r for r in timed if r["variant"] == "ops"):
            for peer in (p for p in timed if p["variant"] in TIMES):
                r[TIMES[peer["variant"]]] = round(peer["median_us"] / r["median_us"], 3)

    def crossing(self) -> None:
        """Measures the op by the length of the lists next to dense causal attention, by tokens, for both widths."""
        lengths, counts = cases.CROSSING_LENGTHS, cases.CROSSING_LISTS
        if self.s.small:
            lengths, counts = (32, 64), (4, 16)
        for width, kind in cases.WIDTHS.items():
            for length in lengths:
                name = f"D = {width}, {'V = K' if kind.shared else 'K and V apart'}"
                shapes = [self.sized(kind).of(length, length, count, name=name) for count in counts]
                wanted = [_header(shape, what, "ops") for shape in shapes for what in ("fwd", "fb")]
                wanted += [_header(shapes[-1], what, v) for what in ("fwd", "fb") for v in shapes[-1].dense]
                for _ in self.place("crossing", wanted):
                    for shape in shapes:
                        case = make_case(shape, self.device)
                        self.time(case, [self.ours(case, what) for what in ("fwd", "fb")], "crossing", case.pairs)
                    for what in ("fwd", "fb"):
                        self.each("crossing", case, what, shapes[-1].dense, 0)

    def errors(self) -> None:
        """Measures errors next to dense SDPA's (o and dq of sampled queries; all gradients of less), and equal bits."""
        for shape in self.shapes:
            self.report(f"errors: {shape.name}")
            case = make_case(shape, self.device)
            at = attention.sample_of(shape.queries, SAMPLED, self.device)
            row = {**cases.case_values(shape), "of": "sampled queries"}
            self.record_sampled(row, case, self.twice(case), at)
            self.tidy()
            if shape.decodes:
                continue
            for dtype in NARROW_AND_FULL.get(shape.name, (BF16,)):
                self.report(f"errors: {shape.name}, gradients, {dtype}")
                less = make_case(shape if self.s.small else shape.for_gradients(), self.device, dtype=dtype)
                row = {**cases.case_values(less.shape, dtype), "of": "all gradients"}
                self.record_gradients("errors", row, less)
                self.tidy()
            self.save(self.result)

    def memory(self) -> None:
        """Measures the op's peak memory beyond its inputs and outputs; there is no bar."""
        for shape in self.shapes:
            case = make_case(shape, self.device)
            for what in self.whats(shape):
                call = self.ours(case, what).build()
                call()
                found = running.peak_memory(call, self.device, math.inf)
                del found["met_bar"]
                self.result["memory"].append({**cases.case_values(shape), "what": what, **found})
            self.tidy()


def _header(shape: Shape, what: str, variant: str) -> Row:
    """Returns what names a row."""
    row = cases.case_values(shape) | {"what": what, "variant": variant}
    return row | ({"n": row["S_kv"]} if variant in cases.OTHER_KEYS else {})


def _found(header: Row, rows: Iterable[Row]) -> Row | None:
    """Returns the row of this header that was measured or failed."""
    return next((r for r in rows if _ended(r) and header.items() <= r.items()), None)


def _ended(row: Row) -> bool:
    return "median_us" in row or "error" in row


# ---- parts of other runs

ORIGIN = ("device", "versions", "commit", "dirty", "kernel_sources_sha256", "date")
"""What a result says of a run, and of a part that is of another run."""
MACHINE = ("device name", "settings small", "versions torch", "versions triton")
"""What a run that goes on from another has in common with it, in addition to the code."""


def fill(result: Result, later: Result, parts: Sequence[str]) -> Result:
    """Returns ``result`` with ``parts`` of ``later``, and ``origins``, which says of each what run it is of.

    A part is taken as a whole: its rows are compared with each other, and the op is among them.

    Raises:
        OtherRun: if ``later`` is of other shapes or of another benchmark, or has not begun one of the parts.
    """
    running.same(result, later, "operator", "settings small", "settings shapes")
    if not later["seconds_of"].keys() >= {*parts}:
        raise running.OtherRun(f"the later run has not begun one of {', '.join(parts)}")
    filled = {**result, **{name: later[name] for part in parts for name in LISTS_OF[part]}}
    filled["seconds_of"] = result["seconds_of"] | {part: later["seconds_of"][part] for part in parts}
    origin = {k: later[k] for k in ORIGIN}
    filled["origins"] = result.get("origins", {}) | dict.fromkeys(parts, origin)
    # Why these parts failed no longer holds.
    kept = {name: why for name, why in result["skipped"].items() if name not in parts}
    new = {name: why for name, why in later["skipped"].items() if name in parts or name not in LISTS_OF}
    filled["skipped"] = kept | new
    known = {*result["settings"]["parts"], *parts}
    filled["settings"] = result["settings"] | {"parts": [part for part in LISTS_OF if part in known]}
    filled["complete"] = _whole(filled)
    return filled


def _whole(result: Result) -> bool:
    """Returns whether every part is there, none failed and no cell was left out for lack of time."""
    rows = (r for names in LISTS_OF.values() for name in names for r in result.get(name, ()))
    left = any(r.get("reason") == running.SPENT for r in rows)
    return not left and LISTS_OF.keys() == result["seconds_of"].keys() - result["skipped"].keys()


# ---- what is compiled first: not what torch.compile chooses by its times on the GPU, which must be idle then


def compile_ours(shape: Shape, dtype: torch.dtype = BF16, forward: bool = True) -> None:
    """Runs the op at the real shape, because launch plans depend on sizes."""
    case = make_case(shape, torch.device("cuda"), dtype=dtype)
    if forward:
        case.forward()
    case.both(case.leaves())
    torch.cuda.synchronize()


def compile_crossing(width: int) -> None:
    """Runs the op for each length of the lists that the crossing has."""
    for count in cases.CROSSING_LISTS:
        compile_ours(cases.WIDTHS[width].of(4096, 4096, count), forward=False)


def compile_ranges(name: str) -> None:
    """Runs the selection op over ranges of one key."""
    shape = cases.SHAPES[name]
    peers.make(cases.RANGES, make_case(shape, torch.device("cuda")), "fwd" if shape.decodes else "fb")[0]()
    torch.cuda.synchronize()


def jobs(names: Sequence[str], parts: Sequence[str]) -> running.Jobs:
    """Returns what to compile side by side for these shapes and parts."""
    found: running.Jobs = {}
    if {"speed", "errors", "memory", "peers"} & set(parts):
        found |= {name: (compile_ours, (cases.SHAPES[name],)) for name in names}
    if "errors" in parts:
        for name in (name for name in NARROW_AND_FULL if name in names):
            shape = cases.SHAPES[name].for_gradients()
            found |= {f"{name}, {d}": (compile_ours, (shape, d, False)) for d in (F16, F32)}
    if "crossing" in parts:
        found |= {f"crossing, D = {width}": (compile_crossing, (width,)) for width in cases.WIDTHS}
    if "peers" in parts:
        found |= {f"ranges, {name}": (compile_ranges, (name,)) for name in names}
    return found


# ---- tables


def _wrong(row: Row) -> str:
    """Returns a note on outputs that are not those of the formula."""
    of = [name for name in ("o", "dq") if not float(row.get(f"{name}_error", 0)) < WRONG]
    return f"**wrong {', '.join(of)}**" if of else ""


_SIZES, _CELLS = "case|S|S_kv|heads|Dk / Dv|n|", "{case}|{sequences}|{S_kv}|{h}|{Dk} / {Dv}{in_k}|{n}|{kind}"
_PEERS = Table(
    f"Other implementations (x: how many times as long as {report.OURS} next to them)",
    f"{_SIZES}|implementation|time|quartiles|x|note",
    _CELLS + "|{title}|{time}|{quartiles}|{x:.2f}|{note}",
)


def _peers(result: Result) -> str:
    """Returns the table of the peers, whose ratios are in the op's row."""
    ours = {(r["case"], r["what"]): r for r in reversed(result["peers"]) if report.is_ours(r)}
    rows = []
    for r in result["peers"]:
        of = ours.get((r["case"], r["what"]), r)
        rows.append(r | {"x": None if of is r else of.get(TIMES.get(r["variant"], "")), "also": _wrong(r)})
    return _PEERS.section(result, rows)


# ---- the crossing

Points = Sequence[tuple[int, float]]


def _of(rows: Iterable[Row], **where: Any) -> list[Row]:
    return [r for r in rows if "median_us" in r and all(r[k] == v for k, v in where.items())]


def places(result: Result) -> list[tuple[str, str, int]]:
    """Returns (case, what, tokens) of every part of the crossing."""
    found = {(r["case"], r["what"], r["S"]) for r in result["crossing"]}
    return sorted(found, key=lambda p: (p[0], p[1] == "fb", p[2]))


def curve(result: Result, case: str, what: str, tokens: int) -> tuple[list[tuple[int, float]], Row | None]:
    """Returns the op's times by length of the lists, in µs, and the fastest dense row."""
    rows = _of(result["crossing"], case=case, what=what, S=tokens)
    dense = [r for r in rows if not report.is_ours(r)]
    points = sorted((r["n"], r["median_us"]) for r in rows if report.is_ours(r))
    return points, min(dense, key=lambda r: r["median_us"], default=None)


def break_even(points: Points, dense: float) -> float | None:
    """Returns the length up to which lists are faster than dense attention, interpolated logarithmically.

    None if no measured length is faster. If all are, the last one.
    """
    if not points or points[0][1] >= dense:
        return None
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if t1 >= dense:
            share = math.log(dense / t0) / math.log(t1 / t0)
            return math.exp(math.log(n0) + share * math.log(n1 / n0))
    return float(points[-1][0])


def up_to(points: Points, dense: Row | None) -> str:
    """Returns the text of :func:`break_even`."""
    if dense is None:
        return ""
    at = break_even(points, dense["median_us"])
    if at is None:
        return "none"
    return f"all, to {points[-1][0]}" if at == points[-1][0] else f"{at:,.0f}"


def crossing_section(result: Result) -> str:
    counts = sorted({r["n"] for r in result["crossing"] if report.is_ours(r)})
    rows = []
    for case, what, tokens in places(result):
        points, dense = curve(result, case, what, tokens)
        times, of = dict(points), dense or {}
        name = f"{of.get('variant', '')}; {of.get('note', '')}".strip("; ")
        cells = [report.time(times.get(n)) for n in counts]
        cells += [report.time(of.get("median_us")), name, up_to(points, dense)]
        rows.append([case, report.WHAT[what], str(tokens), *cells])
    for r in result["crossing"]:
        if "median_us" not in r:
            name = report.title(r) + (f", n = {r['n']}" if report.is_ours(r) else "")
            cells = [""] * len(counts) + [report.error(r), name, ""]
            rows.append([r["case"], report.WHAT[r["what"]], str(r["S"]), *cells])
    headings = ["case", "", "tokens", *(f"n = {n}" for n in counts), "dense", "by", "lists are faster up to n"]
    title = f"{report.OURS} by the length of the lists, next to the fastest dense causal attention"
    return report.section(title, report.markdown(headings, rows))


TABLES: report.Makers = {
    "rows": Table(
        "Speed: uniform random causal keys, sorted",
        f"{_SIZES}|implementation|time|quartiles|TFLOP/s|bar|goal||note",
        _CELLS + "|{title}|{time}|{quartiles}|{tflops:.0f}|{bar_us:time}|{goal_us:time}|{verdict}|{note}",
        lambda r: [r | {"also": r.get("published", "")}],
    ),
    "peers": _peers,
    "errors": Table(
        "Relative errors against fp64, and those of dense SDPA with a mask in the same dtype on the same lists",
        "case|compared|dtype|S|n|tensor|error|dense SDPA's|bar|",
        "{case}|{of}|{dtype}|{S}|{n}|" + report.ERROR,
        report.each_error,
    ),
    "determinism": report.TWO_RUNS,
    "memory": Table(
        "Peak memory beyond inputs and outputs",
        f"{_SIZES}|peak, MB|outputs, MB",
        _CELLS + "|{peak_above_mb:.0f}|{outputs_mb:.0f}",
    ),
    "crossing": crossing_section,
}


def part_of(result: Result, part: str) -> Result:
    """Returns the run that a part is of: what names its device, versions and commit."""
    return result.get("origins", {}).get(part, result)


def _origins(result: Result) -> list[str]:
    """Returns a line for each other run that parts are of, and for a run that this one went on from."""
    of: dict[str, list[str]] = {}
    for part, origin in result.get("origins", {}).items():
        of.setdefault("; ".join(report.facts(origin | {"complete": True})), []).append(part)
    lines = [f"of another run: {', '.join(parts)}: {line}" for line, parts in of.items()]
    return lines + [f"went on from the run of {date}" for date in result.get("resumed", ())]


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    lines = [*report.facts(result), *_origins(result), report.timing_of(result)]
    known = {r["case"] for r in result["rows"]}
    lines += [f"{name}: {meaning}" for name, meaning in cases.MEANINGS.items() if name in known]
    lines.append("TFLOP/s: 2 products of every listed pair forward, 7 forward and backward")
    missed = [f"{r['case']}, {report.WHAT[r['what']]}" for r in result["rows"] if r.get("met_bar") is False]
    if missed:
        lines.append(f"bars that are {report.yes(False)}: {'; '.join(missed)}")
    return report.document("Attention over lists of keys benchmark", lines, *report.sections_of(result, TABLES))


# ---- the picture

_COLOURS = ("#7fbf7b", "#1b7837", "#00441b", "#762a83", "#9970ab")


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots times by length of the lists, dense attention as horizontal lines; writes no file if nothing was timed."""
    pyplot = report.pyplot()
    found = places(result)
    if not any(curve(result, *place)[0] for place in found):
        return
    names = sorted({case for case, _, _ in found})
    figure, axes = pyplot.subplots(len(names), 2, figsize=(11, 1.2 + 3.6 * len(names)), squeeze=False)
    for line, case in zip(axes, names, strict=True):
        for axis, what in zip(line, report.WHAT, strict=True):
            _draw(axis, result, case, what, [t for c, w, t in found if (c, w) == (case, what)])
    heads = max(r["h"] for r in result["crossing"])
    device = part_of(result, "crossing")["device"]["name"]
    title = f"Attention over lists of keys on {device}, {heads} heads (dashed: dense causal attention)"
    report.finish(figure, title, path, result["notice"])


def _draw(axis: Any, result: Result, case: str, what: str, tokens: list[int]) -> None:
    ticks: set[int] = set()
    for colour, length in zip(_COLOURS, tokens, strict=False):
        points, dense = curve(result, case, what, length)
        ticks |= {n for n, _ in points}
        if points:
            x, y = zip(*points, strict=True)
            label = f"{report.tokens(length)} tokens"
            axis.plot(x, [us / 1e3 for us in y], "o-", color=colour, label=label, markersize=4)
        if dense is not None:
            axis.axhline(dense["median_us"] / 1e3, color=colour, linewidth=1, linestyle="--")
    report.draw_curves(axis, f"{report.WHAT[what]}, {case}, ms", "keys a query", {n: str(n) for n in sorted(ticks)})


write = report.writer(table, plot=plot)
