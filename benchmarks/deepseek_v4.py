# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 of transformers end to end: time, compile time and memory of every variant, compared with bars.

Each variant and part (forward, training, training with activation checkpointing) runs in its own process with cold
caches, one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import torch
import torch._inductor.config

from . import deepseek_model, environment, processes, report, routing, sparse_cases
from .processes import Row
from .report import Table
from .sparse_cases import CHECKPOINTED, COMPILE, EAGER, FORWARD, OURS, TRAINING, TRIVIAL, V4, Case
from .sparse_models import Job, Process, Settings

__all__ = ["Job", "gather", "measure", "settings", "table", "write"]
VARIANTS = (EAGER, COMPILE, TRIVIAL, OURS)
PARTS = (FORWARD, TRAINING, CHECKPOINTED)
# One H200, torch 2.11, 4 layers, D = 2048, 2 x 2048 tokens: bar and goal of mhc_inductor (ms, s, GiB).
BARS = {
    "forward_ms": (11.2, 10.4),
    "training_ms": (28.5, 25.5),
    "forward_compile_s": (20.0, 17.0),
    "training_compile_s": (45.0, 35.0),
    "training_peak_gib": (6.0, 5.5),
}
RECORD_COMPILE_S = 31.0
"""Seconds plain torch.compile took for the forward on the machine of the bars; scales compile times to that machine."""
_LABELS = {v: v for v in VARIANTS} | {
    "trivial": "torch.compile, mHC coefficients made trivial",
    "mhc_inductor": 'backend="mhc_inductor"',
}


def settings(
    device: str, toy: bool, variants: Iterable[str] = VARIANTS, parts: Iterable[str] = PARTS, rounds: int = 30
) -> Settings:
    """Returns what to measure, in the order in which it is measured: the longest compile first."""
    size = deepseek_model.TINY if toy else deepseek_model.Size()
    cases = tuple(Case(V4, size.batch, size.seq, part, eager=True) for part in reversed(PARTS) if part in parts)
    slow = tuple(v for v in (COMPILE, OURS, TRIVIAL, EAGER) if v in variants)
    return Settings(device, cases, slow, rounds, toy, budget_s=3600.0, limit_s=600.0)


def measure(job: Job, save: Callable[[Row], None] = lambda _: None) -> Row:
    """Returns the row of a job: ms, compile seconds, GiB, the loss, the norm of the gradients, and what was routed."""
    ours, trivial = job.variant == OURS, job.variant == TRIVIAL
    process = Process(job)
    row = job.named | {"parameters": sum(p.numel() for p in process.model.parameters()), "compiled_alone": True}
    with (
        deepseek_model.trivial_coefficients() if trivial else contextlib.nullcontext(),
        routing.watched() if ours else contextlib.nullcontext() as reports,
    ):
        row |= process.times() | {"compile_threads": torch._inductor.config.compile_threads}
        logits = process.step()[:, :-1].flatten(0, 1).float()
    row["loss"] = torch.nn.functional.cross_entropy(logits, process.ids[:, 1:].flatten()).item()
    if process.trains:
        grads = {n: p.grad for n, p in process.model.named_parameters()}
        squares = [g.double().square().sum() for g in grads.values() if g is not None]
        row["gradient_norm"] = torch.stack(squares).sum().sqrt().item()
        row["parameters_without_gradient"] = [n for n, g in grads.items() if g is None]
    if reports is not None:
        import mhc_inductor

        row["routing"] = routing.summary(reports) | {"counters": mhc_inductor.counters()}
        row["routing"]["share_of_compile"] = row["routing"]["seconds"] / row["compile_s"]
    return row


# ---- the run


def gather(settings: Settings, rows: list[Row]) -> Row:
    """Returns the result of a run: header, rows, figures per variant, and verdicts on the device of the bars."""
    result = environment.header("deepseek_v4", torch.device(settings.device))
    alone = tuple(v for v in VARIANTS if v in settings.variants)
    size = dataclasses.asdict(sparse_cases.v4_size(settings.cases[0], settings.toy))
    result["settings"] = {"size": size, "rounds": settings.rounds, "jobs": 1, "compiled_alone": alone}
    result["rows"] = processes.without(rows, "stamp", "case")
    bars_apply = "H200" in result["device"]["name"] and not settings.toy
    result["variants"] = {v: summary(v, rows) for v in alone}
    result["verdicts"] = verdicts(result["variants"], alone) if bars_apply else []
    return result


def verdicts(variants: dict[str, dict[str, float]], alone: tuple[str, ...]) -> list[Row]:
    """Returns the verdict on every figure of mhc_inductor that has a bar.

    Compile times appear a second time, scaled to the processor of the machine that set the bars.
    """
    ours, bars = dict(variants.get("mhc_inductor", {})), dict(BARS)
    plain = variants.get("torch.compile", {}).get("forward_compile_s")
    if plain is not None and {"torch.compile", "torch.compile-forward"} & {*alone}:
        for what in [w for w in ours if w.endswith("_compile_s") and w in BARS]:
            scaled = f"{what} x {RECORD_COMPILE_S:g} / {plain:.1f}, plain torch.compile in the record and here"
            ours[scaled], bars[scaled] = ours[what] * RECORD_COMPILE_S / plain, BARS[what]
    return [{"what": w, **processes.against(ours[w], *limits)} for w, limits in bars.items() if w in ours]


def summary(variant: str, rows: list[Row]) -> dict[str, float]:
    """Returns the figures of one variant under flat names such as ``training_ms``."""
    names = {"median_ms": "ms", "compile_s": "compile_s", "peak_gib": "peak_gib", "loss": "loss"}
    mine = [row for row in rows if row["variant"] == variant]
    return {f"{row['part']}_{short}": row[long] for row in mine for long, short in names.items() if long in row}


# ---- the table

_COLUMNS = {
    "forward, ms": (".1f", "forward_ms"),
    "forward + backward, ms": (".1f", "training_ms"),
    "compile forward + training, s": (".1f", "forward_compile_s", "training_compile_s"),
    "peak of training, GiB": (".2f", "training_peak_gib"),
    "checkpointed: f + b, ms": (".1f", "checkpointed_ms"),
    "compile, s": (".1f", "checkpointed_compile_s"),
    "peak, GiB": (".2f", "checkpointed_peak_gib"),
    "loss": (".4f", "training_loss"),
}


def _cell(of: dict[str, float], spec: str, *names: str) -> str:
    return " + ".join(f"{of[n]:{spec}}" if n in of else "?" for n in names) if set(names) & set(of) else ""


VERDICTS = Table("", f"of {_LABELS[OURS]}||bar|goal", "{what}|{value:.2f}|{bar} {yes_bar}|{goal} {yes_goal}")
ROUTED = Table(
    "",
    "the pass|routed|fused|near misses|nodes|s|of the compile time",
    "{part}|{routed}|{fused}|{near_misses}|{nodes:,}|{seconds:.2f}|{share:.1f} %",
    lambda r: [r["routing"] | {"part": r["part"], "share": 100 * r["routing"]["share_of_compile"]}],
)


def _parts(result: Row) -> Iterable[str]:
    rows = [[_LABELS[v], *(_cell(of, *column) for column in _COLUMNS.values())] for v, of in result["variants"].items()]
    yield report.markdown(["", *_COLUMNS], rows)
    yield VERDICTS.markdown(result["verdicts"])
    yield ROUTED.markdown(r for r in result["rows"] if r.get("routing"))
    failed = [f"{r['variant']}, {r['part']}: {r['error']}" for r in result["rows"] if "error" in r]
    yield "\n".join(f"- failed: {line.splitlines()[0]}" for line in failed)


def table(result: Row) -> str:
    """Returns the run as Markdown."""
    v, made = result["versions"], result["settings"]
    s, count = made["size"], next((r["parameters"] for r in result["rows"] if "parameters" in r), 0)
    lines = [
        f"{result['device']['name']}, torch {v['torch']}, triton {v['triton']}, transformers {v['transformers']}, "
        f"Python {v['python']}",
        f"commit {report.commit_of(result)}, sources {report.sources_of(result)}, {result['date']}",
        f"DeepSeek-V4 of transformers, unmodified, random weights: {s['layers']} layers, D = {s['dim']}, "
        f"{s['batch']} x {s['seq']} tokens, {count / 1e6:.0f} M parameters",
        f"compile times are cold but for Python's byte code; alone, with all processors: {', '.join(made['compiled_alone'])}; "
        + (f"the others {made['jobs']} at once; " if made["jobs"] > 1 else "")
        + "each was timed while nothing compiled",
    ]
    return report.document("DeepSeek-V4 end to end", lines, *_parts(result))


write = report.writer(table)
