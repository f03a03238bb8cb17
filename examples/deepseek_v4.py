# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSeek-V4 of transformers, unmodified: eager, compiled, and compiled with mhc_inductor.

The model has random weights and reads the sources of Python's standard library as bytes. The report says which
formulas of the model became ops. The table and the picture compare the three ways of running the model.

    python examples/deepseek_v4.py            # two minutes or so on two CPU cores; larger sizes on a GPU
    python examples/deepseek_v4.py --help
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import matplotlib
import stdlib_text
import torch
import typer
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table
from torch import Tensor
from training import side_by_side

import mhc_inductor
from mhc_inductor.explanation import explain
from mhc_inductor.progress import bars
from mhc_inductor.report import Report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WARM_CALLS = 3
COLORS = {"eager": "#bdbdbd", "torch.compile": "#b2abd2", "mhc_inductor": "#1b7837"}
BACKENDS = {"torch.compile": "inductor", "mhc_inductor": "mhc_inductor"}
console = Console(highlight=False)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of one call: ``heads`` of width ``head_dim``, ``experts`` of hidden width ``hidden``.

    A vocabulary larger than the 256 byte values only enlarges the two embeddings.
    """

    layers: int
    dim: int
    heads: int
    head_dim: int
    experts: int
    hidden: int
    batch: int
    seq: int
    rounds: int
    vocab: int = 256


DEFAULTS = {"cpu": Size(1, 64, 2, 32, 2, 32, 2, 64, 10), "cuda": Size(4, 2048, 16, 128, 8, 512, 2, 2048, 30, 4096)}


@dataclasses.dataclass
class Run:
    """The figures of one way of running the model: seconds, bytes, and results."""

    name: str
    forward_s: float = 0.0
    both_s: float = 0.0
    compile_s: float = 0.0
    peak_bytes: int | None = None
    loss: float = 0.0
    logits: Tensor | None = None
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def model_of(size: Size) -> torch.nn.Module:
    """Returns ``DeepseekV4ForCausalLM`` of this size."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        head_dim=size.head_dim,
        q_lora_rank=max(16, size.dim // 4),
        o_groups=min(4, size.heads),
        o_lora_rank=max(16, size.dim // 8),
        index_n_heads=max(2, size.heads // 2),
        index_head_dim=max(16, size.head_dim // 2),
        index_topk=64,
        n_routed_experts=size.experts,
        num_experts_per_tok=min(2, size.experts),
        moe_intermediate_size=size.hidden,
        mlp_layer_types=["moe"] * size.layers,
        max_position_embeddings=max(4096, size.seq),
        use_cache=False,
    )
    return DeepseekV4ForCausalLM(config)


def build(size: Size, device: torch.device, seed: int) -> torch.nn.Module:
    """Returns the model with seeded weights: fp32 on a CPU; bf16 on a GPU, with mHC parameters in fp32."""
    torch.manual_seed(seed)
    model = model_of(size).to(device)
    if device.type == "cuda":
        model.to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            # DeepSeek-V4's checkpoints keep these parameters in fp32.
            if not {"attn_hc", "ffn_hc", "hc_head"}.isdisjoint(name.split(".")):
                parameter.data = parameter.data.float()
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def measure(name: str, model: torch.nn.Module, ids: Tensor, rounds: int, advance: Callable[[str], None]) -> Run:
    """Compiles ``model`` if ``name`` has a backend; times the forward without gradients and the step with them."""
    run, device = Run(name), ids.device
    torch._dynamo.reset()
    call: Any = torch.compile(model, backend=BACKENDS[name]) if name in BACKENDS else model

    @torch.no_grad()
    def forward() -> Tensor:
        logits: Tensor = call(input_ids=ids).logits
        return logits

    def both() -> Tensor:
        model.zero_grad()
        loss: Tensor = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    for step, label in ((forward, "forward"), (both, "forward + backward")):
        advance(f"{label}, first call" + (": compiling" if name in BACKENDS else ""))
        model.train(step is both)
        first = timed(step, device)
        for _ in range(WARM_CALLS):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        samples = []
        for i in range(rounds):
            advance(f"{label}, call {i + 1}")
            samples.append(timed(step, device))
        median = statistics.median(samples)
        run.compile_s += max(0.0, first - median) if name in BACKENDS else 0.0
        if step is forward:
            run.forward_s, run.logits = median, forward().float()
        else:
            run.both_s, run.loss = median, both().item()
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)
    run.gradients = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return run


def relative(a: Tensor, b: Tensor) -> float:
    """Returns ``||a - b|| / ||b||``."""
    return float((a - b).norm() / b.norm())


def agreement(run: Run, eager: Run) -> dict[str, float]:
    """Returns the relative differences from the eager run: logits, loss, and all gradients together."""
    assert run.logits is not None and eager.logits is not None
    if set(run.gradients) != set(eager.gradients):
        raise RuntimeError(f"{run.name}: other parameters have gradients: {set(run.gradients) ^ set(eager.gradients)}")
    flat = [torch.cat([g.flatten() for _, g in sorted(r.gradients.items())]) for r in (run, eager)]
    return {
        "logits": relative(run.logits, eager.logits),
        "loss": abs(run.loss - eager.loss) / eager.loss,
        "gradients": relative(flat[0], flat[1]),
    }


def table_of(runs: list[Run]) -> Table:
    eager = runs[0]
    compiled = {run.name: agreement(run, eager) for run in runs[1:]}
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("forward", lambda r: f"{r.forward_s * 1e3:.1f} ms"),
        ("forward + backward", lambda r: f"{r.both_s * 1e3:.1f} ms"),
        ("speed, forward + backward", lambda r: f"{eager.both_s / r.both_s:.2f} x"),
        ("compile time, both", lambda r: f"{r.compile_s:.1f} s" if r.name in BACKENDS else ""),
        ("loss", lambda r: f"{r.loss:.5f}"),
    ]
    if eager.peak_bytes is not None:
        rows.insert(4, ("peak memory", lambda r: f"{(r.peak_bytes or 0) / 2**30:.2f} GiB"))

    def difference(what: str) -> Callable[[Run], str]:
        return lambda r: f"{compiled[r.name][what]:.1e}" if r.name in compiled else ""

    rows += [(f"{what}, relative difference from eager", difference(what)) for what in ("logits", "loss", "gradients")]
    return side_by_side("DeepSeek-V4 of transformers, unmodified", {run.name: run for run in runs}, rows)


def draw(runs: list[Run], out: pathlib.Path, subtitle: str) -> None:
    """Draws bars of times, compile times and, on a GPU, memory."""
    panels: list[tuple[str, str, list[float]]] = [
        ("forward", "ms", [r.forward_s * 1e3 for r in runs]),
        ("forward + backward", "ms", [r.both_s * 1e3 for r in runs]),
        ("compile time, both", "s", [r.compile_s for r in runs]),
    ]
    if runs[0].peak_bytes is not None:
        panels.append(("peak memory", "GiB", [(r.peak_bytes or 0) / 2**30 for r in runs]))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 4.2), layout="constrained")
    names = [run.name for run in runs]
    for axis, (title, unit, values) in zip(axes, panels, strict=True):
        bars = axis.bar(names, values, color=[COLORS[name] for name in names], width=0.65)
        axis.bar_label(bars, [f"{v:.1f}" if v else "" for v in values], padding=3)
        axis.set_title(f"{title}, {unit}", loc="left", fontsize=10)
        axis.tick_params(axis="x", rotation=20)
        axis.margins(y=0.12)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"DeepSeek-V4 of transformers, unmodified ({subtitle})", fontsize=11)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def compare(device: torch.device, size: Size, seed: int, out: pathlib.Path) -> tuple[Report, list[Run]]:
    """Explains the model, measures it in three ways, prints the table and draws the picture."""
    import transformers

    corpus = stdlib_text.load().to(device)
    ids, _ = next(stdlib_text.batches(corpus.train, size.batch, size.seq, 1, seed=seed))
    model = build(size, device, seed)
    count = sum(p.numel() for p in model.parameters())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    shape = f"{size.layers} layers, D = {size.dim}, {size.batch} x {size.seq} bytes"
    console.print(
        f"model: DeepSeek-V4 of transformers {transformers.__version__}, {count / 1e6:.2f} M parameters, {shape}; "
        f"mhc_inductor {mhc_inductor.__version__}, torch {torch.__version__}, {where}"
    )
    report = explain(model, input_ids=ids, labels=ids)
    if not report.routed:
        raise RuntimeError(f"nothing in this version of the model was routed: {report}")
    runs: list[Run] = []
    with bars(console, width=13) as bar:
        for name in ("eager", *BACKENDS):
            task = bar.add_task(name, total=2 * (size.rounds + 1), note="")

            def advance(note: str, task: TaskID = task) -> None:
                bar.update(task, advance=1, note=note)

            runs.append(measure(name, model, ids, size.rounds, advance))
    console.print(table_of(runs))
    draw(runs, out, f"{shape}, {where}")
    console.print(f"picture: {out.resolve()}", soft_wrap=True)
    return report, runs


def main(
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of one attention and one MoE.")] = None,
    dim: Annotated[int | None, typer.Option(min=32, help="Width D of a stream.")] = None,
    heads: Annotated[int | None, typer.Option(min=2, help="Query heads, an even number.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=16, help="Width of a head.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Routed experts; a token goes to 2.")] = None,
    hidden: Annotated[int | None, typer.Option(min=8, help="Hidden width of an expert.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a call.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Bytes a sequence.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed calls of each kind.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("deepseek_v4.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and text.")] = 0,
) -> None:
    """Runs DeepSeek-V4 eager, compiled, and compiled with mhc_inductor; compares times and results."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in DEFAULTS:
        raise typer.BadParameter(f"--device must be cpu or cuda, got {where}")
    given = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "head_dim": head_dim,
        "experts": experts,
        "hidden": hidden,
        "batch": batch,
        "seq": seq,
        "rounds": rounds,
    }
    size = dataclasses.replace(DEFAULTS[where.type], **{k: v for k, v in given.items() if v is not None})
    if size.heads % 2:
        raise typer.BadParameter(f"--heads must be even, got {size.heads}")
    compare(where, size, seed, out)


if __name__ == "__main__":
    typer.run(main)
