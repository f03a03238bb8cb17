# SPDX-License-Identifier: Apache-2.0
"""Finds needles in long real text: dense attention, ``nn.NativeSparseAttention`` and ``nn.SparseIndexer``.

A small model learns to look up ``<ab=x>`` in the sources of Python's standard library. It first trains on short texts,
where the 16 selected blocks cover the whole text, so that one dense model is enough. From its weights four runs then
train on long texts, from the same seed on the same batches: dense attention, selected attention eagerly, selected
attention compiled with ``backend="mhc_inductor"``, and attention to single tokens that a trained index chooses. The
index warms up alone before, from dense attention, which stays as it is.

    python examples/needle.py            # about four minutes on two CPU cores; longer texts and more steps on a GPU
    python examples/needle.py --help
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import needle_picture
import needle_task
import stdlib_text
import torch
import training
import typer
from needle_model import NeedleModel, by_token, sparse
from needle_picture import TOKENS
from needle_tokens import TokenAttention
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from training import console, device_name, synchronize

import mhc_inductor
from mhc_inductor.progress import bars

BLOCK, TOP_K, COMPRESS, WINDOW = 32, 16, 8, 32
CHOSEN = 64
"""Tokens that the index chooses for a query."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SHORT = ((0.25, 64, 24, 2), (0.35, 32, 48, 4), (0.4, 16, 96, 8))
"""Lessons on short texts: share of the steps, sequences, bytes, needles."""
DENSE, EAGER, COMPILED = "dense, eager", "selected, eager", "selected, compiled"
DENSE_COMPILED = "dense, compiled"
SUBJECT = training.Subject("needles", kernels="selection_", without="selection attention ran as formulas")
SLOW = 1.0
"""Seconds of a forward of the run on tokens beyond which it is not timed on longer texts: it chooses for every query."""


@dataclasses.dataclass(frozen=True)
class Size(training.Size):
    """``short`` steps on short texts, then ``steps`` on texts of ``seq`` bytes; evaluation up to ``longest`` bytes."""

    short: int
    heads: int
    head_dim: int
    needles: int
    longest: int
    tried: int
    """Total number of bytes evaluated at each length."""
    warm: int
    """Steps in which the index learns alone, before the run on tokens."""


DEFAULTS = {
    "cpu": Size(150, 64, 1, 3, 768, 320, 4, 16, 6, 16384, 1 << 15, 30),
    "cuda": Size(400, 64, 1, 16, 2048, 400, 16, 16, 6, 16384, 1 << 18, 100),
}


@dataclasses.dataclass
class Run:
    """One training run on long texts: nats per answer, nats per block or of the index's loss, seconds per step.

    ``warm``: the index's loss over all tokens in the steps before.
    """

    name: str
    model: NeedleModel
    loss: list[float] = dataclasses.field(default_factory=list)
    block: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)
    warm: list[float] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def learning_rate(step: int, steps: int) -> float:
    """Returns the learning rate: linear warm-up over 5 % of the steps, then a cosine to a tenth of the peak."""
    return 5e-3 * min(1.0, (step + 1) / (0.05 * steps)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def short_texts(text: Tensor, steps: int, seed: int) -> Iterator[needle_task.Batch]:
    generator = torch.Generator().manual_seed(seed)
    ends = [steps * sum(lesson[0] for lesson in SHORT[: i + 1]) for i in range(len(SHORT))]
    for step in range(steps):
        _, batch, seq, needles = next((s for s, end in zip(SHORT, ends, strict=True) if step < end), SHORT[-1])
        yield needle_task.make(text, batch, seq, needles, generator)


def long_texts(text: Tensor, size: Size, seed: int) -> Iterator[needle_task.Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(size.steps):
        yield needle_task.make(text, size.batch, size.seq, size.needles, generator)


def train(run: Run, batches: Iterator[needle_task.Batch], steps: int, bar: Progress, compiled: bool = False) -> Run:
    """Trains ``run.model`` in place on ``steps`` batches and times every step."""
    model, device = run.model, next(run.model.parameters()).device
    call = torch.compile(model.loss, backend="mhc_inductor", dynamic=False) if compiled else model.loss
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    task = bar.add_task(run.name, total=steps, note="first call: compiling" if compiled else "")
    for step, batch in enumerate(batches):
        b = batch.to(device)
        synchronize(device)
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        nats, block = call(b.tokens, b.ask, b.answer, b.where)
        (nats + block).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        run.step_s.append(time.perf_counter() - started)
        run.loss.append(nats.item())
        run.block.append(block.item())
        bar.update(task, advance=1, note=f"{run.loss[-1]:.3f} nats an answer, {run.step_s[-1] * 1e3:.0f} ms a step")
    # The first call compiles and then does the work of one step.
    run.compile_s = max(0.0, run.step_s[0] - run.median_s)
    return run


def warm_up(run: Run, batches: Iterator[needle_task.Batch], steps: int, bar: Progress) -> Run:
    """Trains the index of ``run.model`` in place on ``steps`` batches; its attention is dense and learns nothing."""
    device = next(run.model.parameters()).device
    index = [parameter for name, parameter in run.model.named_parameters() if "index_" in name]
    optimizer = torch.optim.AdamW(index, lr=5e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    task = bar.add_task("index, warm-up", total=steps, note="")
    for batch in batches:
        loss = run.model.warm_up_loss(batch.to(device).tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.warm.append(loss.item())
        bar.update(task, advance=1, note=f"{run.warm[-1]:.3f} nats a query")
    return run


@torch.no_grad()
def accuracy(
    model: NeedleModel, text: Tensor, length: int, size: Size, seed: int, step: Callable[[], None]
) -> list[float]:
    """Returns the share of right answers by the depth of the needle, on texts of ``length`` bytes."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    right = torch.zeros(size.needles)
    rounds = max(2, size.tried // length)
    for _ in range(rounds):
        batch = needle_task.make(text, 1, length, size.needles, generator)
        b = batch.to(device)
        hit = (model.answers(b.tokens, b.ask).argmax(-1) == b.answer).float().cpu()
        right.scatter_add_(0, batch.depth[0], hit[0])
        step()
    return (right / rounds).tolist()


@torch.no_grad()
def forward_seconds(call: Callable[[Tensor, Tensor], Tensor], batch: needle_task.Batch, calls: int) -> float:
    """Returns the median time of a forward over one sequence, after one untimed call."""
    device = batch.tokens.device
    samples = []
    for _ in range(calls + 1):
        synchronize(device)
        started = time.perf_counter()
        call(batch.tokens, batch.ask)
        synchronize(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def chosen_blocks(model: NeedleModel, batch: needle_task.Batch) -> tuple[list[list[bool]], list[int]]:
    """Returns for each question of the first sequence the selected blocks, and the block that holds its answer."""
    count = -(-batch.tokens.shape[1] // BLOCK)
    blocks = model.selected(batch.tokens)[0, batch.ask].long()
    marks = torch.zeros(len(blocks), count + 1, dtype=torch.bool, device=blocks.device)
    marks.scatter_(1, torch.where(blocks < 0, count, blocks), True)
    return marks[:, :count].tolist(), (batch.where[0] // BLOCK).tolist()


def chosen_tokens(model: NeedleModel, batch: needle_task.Batch) -> list[list[int]]:
    """Returns for each question of the first sequence the tokens that its index chose."""
    layer = model.block.attention
    assert isinstance(layer, TokenAttention)
    with torch.no_grad():
        picks = layer.chosen(model.block.mixed(model.embed(batch.tokens)), batch.ask)
    return [[at for at in row if at >= 0] for row in picks[0, :, 0].tolist()]


def table_of(runs: list[Run], p: needle_picture.Picture) -> Table:
    table = Table(title="Needles: dense against selected, eager against compiled", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    kind = {DENSE: "dense", EAGER: "selected", COMPILED: "selected", TOKENS: "tokens"}

    def ends(nats: list[float]) -> str:
        return f"{nats[0]:.3f} / {statistics.mean(nats[-10:]):.3f}" if nats else ""

    def add(label: str, show: Callable[[Run], str]) -> None:
        table.add_row(label, *(show(run) for run in runs))

    add("compile time", lambda r: f"{r.compile_s:.1f} s" if r.name == COMPILED else "")
    add("median training step", lambda r: f"{r.median_s * 1e3:.1f} ms")
    add("nats an answer, first / last 10", lambda r: ends(r.loss))
    if any(run.name == TOKENS for run in runs):
        add("index loss, warm-up", lambda r: ends(r.warm))
        add("index loss, training", lambda r: ends(r.block if r.name == TOKENS else []))
    for length in p.accuracy["dense"]:
        name = needle_picture.tokens(length)

        def right(r: Run, length: int = length) -> str:
            return "" if r.name == EAGER else f"{statistics.mean(p.accuracy[kind[r.name]][length]):.0%}"

        add(f"right answers, {name}", right)
    for length in sorted({max(p.seconds[run.name]) for run in runs}):
        name = needle_picture.tokens(length)

        def seconds(r: Run, length: int = length) -> str:
            by_length = p.seconds.get(r.name, {})
            return f"{by_length[length] * 1e3:.0f} ms" if length in by_length else ""

        add(f"forward, {name}", seconds)
    return table


def trained(
    corpus: stdlib_text.Corpus, model: NeedleModel, size: Size, seed: int, tokens: bool, bar: Progress
) -> list[Run]:
    """Trains ``model`` on short texts, and from its weights dense and selected attention, and with ``tokens`` an index."""
    train(Run("short texts", model), short_texts(corpus.train, size.short, seed), size.short, bar)
    # With at most TOP_K blocks all are selected, so both kinds of attention share the model for short texts.
    runs = [
        Run(EAGER, sparse(model, BLOCK, TOP_K, COMPRESS, WINDOW)),
        Run(COMPILED, sparse(model, BLOCK, TOP_K, COMPRESS, WINDOW)),
    ]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    if tokens:
        runs.append(Run(TOKENS, by_token(model, CHOSEN)))
        # Over all tokens a step costs the square of the length, so the texts are shorter.
        warm = dataclasses.replace(size, steps=size.warm, seq=max(96, size.seq // 3))
        warm_up(runs[-1], long_texts(corpus.train, warm, seed + 2), size.warm, bar)
    runs.insert(0, Run(DENSE, model))
    for run in runs:
        train(run, long_texts(corpus.train, size, seed + 1), size.steps, bar, compiled=run.name == COMPILED)
    return runs


def speeds(
    models: dict[str, NeedleModel], text: Callable[[int], needle_task.Batch], lengths: list[int], bar: Progress
) -> dict[str, dict[int, float]]:
    """Returns the seconds of a forward by way of calling and by length."""
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        DENSE: models["dense"],
        DENSE_COMPILED: torch.compile(models["dense"], backend="mhc_inductor", dynamic=True),
        EAGER: models["selected"],
        COMPILED: torch.compile(models["selected"], backend="mhc_inductor", dynamic=True),
    }
    if "tokens" in models:
        calls[TOKENS] = models["tokens"]
    task = bar.add_task("speed", total=len(calls) * len(lengths), note="")
    seconds: dict[str, dict[int, float]] = {name: {} for name in calls}
    for length in lengths:
        batch = text(length)
        for name, call in calls.items():
            bar.update(task, note=f"{name}, {length} bytes")
            if name != TOKENS or all(s < SLOW for s in seconds[TOKENS].values()):
                seconds[name][length] = forward_seconds(call, batch, 5 if batch.tokens.is_cuda else 2)
            bar.update(task, advance=1)
    return seconds


def compare(
    device: torch.device, size: Size, seed: int, out: pathlib.Path, tokens: bool = False
) -> tuple[list[Run], needle_picture.Picture]:
    """Trains three runs, or four with ``tokens``, evaluates, times, prints and draws.

    Returns the runs and the picture's data.
    """
    corpus = stdlib_text.load()
    torch.manual_seed(seed)
    model = NeedleModel(size.dim, size.heads, size.head_dim).to(device)
    lengths = [n for n in LENGTHS if n <= size.longest] or [size.longest]

    def text(length: int) -> needle_task.Batch:
        seeded = torch.Generator().manual_seed(seed)
        return needle_task.make(corpus.valid, 1, length, size.needles, seeded).to(device)

    with bars(console, width=18) as bar:
        runs = trained(corpus, model, size, seed, tokens, bar)
        models = {"dense": runs[0].model, "selected": runs[2].model} | ({"tokens": runs[3].model} if tokens else {})
        rounds = sum(max(2, size.tried // n) for n in lengths)
        found: dict[str, dict[int, list[float]]] = {}
        for kind, m in models.items():
            task = bar.add_task(f"{kind}: answers", total=rounds, note="")
            step = lambda t=task: bar.update(t, advance=1)  # noqa: E731
            found[kind] = {n: accuracy(m, corpus.valid, n, size, seed, step) for n in lengths}
        seconds = speeds(models, text, lengths, bar)
    last = text(lengths[-1])
    blocks, holds = chosen_blocks(models["selected"], last)
    losses = {run.name: run.loss for run in runs}
    chosen = chosen_tokens(models["tokens"], last) if tokens else None
    p = needle_picture.Picture(found, seconds, losses, blocks, holds, BLOCK, chosen)

    parameters = sum(t.numel() for t in models["selected"].parameters())
    shape = f"trained on {size.batch} x {size.seq} bytes a step, {size.needles} needles each"
    console.print(
        f"model: {parameters / 1e3:.0f} K parameters, {size.heads} heads of {size.head_dim}, {TOP_K} of {BLOCK}-byte blocks a "
        f"query{f', {CHOSEN} tokens with an index' if tokens else ''}; {shape}; mhc_inductor {mhc_inductor.__version__}, torch {torch.__version__}, {device_name(device)}"
    )
    console.print(table_of(runs, p))
    gaps = [abs(a - b) for a, b in zip(runs[1].loss, runs[2].loss, strict=True)]
    # Once rounding makes one query select another block, the two runs diverge: after some dozens of steps.
    console.print(
        f"selected, eager against compiled: largest difference of the loss {max(gaps[:20]):.2e} nats in the first "
        f"{len(gaps[:20])} steps, {max(gaps):.2e} in all"
    )
    b = next(long_texts(corpus.train, size, seed)).to(device)
    compiled = torch.compile(models["selected"].loss, backend="mhc_inductor", dynamic=False)
    training.say_what_ran(lambda: torch.stack(compiled(b.tokens, b.ask, b.answer, b.where)).sum(), device, SUBJECT)
    needle_picture.draw(p, out, f"{shape}, {device_name(device)}")
    console.print(f"picture: {out.resolve()}", soft_wrap=True)
    return runs, p


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run on long texts.")] = None,
    short: Annotated[int | None, typer.Option(min=1, help="Steps on short texts before.")] = None,
    dim: Annotated[int | None, typer.Option(min=8, help="Width of the model.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of a head.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(min=96, help="Bytes a sequence in training.")] = None,
    longest: Annotated[int | None, typer.Option(min=96, help="Bytes of the longest text to answer on.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("needle.png"),
    warm: Annotated[int | None, typer.Option(min=0, help="Steps in which the index learns alone.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, texts and needles.")] = 0,
    tokens: Annotated[bool, typer.Option(help="Also train attention to tokens that an index chooses.")] = True,
) -> None:
    """Trains dense and sparse attention to find needles; compares answers and speeds, eager and compiled."""
    given = {"steps": steps, "short": short, "dim": dim, "heads": heads, "head_dim": head_dim}
    given |= {"batch": batch, "seq": seq, "longest": longest, "warm": warm}
    where, size = training.chosen(device, DEFAULTS, given)
    compare(where, size, seed, out, tokens)


if __name__ == "__main__":
    typer.run(main)
