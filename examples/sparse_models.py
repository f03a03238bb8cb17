# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSeek-V3.2 or DeepSeek-V4 of transformers, unmodified, at growing lengths: eager, compiled, with mhc_inductor.

These models select the keys of each query with an indexer and then compute dense attention under a mask; DeepSeek-V4's
layers are in hyper-connections too. The report says which indexers, attentions and mHC formulas became ops, and why the
others did not. The picture shows time and memory against the length of the sequence. Weights and tokens are random.

    python examples/sparse_models.py            # a few minutes on two CPU cores; larger sizes on a GPU
    python examples/sparse_models.py --model deepseek_v4 --training
    python examples/sparse_models.py --help
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.table import Table
from torch import Tensor
from training import chosen, console, device_name, synchronize

import mhc_inductor
from mhc_inductor.explanation import explain
from mhc_inductor.progress import bars
from mhc_inductor.report import Report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"eager": "#bdbdbd", "torch.compile": "#b2abd2", "mhc_inductor": "#1b7837"}
BACKENDS = {"torch.compile": "inductor", "mhc_inductor": "mhc_inductor"}
ROUTED = {
    "indexers": ("index_topk", "index_scores"),
    "attentions": ("selection_attention", "selection_list_attention"),
    "mHC formulas": ("mhc_pre", "mhc_post", "mhc_head"),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of a call: ``heads`` heads, ``index_heads`` of ``index_dim``, ``topk`` keys a query."""

    layers: int
    dim: int
    heads: int
    latent: int
    head_dim: int
    index_heads: int
    index_dim: int
    topk: int
    lengths: tuple[int, ...]
    rounds: int
    vocab: int = 4096


DEFAULTS = {
    "cpu": Size(1, 64, 4, 32, 16, 4, 16, 16, (64, 128, 256), 5, 256),
    "cuda": Size(2, 2048, 32, 512, 128, 32, 128, 2048, (2048, 4096, 8192, 16384), 10),
}


@dataclasses.dataclass
class Run:
    """The figures of one way of running the model at one length: seconds, bytes, and results.

    ``failed`` says why there are none.
    """

    name: str
    length: int
    seconds: float = 0.0
    compile_s: float = 0.0
    peak_bytes: int = 0
    logits: Tensor | None = None
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    failed: str = ""


def _v32(size: Size) -> Any:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    rope = size.head_dim // 2
    config = DeepseekV32Config(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        intermediate_size=2 * size.dim,
        num_hidden_layers=size.layers,
        first_k_dense_replace=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        q_lora_rank=2 * size.latent,
        kv_lora_rank=size.latent,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=size.head_dim,
        v_head_dim=size.head_dim,
        index_n_heads=size.index_heads,
        index_head_dim=size.index_dim,
        index_topk=size.topk,
        max_position_embeddings=max(4096, *size.lengths),
        use_cache=False,
    )
    return DeepseekV32ForCausalLM._from_config(config, attn_implementation="sdpa")


def _v4(size: Size) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    config = DeepseekV4Config(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        num_hidden_layers=max(3, size.layers),
        layer_types=[kinds[i % 3] for i in range(max(3, size.layers))],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=min(128, size.lengths[0] // 2),
        num_attention_heads=size.heads,
        head_dim=2 * size.head_dim,
        q_lora_rank=size.latent,
        o_groups=min(4, size.heads),
        o_lora_rank=size.latent,
        index_n_heads=size.index_heads,
        index_head_dim=size.index_dim,
        index_topk=size.topk,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=size.dim // 2,
        mlp_layer_types=["moe"] * max(3, size.layers),
        max_position_embeddings=max(4096, *size.lengths),
        use_cache=False,
    )
    return DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")


MODELS = {"deepseek_v32": _v32, "deepseek_v4": _v4}


def build(model: str, size: Size, device: torch.device, seed: int) -> torch.nn.Module:
    """Returns the model with seeded weights: fp32 on a CPU; bf16 on a GPU, with mHC parameters in fp32."""
    torch.manual_seed(seed)
    made: torch.nn.Module = MODELS[model](size).to(device)
    if device.type == "cuda":
        made.to(torch.bfloat16)
        for name, parameter in made.named_parameters():
            # DeepSeek-V4's checkpoints keep these parameters in fp32.
            if not {"attn_hc", "ffn_hc", "hc_head"}.isdisjoint(name.split(".")):
                parameter.data = parameter.data.float()
    return made


def peak_on_cpu(call: Callable[[], Any]) -> int:
    """Returns the largest number of bytes that tensors took during ``call`` beyond those before, from a profile."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profile.start()
    call()
    profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        top = max(top, now)
    return top


class Call:
    """One way of running the model at one length."""

    def __init__(self, name: str, model: torch.nn.Module, ids: Tensor, training: bool) -> None:
        self.model, self.ids, self.training = model.train(training), ids, training
        torch._dynamo.reset()
        self.call: Any = torch.compile(model, backend=BACKENDS[name], dynamic=False) if name in BACKENDS else model

    def __call__(self) -> Tensor:
        if not self.training:
            with torch.no_grad():
                logits: Tensor = self.call(input_ids=self.ids).logits
            return logits
        self.model.zero_grad()
        out = self.call(input_ids=self.ids, labels=self.ids)
        out.loss.backward()
        logits = out.logits.detach()
        return logits

    def seconds(self) -> float:
        synchronize(self.ids.device)
        started = time.perf_counter()
        self()
        synchronize(self.ids.device)
        return time.perf_counter() - started

    def peak(self) -> int:
        """Returns the bytes that a call takes beyond the model's weights and what else was there."""
        if self.ids.device.type == "cpu":
            return peak_on_cpu(self)
        self.model.zero_grad()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() - before


def measure(name: str, model: torch.nn.Module, ids: Tensor, training: bool, rounds: int) -> Run:
    """Compiles ``model`` if ``name`` has a backend; returns time, memory and results, or why there are none."""
    run = Run(name, ids.shape[1])
    try:
        call = Call(name, model, ids, training)
        first = call.seconds()
        call.seconds()
        run.seconds = statistics.median(call.seconds() for _ in range(rounds))
        run.compile_s = max(0.0, first - run.seconds) if name in BACKENDS else 0.0
        run.peak_bytes = call.peak()
        run.logits = call().float()
        run.gradients = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    except torch.OutOfMemoryError:
        run = Run(name, ids.shape[1], failed="out of memory")
    model.zero_grad()
    return run


def difference(run: Run, eager: Run) -> float | None:
    """Returns the relative difference of logits and gradients from the eager run, or None where one failed."""
    if run.logits is None or eager.logits is None:
        return None
    if set(run.gradients) != set(eager.gradients):
        raise RuntimeError(f"{run.name}: other parameters have gradients: {set(run.gradients) ^ set(eager.gradients)}")
    pairs = [(run.logits, eager.logits), *((g, eager.gradients[n]) for n, g in run.gradients.items())]
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return math.sqrt(apart / sum(float(b.double().square().sum()) for _, b in pairs))


def table_of(runs: list[Run], title: str) -> Table:
    """Returns a row for each length and way of running the model."""
    table = Table(title=title, title_justify="left")
    for heading in ("tokens", "", "ms", "x eager", "peak, MiB", "compile, s", "difference from eager"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=not heading)
    for run in runs:
        eager = next(r for r in runs if r.name == "eager" and r.length == run.length)
        if run.failed:
            table.add_row(str(run.length), run.name, run.failed)
            continue
        apart = difference(run, eager) if run is not eager else None
        cells = [f"{run.seconds * 1e3:.1f}", "" if eager.failed else f"{eager.seconds / run.seconds:.2f}"]
        cells += [f"{run.peak_bytes / 2**20:.1f}", f"{run.compile_s:.1f}" if run.name in BACKENDS else ""]
        table.add_row(str(run.length), run.name, *cells, "" if apart is None else f"{apart:.1e}")
    return table


def draw(runs: list[Run], out: pathlib.Path, title: str) -> None:
    """Draws time and memory against the length of the sequence, a line for each way of running the model."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    panels: list[tuple[str, Callable[[Run], float]]] = [
        ("time, ms", lambda r: r.seconds * 1e3),
        ("peak memory of a call, MiB", lambda r: r.peak_bytes / 2**20),
    ]
    for axis, (label, value) in zip(axes, panels, strict=True):
        for name, color in COLORS.items():
            of = [r for r in runs if r.name == name and not r.failed]
            axis.plot([r.length for r in of], [value(r) for r in of], marker="o", color=color, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_title(label, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def counts(report: Report) -> str:
    """Returns how many indexers, attentions and mHC formulas were routed, as text."""
    found = {what: sum(r.op in ops for r in report.routed) for what, ops in ROUTED.items()}
    return ", ".join(f"{n} {what}" for what, n in found.items())


def compare(
    model: str, device: torch.device, size: Size, training: bool, seed: int, out: pathlib.Path
) -> tuple[Report, list[Run]]:
    """Explains the model, measures it in three ways at every length, prints the table and draws the picture."""
    import transformers

    made = build(model, size, device, seed)
    parameters = sum(p.numel() for p in made.parameters())
    where = device_name(device)
    what = "forward + backward" if training else "forward"
    console.print(
        f"model: {model} of transformers {transformers.__version__}, {parameters / 1e6:.2f} M parameters, {what}; "
        f"mhc_inductor {mhc_inductor.__version__}, torch {torch.__version__}, {where}"
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(size.vocab, (1, max(size.lengths)), generator=generator).to(device)
    first = ids[:, : size.lengths[0]]
    made.train(training)
    with torch.set_grad_enabled(training):
        report = explain(made, input_ids=first, **({"labels": first} if training else {}))
    console.print(f"routed: {counts(report)}")
    if report.routed and all(r.as_written for r in report.routed):
        console.print(
            f"On this device mhc_inductor keeps these formulas as written at {first.shape[1]} tokens, since Inductor's "
            "code for them is faster: it then runs what torch.compile runs, and their times differ by noise. The kernels "
            "are for GPUs.",
            style="dim",
        )
    runs: list[Run] = []
    with bars(console, width=13) as bar:
        tasks = {n: bar.add_task(n, total=len(size.lengths), note="") for n in ("eager", *BACKENDS)}
        for length in size.lengths:
            for name, task in tasks.items():
                bar.update(task, note=f"{length} tokens" + (": compiling, timing" if name in BACKENDS else ""))
                runs.append(measure(name, made, ids[:, :length], training, size.rounds))
                bar.update(task, advance=1, note="")
    title = f"{model} of transformers, unmodified: {what} ({where})"
    console.print(table_of(runs, title))
    console.print(
        "torch.compile compiles first, so mhc_inductor finds its caches filled: "
        "python -m benchmarks sparse_models compares compile times with cold caches",
        style="dim",
    )
    draw(runs, out, title)
    console.print(f"picture: {out.resolve()}", soft_wrap=True)
    return report, runs


def main(
    model: Annotated[str, typer.Option(help="deepseek_v32 or deepseek_v4.")] = "deepseek_v32",
    training: Annotated[
        bool, typer.Option("--training", help="Measure forward and backward, not the forward.")
    ] = False,
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence, by comma.")] = "",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; DeepSeek-V4 has at least 3.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Keys that a query selects.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed calls of each.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("sparse_models.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
) -> None:
    """Runs a model with sparse attention eager, compiled, and compiled with mhc_inductor, at growing lengths."""
    if model not in MODELS:
        raise typer.BadParameter(f"--model must be one of {', '.join(MODELS)}, got {model}")
    try:
        asked = tuple(int(w) for w in lengths.split(",") if w.strip())
    except ValueError:
        raise typer.BadParameter(f"--lengths must be whole numbers by comma, got {lengths}") from None
    given: dict[str, Any] = {"layers": layers, "topk": topk, "rounds": rounds, "lengths": asked or None}
    where, size = chosen(device, DEFAULTS, given)
    compare(model, where, size, training, seed, out)


if __name__ == "__main__":
    typer.run(main)
