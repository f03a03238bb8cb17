# SPDX-License-Identifier: Apache-2.0
"""Trains a model on bytes twice from one seed, eager and compiled, and compares losses and speeds."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import stdlib_text
import torch
import torch.nn.functional as F
import typer
from picture import draw
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from torch import Tensor, nn

import mhc_inductor
from mhc_inductor.progress import bars

console = Console(highlight=False)
Call = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of a run: ``steps`` steps on ``batch`` sequences of ``seq`` bytes."""

    steps: int
    dim: int
    layers: int
    batch: int
    seq: int


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to train, as reports name it.

    ``title``: its name in titles. ``kernels``: a part of the names of the package's GPU kernels. ``without``: what runs
    instead of them on a CPU. ``valid_batches``: batches of one validation.
    """

    title: str
    kernels: str
    without: str
    valid_batches: int = 16


@dataclasses.dataclass
class Run:
    """One training run: losses in nats per byte, times in seconds."""

    name: str
    loss: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)
    valid: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def learning_rate(step: int, size: Size) -> float:
    """Returns the learning rate: linear warm-up over 5 % of the steps, then a cosine to a tenth of the peak."""
    peak = 4e-3 * math.sqrt(128 / size.dim)
    warm = max(1, size.steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, size.steps - warm)))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def loss_of(call: Call, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(call(inputs).flatten(0, 1), targets.flatten())


def validate(call: Call, corpus: stdlib_text.Corpus, size: Size, count: int) -> float:
    # Gradients stay enabled so that the compiled training graph is reused and nothing is compiled again.
    pairs = stdlib_text.batches(corpus.valid, size.batch, size.seq, count, seed=0)
    return sum(loss_of(call, inputs, targets).item() for inputs, targets in pairs) / count


def train(
    name: str,
    model: nn.Module,
    call: Call,
    corpus: stdlib_text.Corpus,
    size: Size,
    seed: int,
    bar: Progress,
    valid_batches: int,
) -> Run:
    """Trains ``model`` in place through ``call`` (the model, or the compiled model) and times every step."""
    run, device = Run(name), corpus.train.device
    task: TaskID = bar.add_task(name, total=size.steps, note="first call: compiling" if call is not model else "")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    started = time.perf_counter()
    for inputs, targets in stdlib_text.batches(corpus.train, size.batch, size.seq, 2, seed=seed):
        loss_of(call, inputs, targets).backward()
    synchronize(device)
    run.compile_s = time.perf_counter() - started
    optimizer.zero_grad()

    for step, (inputs, targets) in enumerate(
        stdlib_text.batches(corpus.train, size.batch, size.seq, size.steps, seed=seed)
    ):
        if step % max(1, size.steps // 6) == 0:
            run.valid.append((step, validate(call, corpus, size, valid_batches)))
        synchronize(device)
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        loss = loss_of(call, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        run.step_s.append(time.perf_counter() - started)
        run.loss.append(loss.item())
        bar.update(task, advance=1, note=f"loss {run.loss[-1]:.3f}, {run.step_s[-1] * 1e3:.1f} ms a step")
    run.valid.append((size.steps, validate(call, corpus, size, valid_batches)))
    run.compile_s -= 2 * run.median_s  # the calls that compile also do the work of two steps
    run.tokens_per_s = size.batch * size.seq / run.median_s
    return run


AnyRun = TypeVar("AnyRun")


def side_by_side(title: str, runs: Mapping[str, AnyRun], rows: Iterable[tuple[str, Callable[[AnyRun], str]]]) -> Table:
    """Returns a table with a column for each run, by name, and a row for each label and what it shows of a run."""
    table = Table("", title=title, title_justify="left")
    for name in runs:
        table.add_column(name, justify="right")
    for label, show in rows:
        table.add_row(label, *map(show, runs.values()))
    return table


def table_of(runs: list[Run], title: str) -> Table:
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("first call (compile time)", lambda r: f"{max(0.0, r.compile_s):.1f} s"),
        ("median step", lambda r: f"{r.median_s * 1e3:.1f} ms"),
        ("tokens a second", lambda r: f"{r.tokens_per_s:,.0f}"),
        ("speed", lambda r: f"{runs[0].median_s / r.median_s:.2f} x"),
        ("training loss, first / last", lambda r: f"{r.loss[0]:.4f} / {r.loss[-1]:.4f}"),
        ("validation loss", lambda r: f"{r.valid[-1][1]:.4f}"),
        ("validation bits a byte", lambda r: f"{r.valid[-1][1] / math.log(2):.4f}"),
    ]
    return side_by_side(f"{title}, eager against compiled", {run.name: run for run in runs}, rows)


def say_what_ran(loss: Callable[[], Tensor], device: torch.device, subject: Subject) -> None:
    """Prints names and counts of this package's GPU kernels in one more forward and backward, from the profiler."""
    if device.type != "cuda":
        console.print(
            f"kernels: none on {device.type}, by design: {subject.without} "
            "(python -m mhc_inductor doctor says what a machine runs)"
        )
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss().backward()
        synchronize(device)
    launched = {event.key: event.count for event in profile.key_averages() if subject.kernels in event.key}
    if not launched:
        raise RuntimeError(
            "the compiled step launched none of this package's kernels; see python -m mhc_inductor doctor"
        )
    console.print(f"kernels of one compiled step on {torch.cuda.get_device_name(device)}:")
    for name, count in sorted(launched.items()):
        console.print(f"  {count:4d} x {name}")


@torch.no_grad()
def continue_text(model: nn.Module, prompt: bytes, length: int, seq: int, seed: int) -> bytes:
    """Samples ``length`` bytes after ``prompt`` (temperature 0.8), each from the last ``seq`` bytes."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-seq:]], device=device)
        logits = model(window)[0, -1].cpu() / 0.8
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return bytes(text[len(prompt) :])


def compare(
    build: Callable[[], nn.Module],
    subject: Subject,
    device: torch.device,
    size: Size,
    seed: int,
    out: pathlib.Path,
    sample: int = 200,
    detail: str = "",
) -> list[Run]:
    """Trains eager, then compiled; prints table, sample and kernels, draws the picture, and returns both runs."""
    corpus = stdlib_text.load()
    console.print(
        f"text: {len(corpus.train) / 1e6:.1f} MB of {corpus.train_files} files to train on, "
        f"{len(corpus.valid) / 1e6:.1f} MB of {corpus.valid_files} other files to validate"
    )
    corpus = corpus.to(device)
    runs: list[Run] = []
    with bars(console, width=9) as bar:
        for name in ("eager", "compiled"):
            torch.manual_seed(seed)
            model = build().to(device)
            call: Call = torch.compile(model, backend="mhc_inductor") if name == "compiled" else model
            runs.append(train(name, model, call, corpus, size, seed, bar, subject.valid_batches))

    shape = f"D = {size.dim}, {size.layers} layers, {size.batch} x {size.seq} bytes a step"
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"model: {parameters / 1e6:.2f} M parameters, {shape}, {detail}; "
        f"mhc_inductor {mhc_inductor.__version__}, torch {torch.__version__}, {device_name(device)}"
    )
    console.print(table_of(runs, subject.title))
    gap = max(abs(a - b) for a, b in zip(runs[0].loss, runs[1].loss, strict=True))
    console.print(f"largest difference between the two training losses at any step: {gap:.2e} nats")
    prompt = b"def read_lines(path):\n"
    text = continue_text(model, prompt, sample, size.seq, seed)
    console.print(f"{sample} bytes sampled from the compiled run's weights after {prompt!r}:")
    console.print(text.decode(errors="replace"), style="dim", markup=False)
    inputs, targets = next(stdlib_text.batches(corpus.train, size.batch, size.seq, 1, seed=0))
    say_what_ran(lambda: loss_of(call, inputs, targets), device, subject)
    draw(runs, out, subject.title, f"{shape}, {device_name(device)}")
    console.print(f"picture: {out.resolve()}", soft_wrap=True)
    return runs


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


AnySize = TypeVar("AnySize")


def chosen(
    device: str | None, defaults: Mapping[str, AnySize], given: Mapping[str, Any]
) -> tuple[torch.device, AnySize]:
    """Returns the device of ``--device`` and its default size updated by ``given``; BadParameter for another device."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in defaults:
        raise typer.BadParameter(f"--device must be cpu or cuda, got {where}")
    known: Any = defaults[where.type]
    return where, dataclasses.replace(known, **{k: v for k, v in given.items() if v is not None})
