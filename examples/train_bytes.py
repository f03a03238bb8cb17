"""Train a byte-level transformer with mHC residuals on the sources of Python's standard library, twice.

Eager and ``torch.compile(model, backend="mhc_inductor")`` start from the same weights and see the same
batches. The table and the picture at the end compare their losses and speeds.

    python examples/train_bytes.py            # a few minutes on two CPU cores; larger sizes on a GPU
    python examples/train_bytes.py --help
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import stdlib_text
import torch
import torch.nn.functional as F
import typer
from byte_model import ByteTransformer, continue_text
from picture import draw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import mhc_inductor

VALID_BATCHES = 16
console = Console(highlight=False)
Call = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """What one training step does; ``batch`` sequences of ``seq`` bytes."""

    steps: int
    dim: int
    layers: int
    batch: int
    seq: int


DEFAULTS = {"cpu": Size(250, 128, 2, 8, 128), "cuda": Size(600, 768, 8, 16, 1024)}


@dataclasses.dataclass
class Run:
    """One training run: losses in nats a byte, times in seconds."""

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
    """Linear warm-up over 5 % of the steps, then a cosine to a tenth of the peak."""
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


def validate(call: Call, corpus: stdlib_text.Corpus, size: Size) -> float:
    # Gradients stay enabled: the training graph serves here too, and nothing is compiled a second time.
    pairs = stdlib_text.batches(corpus.valid, size.batch, size.seq, VALID_BATCHES, seed=0)
    return sum(loss_of(call, inputs, targets).item() for inputs, targets in pairs) / VALID_BATCHES


def train(
    name: str,
    model: ByteTransformer,
    call: Call,
    corpus: stdlib_text.Corpus,
    size: Size,
    seed: int,
    bar: Progress,
) -> Run:
    """Train ``model`` in place through ``call`` (itself, or itself compiled) and time every step."""
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
            run.valid.append((step, validate(call, corpus, size)))
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
    run.valid.append((size.steps, validate(call, corpus, size)))
    run.compile_s -= 2 * run.median_s  # two steps' worth of work were done while compiling
    run.tokens_per_s = size.batch * size.seq / run.median_s
    return run


def launched_kernels(call: Call, corpus: stdlib_text.Corpus, size: Size) -> dict[str, int]:
    """Names and counts of this package's GPU kernels in one more forward and backward, from the profiler."""
    inputs, targets = next(stdlib_text.batches(corpus.train, size.batch, size.seq, 1, seed=0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss_of(call, inputs, targets).backward()
        synchronize(inputs.device)
    return {event.key: event.count for event in profile.key_averages() if "mhc" in event.key}


def table_of(runs: list[Run]) -> Table:
    table = Table(title="mHC byte transformer, eager against compiled", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("first call (compile time)", lambda r: f"{max(0.0, r.compile_s):.1f} s"),
        ("median step", lambda r: f"{r.median_s * 1e3:.1f} ms"),
        ("tokens a second", lambda r: f"{r.tokens_per_s:,.0f}"),
        ("speed", lambda r: f"{runs[0].median_s / r.median_s:.2f} x"),
        ("training loss, first / last", lambda r: f"{r.loss[0]:.4f} / {r.loss[-1]:.4f}"),
        ("validation loss", lambda r: f"{r.valid[-1][1]:.4f}"),
        ("validation bits a byte", lambda r: f"{r.valid[-1][1] / math.log(2):.4f}"),
    ]
    for label, show in rows:
        table.add_row(label, *(show(run) for run in runs))
    return table


def say_what_ran(call: Call, corpus: stdlib_text.Corpus, size: Size) -> None:
    device = corpus.train.device
    if device.type != "cuda":
        console.print(
            f"kernels: none on {device.type}, by design: Inductor decomposed and fused the mHC formulas "
            "(python -m mhc_inductor doctor says what a machine runs)"
        )
        return
    launched = launched_kernels(call, corpus, size)
    if not launched:
        raise RuntimeError(
            "the compiled step launched none of this package's kernels; see python -m mhc_inductor doctor"
        )
    console.print(f"kernels of one compiled step on {torch.cuda.get_device_name(device)}:")
    for name, count in sorted(launched.items()):
        console.print(f"  {count:4d} x {name}")


def compare(device: torch.device, size: Size, seed: int, out: pathlib.Path, sample: int = 200) -> list[Run]:
    """Train eager, then compiled; print table, sample and what ran; draw the picture. Returns both runs."""
    corpus = stdlib_text.load()
    console.print(
        f"text: {len(corpus.train) / 1e6:.1f} MB of {corpus.train_files} files to train on, "
        f"{len(corpus.valid) / 1e6:.1f} MB of {corpus.valid_files} other files to validate"
    )
    corpus = corpus.to(device)
    streams = torch.bfloat16 if device.type == "cuda" else torch.float32
    runs: list[Run] = []
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
        for name in ("eager", "compiled"):
            torch.manual_seed(seed)
            model = ByteTransformer(size.dim, size.layers, size.seq, streams=streams).to(device)
            call: Call = torch.compile(model, backend="mhc_inductor") if name == "compiled" else model
            runs.append(train(name, model, call, corpus, size, seed, bar))

    shape = f"D = {size.dim}, {size.layers} layers, {size.batch} x {size.seq} bytes a step"
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"model: {parameters / 1e6:.2f} M parameters, {shape}, n = {model.n} streams in {streams}; "
        f"mhc_inductor {mhc_inductor.__version__}, torch {torch.__version__}, {device_name(device)}"
    )
    console.print(table_of(runs))
    gap = max(abs(a - b) for a, b in zip(runs[0].loss, runs[1].loss, strict=True))
    console.print(f"largest difference between the two training losses at any step: {gap:.2e} nats")
    prompt = b"def read_lines(path):\n"
    text = continue_text(model, prompt, sample, size.seq, seed)
    console.print(f"{sample} bytes sampled from the compiled run's weights after {prompt!r}:")
    console.print(text.decode(errors="replace"), style="dim", markup=False)
    say_what_ran(call, corpus, size)
    draw(
        runs,
        out,
        f"{shape}, {device_name(device)}",
    )
    console.print(f"picture: {out.resolve()}", soft_wrap=True)
    return runs


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    dim: Annotated[int | None, typer.Option(min=32, help="Width D of a stream, a multiple of 32.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of one attention and one MLP.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Bytes a sequence.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("train_bytes.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and the sample.")] = 0,
) -> None:
    """Train eager and compiled from one seed on the same batches; compare losses and speeds."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in DEFAULTS:
        raise typer.BadParameter(f"--device must be cpu or cuda, got {where}")
    given = {"steps": steps, "dim": dim, "layers": layers, "batch": batch, "seq": seq}
    size = dataclasses.replace(DEFAULTS[where.type], **{k: v for k, v in given.items() if v is not None})
    if size.dim % 32:
        raise typer.BadParameter(f"--dim must be a multiple of 32, got {size.dim}")
    compare(where, size, seed, out)


if __name__ == "__main__":
    typer.run(main)
