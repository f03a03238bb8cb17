# SPDX-License-Identifier: Apache-2.0
"""The mHC benchmark: its rows, how one run measures them, its tables and its picture.

The variants of a group are timed round-robin, so that a drift of the clock affects all of them alike. A failing variant
is recorded in its row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import mhc_calls as calls
from . import mhc_cases as cases
from . import report, running, timing, variants
from .mhc_cases import Inputs, Named, make_inputs
from .report import Result, Row, Table, us, yes
from .variants import Variant, chained

DIMS = (2560, 4096, 7168)
SMALL_TOKENS, SMALL_DIM = 12, 48
DECODE_TOKENS, DECODE_DIM, DECODE_CHAIN = (1, 8, 64), 4096, 20
PARTS = (*map(str, DIMS), "npu", "decode", "memory", "accuracy", "determinism")
CPU_NOTICE = "CPU run, wall clock, a small shape: it says nothing of a GPU."
TWO_OPS = "ops, one after the other"
RECORD_DRAWS = 9
ACCURACY: dict[str, dict[str, bool]] = {
    "training, sinkhorn 20, R": {},
    "training, sinkhorn 20, R transposed": {"transpose_res": True},
    "npu_mhc_pre: gamma, raw h_res": {"npu": True},
}
"""Cases whose errors are measured, and how their inputs are made."""


@dataclasses.dataclass
class Settings(running.Settings):
    parts: tuple[str, ...] = PARTS
    rounds: int = 40
    peers: bool = False


class Run(variants.Run):
    operator, notice, unit, alike = "mhc", CPU_NOTICE, None, True
    lists = ("rows", "decode", "memory", "accuracy", "determinism")

    def __init__(self, settings: Settings, save: Callable[[Row], None], report: Callable[[str], None]) -> None:
        if settings.resolve().type != "cuda":  # one small shape stands for every width
            settings.parts = tuple(dict.fromkeys("4096" if p in ("2560", "7168") else p for p in settings.parts))
        super().__init__(settings, save, report)

    # ---- inputs

    def inputs(self, tokens: int, dim: int, **kwargs: Any) -> Inputs:
        tokens, dim = (min(tokens, SMALL_TOKENS), SMALL_DIM) if self.s.small else (tokens, dim)
        return make_inputs((tokens,), cases.N, dim, self.device, **kwargs)

    # ---- variants

    def case_variants(self, i: Inputs, prefix: str = "", compiled_peer: bool = True) -> Iterator[Variant]:
        """Yields pre, post, fb and the fused ops of one case: by the ops, a compiled step, and the peers."""
        with torch.no_grad():
            c = cases.plain_coefficients(i.x, i.phi, i.alpha, i.bias, i.gamma, i.iters)
        h_post, h_res = c["h_post"].detach(), c["h_res"].detach()
        exact = cases.reference(i)

        def check(got: Named) -> Row:
            return cases.compare(got, exact, i.with_post)

        def check_post(got: Named) -> Row:
            want = cases.plain_post(*(t.double() for t in (i.x, i.f_out, h_post, h_res)), i.transpose_res)
            return cases.compare(got, {"x_out": want}, True)

        def row(what: str, variant: str, build: Callable[[], Callable[[], Any]], checked: Any = None) -> Variant:
            return Variant(prefix + what, variant, build, case=i, check=checked)

        yield row("pre", "ops", lambda: lambda: calls.ops_pre(i), check)
        if i.with_post:
            yield row("post", "ops", lambda: lambda: calls.ops_post(i, h_post, h_res), check_post)
        yield row("fb", "ops", lambda: lambda: calls.ops_fb(i), check)
        if i.with_post:
            yield from (dataclasses.replace(v, case=i) for v in _fused(cases.PostPre.make(i, h_post, h_res)))
        if self.s.compiled:
            yield row("fb", "compiled", lambda: _with_leaves(i, calls.autograd_fb("mhc_inductor")), check)
        # Compiling the plain formula takes longer than everything else, so compile it at one width only.
        compiled_peer &= self.s.compiled and i.x.shape[-1] in (4096, SMALL_DIM)
        peers = {cases.EAGER: "", **({cases.COMPILE: "inductor"} if compiled_peer else {})}
        for name, backend in peers.items() if self.s.peers else ():
            for what, (call, trains) in calls.plain_calls(i, h_post, h_res, backend).items():
                yield row(what, name, functools.partial(_with_leaves if trains else _no_grad, i, call))

    # ---- running

    def time(self, found: list[Variant], to: str) -> None:
        """Builds, times and checks the variants of one group; appends their rows."""
        tokens, _, dim = found[0].case.x.shape
        figures = lambda row, t: row.update(_figures(row, t, self.bars_apply))  # noqa: E731
        self.timed(to, f"{to}, {tokens} tokens, D = {dim}", found, row_header, figures)

    def measure(self, name: str) -> None:
        if name == "npu" or name.isdigit():
            dim, npu = (4096, True) if name == "npu" else (int(name), False)
            i = self.inputs(cases.TOKENS, dim, npu=npu)
            self.time(list(self.case_variants(i, "npu_" if npu else "")), "rows")
        else:
            super().measure(name)

    def decode(self) -> None:
        """Measures one boundary of a few tokens, alone and in a chain."""

        def chain(v: Variant) -> Variant:
            return chained(v, DECODE_CHAIN, lambda: timing.chain(v.build(), DECODE_CHAIN))

        for wanted in DECODE_TOKENS:
            every = self.case_variants(self.inputs(wanted, DECODE_DIM), compiled_peer=False)
            cold = [v for v in every if not v.what.endswith("fb") and v.variant != TWO_OPS]
            self.time(cold + [chain(v) for v in cold if self.gpu], "decode")

    def memory(self) -> None:
        """Measures the peak memory of forward + backward above inputs and outputs, in MB (10^6 bytes)."""
        every: dict[str, Callable[[Inputs], Any]] = {"ops": calls.ops_fb, "eager": calls.autograd_fb()}
        if self.s.compiled:
            every["compiled"] = calls.autograd_fb("mhc_inductor")
        for name, call in every.items():
            i = self.inputs(cases.TOKENS, 4096)
            tokens, _, dim = i.x.shape
            row: Row = {"variant": name, "tokens": tokens, "dim": dim, "bar_mb": cases.PEAK_BAR_MB}
            for t in i.leaves() if name != "ops" else ():
                t.requires_grad_()
            self.peak(row, lambda call=call, i=i: lambda: call(i))

    def accuracy(self) -> None:
        """Measures errors against fp64 next to the plain formula's."""
        for name, kwargs in ACCURACY.items():
            self.report(f"accuracy: {name}")
            i = self.inputs(512, 4096, **kwargs)
            self.result["accuracy"].append(errors_of(name, i, self.s.compiled and not kwargs))
        self.result["accuracy"].append(record_case(self.device))

    def determinism(self) -> None:
        """Checks for equal bits in two runs and, on a GPU, of a token alone, in small batches and in the whole batch."""
        i = self.inputs(2048, 4096)
        first, tokens = calls.ops_fb(i), len(i.x)
        checks = {"two runs": (first, calls.ops_fb(i))}
        at = tokens // 3
        # On a CPU, BLAS picks the summation order by the batch size.
        for count in sorted({1, 2, 8, 64, 65, tokens // 2} & {*range(1, tokens - at + 1)}) if i.x.is_cuda else ():
            of = {k: t[at : at + count] for k, t in first.items() if k not in cases.SUMMED}
            checks[f"{count} of {tokens} tokens alone"] = of, calls.ops_fb(i.tokens(at, at + count))
        self.equal_bits(checks, list(i.x.shape))

    def run(self) -> Row:
        self.report("copy bandwidth")
        self.result["copy"] = timing.copy_bandwidth(self.device, self.flush, max(self.s.rounds // 2, 5))
        self.save(self.result)
        return super().run()


def _fused(two_passes: cases.PostPre) -> Iterator[Variant]:
    """Yields the fused ops, and their parts one after the other."""
    one_pass = two_passes.single_pass()
    for what, op, p in (
        ("post_pre", calls.ops_post_pre, two_passes),
        ("single_pass", calls.ops_single_pass, one_pass),
    ):
        # The two ops round the gradient of x_out between them: only the fused op must meet one rounding.
        check = functools.partial(cases.check_fused, p)
        for end, gradients in (("", False), ("_fb", True)):
            for variant, one in (("ops", True), (TWO_OPS, False)):
                call = functools.partial(op, p, one, gradients)
                yield Variant(what + end, variant, lambda call=call: call, check=check if one else None)


def _with_leaves(i: Inputs, call: Callable[[Inputs], Any]) -> Callable[[], Any]:
    j = i.detached()
    for t in j.leaves():
        t.requires_grad_()
    return lambda: call(j)


def _no_grad(i: Inputs, call: Callable[[Inputs], Any]) -> Callable[[], Any]:
    return torch.no_grad()(lambda: call(i))


def row_header(v: Variant) -> Row:
    """Returns the sizes of a row, the floor of its time, and its bars if it has any."""
    tokens, _, dim = v.case.x.shape
    row: Row = {"tokens": tokens, "n": cases.N, "dim": dim}
    row["floor_us"] = cases.floor_us(v.what, tokens, dim, phi=tokens < 1024)
    target = cases.TARGETS.get((v.what, dim)) if tokens == cases.TOKENS else None
    if target is not None:
        name, time = target.best_peer or (None, None)
        row |= target.of(row, False) | {"best_peer": name, "best_peer_us": time}
    return row


def _figures(row: Row, t: timing.Timing, bars_apply: bool) -> Row:
    """Returns the figures of one row."""
    out = {**t.as_json(), "ratio_to_floor": round(t.median / row["floor_us"], 4)}
    if bars_apply and row.get("bar_us") is not None and row["variant"] in ("ops", "compiled"):
        out["met_bar"] = t.median <= row["bar_us"]
        out["met_goal"] = t.median <= row["goal_us"]
        if row["best_peer_us"] is not None:
            out["not_slower_than_best_peer"] = t.median <= row["best_peer_us"]
    return out


# ---- errors against fp64, and equal bits


def errors_of(name: str, i: Inputs, compiled: bool) -> Row:
    """Returns the errors of one case against fp64: ops, plain formula and, if ``compiled``, the compiled step."""
    exact = cases.reference(i)
    every: dict[str, Callable[[], Named]] = {"ops": lambda: calls.ops_fb(i.detached())}
    if compiled:
        every["compiled"] = _with_leaves(i, calls.autograd_fb("mhc_inductor"))
    every["plain formula"] = lambda: cases.plain(i)

    def errors(call: Callable[[], Named]) -> Row:
        try:
            return cases.compare(call(), exact, i.with_post)
        except Exception as e:  # one failing implementation must not discard the others' figures
            return {"error": running.message(e)}

    row: Row = {"case": name, "shape": list(i.x.shape), "dtype": str(i.x.dtype).removeprefix("torch.")}
    return row | {"errors": {kind: errors(call) for kind, call in every.items()}}


def record_case(device: torch.device) -> Row:
    """Returns the largest absolute errors of the parameter gradients at ``RECORD_SHAPE``, with gamma and raw logits.

    Measures the backward op alone: the fp64 values start from the same saved fp32 tensors. Loss gradients are standard
    normal. Each figure is the median of ``RECORD_DRAWS`` draws: in a single draw the last rounding of one sum decides.
    """
    draws: dict[str, dict[str, list[float]]] = {"ops": {}, "plain formula": {}}
    for _ in range(RECORD_DRAWS):
        i = make_inputs(cases.RECORD_SHAPE[:2], *cases.RECORD_SHAPE[2:], device, npu=True, record=True)
        got = calls.ops_fb(i)
        exact = cases.parameter_gradients(i, got, torch.float64)
        for kind, values in zip(draws, (got, cases.parameter_gradients(i, got, torch.float32)), strict=True):
            for name in cases.RECORD_BARS:
                apart = float((values[name].double() - exact[name].reshape(values[name].shape)).abs().max())
                draws[kind].setdefault(name, []).append(apart if math.isfinite(apart) else math.nan)

    def entry(name: str, all_: list[float]) -> Row:
        worst, bar = math.nan if any(map(math.isnan, all_)) else statistics.median(all_), cases.RECORD_BARS[name]
        return {"absolute": worst, "draws": all_, "bar_absolute": bar, "met": worst <= bar}

    errors = {kind: {name: entry(name, all_) for name, all_ in of.items()} for kind, of in draws.items()}
    row: Row = {"case": "shape of record, backward alone", "shape": list(cases.RECORD_SHAPE), "dtype": "bfloat16"}
    return row | {"errors": errors}


# ---- tables

NAMES = {
    "pre": "pre",
    "post": "post",
    "fb": "forward + backward",
    "post_pre": "post fused with pre",
    "post_pre_fb": "post fused with pre: forward + backward",
    "single_pass": "single pass (V4.1)",
    "single_pass_fb": "single pass (V4.1): forward + backward",
    "npu_pre": "npu_mhc_pre: pre",
    "npu_fb": "npu_mhc_pre: forward + backward",
}


def _best(r: Row) -> list[Row]:
    """Returns the row with its name and best peer; without its bars where they are not for it."""
    r = r | {"name": NAMES[r["what"]]}
    if "median_us" not in r or not report.is_ours(r) or r.get("bar_us") is None:
        return [r | {"bar_us": None, "goal_us": None, "met_bar": None, "met_goal": None}]
    best = f"{r['best_peer']} {us(r['best_peer_us'])} {yes(r.get('not_slower_than_best_peer'))}".rstrip()
    return [r | {"best": best if r["best_peer"] else ""}]


def _each(c: Row) -> list[Row]:
    """Returns a row for each implementation and tensor of a case, with the plain formula's error."""
    kinds, rows = dict(c["errors"]), []
    plain = kinds.pop("plain formula", {})
    for kind, errors in kinds.items():
        of = {"case": c["case"], "kind_of": kind}
        if isinstance(errors.get("error"), str):
            rows.append(of | {"tensor": report.error(errors)})
            continue
        for name, e in errors.items():
            key, bar = ("absolute", "bar_absolute") if "absolute" in e else ("relative", "bar")
            row = {"tensor": name, "found": f"{float(e[key]):.2g} {key}", "plain": plain.get(name, {}).get(key)}
            rows.append(of | row | {"of_bar": e[bar], "met": e["met"]})
    return rows


def _sizes(result: Result, part: str, size: str) -> str:
    return ", ".join(map(str, sorted({r[size] for r in result[part]})))


def _decoding(result: Result) -> str:
    text = f"Decoding, D = {_sizes(result, 'decode', 'dim')} (a chain: mean of calls in one graph, caches warm)"
    return text + (f"; {cases.DECODE_PEERS}" if result["device"]["type"] == "cuda" else "")


TABLES: report.Makers = {
    "rows": Table(
        lambda result: f"Speed: {_sizes(result, 'rows', 'tokens')} tokens, n = 4, bf16 x, fp32 phi",
        "D||implementation|time, µs|quartiles|floor, µs|x floor|bar|goal|best peer",
        "{dim}|{name}|{title}|{us}|{us_quartiles}|{floor_us:us}|{ratio_to_floor:.2f}|{us_bar}|{us_goal}|{best}",
        _best,
    ),
    "decode": Table(
        _decoding, "tokens||implementation|time, µs|floor, µs", "{tokens}|{what}|{title}|{us}|{floor_us:us}"
    ),
    "memory": Table(
        "Peak memory of forward + backward above inputs and outputs",
        "variant|D|MB|bar|",
        "{variant}|{dim}|{peak}|{peak_bar}|{yes_bar}",
    ),
    "accuracy": Table(
        "Errors against fp64 (bf16 outputs are held to one rounding, dx of pre and post to two)",
        "case||tensor|error|plain formula's|bar|",
        "{case}|{kind_of}|{tensor}|{found}|{plain:.2g}|{of_bar:.2g}|{yes}",
        _each,
    ),
    "determinism": report.determinism("shape"),
}


def table(result: Result) -> str:
    """Returns the whole run as Markdown."""
    fine = "Outputs of every timed row of ours meet their bars against fp64."
    end = report.outputs_section([*result["rows"], *result["decode"]], "{tokens} tokens, D = {dim}", fine)
    return report.document("mhc benchmark", report.facts(result), *report.sections_of(result, TABLES), end)


# ---- the picture


def bars(result: Result, what: str, dim: int) -> list[report.Bar]:
    """Returns the bars of one row: ours first, then the others by time."""
    return report.bars(r for r in result["rows"] if (r["what"], r["dim"]) == (what, dim))


def _drawn(result: Result) -> dict[str, list[report.Bar]]:
    """Returns the bars of each row and width that was timed."""
    places = [(k, dim) for k in NAMES for dim in sorted({r["dim"] for r in result["rows"] if r["what"] == k})]
    names = {k: name.replace(": forward + backward", ": f + b") for k, name in NAMES.items()}
    return {f"{names[k]}, D = {dim}": found for k, dim in places if (found := bars(result, k, dim))}


def plot(result: Result, path: pathlib.Path) -> None:
    """Plots bars of the achieved share of the memory bandwidth; writes no file if nothing was timed."""
    pyplot, gpu, drawn = report.pyplot(), result["device"]["type"] == "cuda", _drawn(result)
    if not drawn:
        return
    every = [b for group in drawn.values() for b in group]
    top = max(b.us for b in every)
    halves = _balanced(drawn) if report.height(drawn.values()) > 24 else [drawn]
    height = max(report.height(half.values()) for half in halves)
    size = (10.5 if len(halves) == 2 else 8, 1.9 + 0.2 * height)
    figure, axes = pyplot.subplots(1, len(halves), figsize=size, squeeze=False)

    def share(b: report.Bar) -> float:
        return 100 * b.floor / b.us if gpu else 100 * b.us / top

    def said(b: report.Bar) -> str:
        return f"{us(b.us)} µs" + (f", {share(b):.0f} %" if gpu else "")

    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    for axis, half in zip(axes[0], halves, strict=True):
        report.draw_bars(axis, half, height, length=share, said=said, bbox=box)
        axis.set_xlim(0, 135)
        axis.set_xticks(range(0, 101, 20) if gpu else [])
        if gpu:
            axis.axvline(100, color="black", linewidth=1, linestyle="--", zorder=0)
            axis.set_xlabel("percent of the speed of memory", fontsize=9)
    _legend(figure, every)
    tokens = max(r["tokens"] for r in result["rows"])
    faster = " (longer is faster)\ndashed: every byte moved once at 4.3 TB/s"
    name = f"mHC on {result['device']['name']}, {tokens} tokens, n = 4, bf16 x, fp32 phi"
    report.finish(figure, name + (faster if gpu else " (longer is slower)"), path, result["notice"], above=0.25)


def _legend(figure: Any, every: list[report.Bar]) -> None:
    from matplotlib.patches import Patch

    legend = {
        False: Patch(facecolor="#888888", label="measured in this run"),
        True: Patch(facecolor="#888888", hatch="////", edgecolor="white", label=f"{report.SEPARATELY}, NVIDIA H200"),
    }
    handles = [legend[s] for s in dict.fromkeys(b.separate for b in every)]
    figure.legend(handles=handles, loc="lower center", ncols=2, fontsize=8, frameon=False)


def _balanced(drawn: dict[str, list[report.Bar]]) -> list[dict[str, list[report.Bar]]]:
    """Returns the groups in two columns of about the same height."""
    sizes, groups = [len(group) + 1.6 for group in drawn.values()], [*drawn.items()]
    cut = min(range(1, len(groups)), key=lambda c: max(sum(sizes[:c]), sum(sizes[c:])))
    return [dict(groups[:cut]), dict(groups[cut:])]


write = report.writer(table, plot=plot)
