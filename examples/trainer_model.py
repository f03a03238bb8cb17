# SPDX-License-Identifier: Apache-2.0
"""What the examples of the Trainer and of Accelerate share: a small DeepSeek-V4, its text, and a table of losses."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Annotated

import stdlib_text
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mhc_inductor

console = Console(highlight=False)
ROWS = 12
"""Rows of the table of losses."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training: ``steps`` optimizer steps, each on ``accumulate`` batches of ``batch`` sequences of ``seq`` bytes.

    ``every``: steps from one checkpoint to the next. ``folder``: where the checkpoints are. ``device``: "cpu" or "cuda".
    """

    folder: pathlib.Path
    steps: int = 12
    every: int = 4
    accumulate: int = 2
    batch: int = 2
    seq: int = 64
    layers: int = 1
    dim: int = 64
    bf16: bool = True
    device: str = "cpu"
    seed: int = 0


Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")]
Every = Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches of a step and process.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a batch.")]
Seq = Annotated[int, typer.Option(min=2, help="Bytes of a sequence.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers, each an attention and experts.")]
Dim = Annotated[int, typer.Option(min=32, help="Width D of a stream, a multiple of 32.")]
Bf16 = Annotated[bool, typer.Option(help="Compute in bf16; weights stay in fp32.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")]
Folder = Annotated[pathlib.Path, typer.Option(help="Checkpoints.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and text.")]


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Makes the ordinary backend find formulas."""
    mhc_inductor.enable()
    try:
        yield
    finally:
        mhc_inductor.disable()


def checked(plan: Plan) -> Plan:
    """Returns the plan with its device chosen. Raises BadParameter for a wrong width or device."""
    if plan.dim % 32:
        raise typer.BadParameter(f"--dim must be a multiple of 32, got {plan.dim}")
    device = plan.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device!r}")
    return dataclasses.replace(plan, device=device)


def sequences(plan: Plan, count: int) -> list[dict[str, Tensor]]:
    """Returns ``count`` samples of the standard library's sources: int64 ``[seq]`` under "input_ids" and "labels"."""
    text = stdlib_text.load().train
    ids, _ = next(stdlib_text.batches(text, count, plan.seq, 1, plan.seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def build(plan: Plan) -> nn.Module:
    """Returns ``DeepseekV4ForCausalLM`` on the CPU, in fp32, with seeded weights.

    Parameters that no gradient reaches are frozen. These are an indexer's, whose choice of keys has no gradient, and on
    short sequences those of a compressor. FSDP2's checkpoints hold no state of the optimizer for them, and loading one
    fails where it is expected.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=256,
        hidden_size=plan.dim,
        num_hidden_layers=plan.layers,
        num_attention_heads=2,
        head_dim=plan.dim // 2,
        q_lora_rank=max(16, plan.dim // 4),
        o_groups=2,
        o_lora_rank=max(16, plan.dim // 8),
        index_n_heads=2,
        index_head_dim=max(16, plan.dim // 4),
        index_topk=64,
        n_routed_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=plan.dim // 2,
        mlp_layer_types=["moe"] * plan.layers,
        max_position_embeddings=max(4096, plan.seq),
        use_cache=False,
    )
    torch.manual_seed(plan.seed)
    model = DeepseekV4ForCausalLM(config)
    ids = torch.arange(plan.seq).remainder(256)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    return model


def routed(before: Mapping[str, int]) -> dict[str, int]:
    """Returns how many ops the compiles since ``before``, an earlier ``mhc_inductor.counters()``, put into graphs."""
    now = {name: count - before.get(name, 0) for name, count in mhc_inductor.counters().items()}
    return {name: n for name, n in sorted(now.items()) if n and name.startswith(("routed ", "fused "))}


def compare(eager: list[float], compiled: list[float], ops: Mapping[str, int]) -> float:
    """Prints losses of both runs and the ops of the compiled one; returns the largest relative difference."""
    if len(eager) != len(compiled):
        raise RuntimeError(f"the eager run has {len(eager)} losses, the compiled one {len(compiled)}")
    apart = [abs(c - e) / e for e, c in zip(eager, compiled, strict=True)]
    table = Table(title="loss, nats a byte", title_justify="left")
    for column in ("step", "eager", "mhc_inductor", "relative difference"):
        table.add_column(column, justify="right")
    stride = max(1, len(eager) // ROWS)
    for i in range(stride - 1, len(eager), stride):
        table.add_row(str(i + 1), f"{eager[i]:.6f}", f"{compiled[i]:.6f}", f"{apart[i]:.1e}")
    console.print(table)
    said = ", ".join(f"{name} {count}" for name, count in ops.items())
    console.print(f"ops: {said or 'none: nothing was compiled in this start'}", soft_wrap=True)
    console.print(f"largest relative difference of {len(eager)} losses: {max(apart):.1e}")
    return max(apart)
