# SPDX-License-Identifier: Apache-2.0
"""Trains a small DeepSeek-V4 with Accelerate, eager and compiled with mhc_inductor, and compares the losses.

On one process the model is whole. On several, started by torchrun, FSDP2 shards it and its layers are compiled one by
one. Gradients are accumulated, layers compute in bf16, and checkpoints are saved: whatever ends the program, the next
start goes on from the last one, and has the losses of a run that nothing ended.

    python examples/train_accelerate.py                                       # one process
    torchrun --nproc-per-node 2 examples/train_accelerate.py                  # FSDP2: gloo on a CPU, NCCL on GPUs
    python examples/train_accelerate.py --help
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Annotated, Any

import accelerate
import torch
import trainer_model
import typer
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from trainer_model import Plan, build, checked, compare, enabled, routed, sequences

import mhc_inductor
from mhc_inductor.progress import bars


class Way(str, enum.Enum):
    """Who compiles the layers."""

    accelerate = "accelerate"
    model = "model"


@dataclasses.dataclass
class Losses:
    """The loss of each step, as a part of the checkpoints."""

    steps: list[float] = dataclasses.field(default_factory=list)

    def state_dict(self) -> dict[str, list[float]]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.steps = state["steps"]


def accelerator_of(plan: Plan, way: Way) -> Accelerator:
    """Returns the accelerator: FSDP2 under torchrun. The backend "mhc_inductor" is refused: "inductor" and enable()."""
    dynamo = fsdp = None
    if way is Way.accelerate:
        dynamo = TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, use_regional_compilation=True)
    if "RANK" in os.environ:
        # Accelerate's own policy for bf16 sums gradients in bf16, and its loss is bf16.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",  # shards `_no_split_modules` of the model: its layers
            state_dict_type="SHARDED_STATE_DICT",
            mixed_precision_policy=policy if plan.bf16 else None,
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if plan.bf16 else "no",
        gradient_accumulation_steps=plan.accumulate,
        cpu=plan.device == "cpu",
        dynamo_plugin=dynamo,
        fsdp_plugin=fsdp,
    )
    if fsdp is not None and plan.device == "cpu":
        shard_on_cpu(accelerator, fsdp)
    return accelerator


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Makes Accelerate shard on CPUs, as it does on GPUs: it ignores an FSDP plugin there, and runs DDP."""
    # The attributes that AcceleratorState.__init__ sets where there is an accelerator (seen in 1.14 and 1.15).
    accelerator.state.fsdp_plugin = plugin
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP


@contextlib.contextmanager
def compiled_by(way: Way | None) -> Iterator[None]:
    """Routes what Accelerate compiles; for None the compiled layers run eagerly."""
    stance = torch.compiler.set_stance("force_eager" if way is None else "default")
    with enabled() if way is Way.accelerate else contextlib.nullcontext(), stance:
        yield


def last_checkpoint(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the last checkpoint in the folder, or None."""
    return max(folder.glob("step_*"), default=None)


def save(accelerator: Accelerator, folder: pathlib.Path, step: int) -> None:
    """Writes a checkpoint and removes all but the last two; one whose writing is cut off never gets its name."""
    part, whole = folder / "part", folder / f"step_{step:06d}"
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(whole)
        for old in sorted(folder.glob("step_*"))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def train(plan: Plan, accelerator: Accelerator, done: Losses, way: Way | None) -> list[float]:
    """Trains from the last checkpoint on to the end, eagerly where ``way`` is None.

    Returns the loss of each step, the mean of all processes, earlier starts' included. ``done``, a part of the
    accelerator's checkpoints, is where they are kept meanwhile.
    """
    set_seed(plan.seed)
    model = build(plan)
    if way is Way.model:
        for block in (*model.get_submodule("model.layers").children(), model.get_submodule("model.hc_head")):
            block.compile(backend="mhc_inductor")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    data: Any = sequences(plan, plan.steps * plan.accumulate * plan.batch * accelerator.num_processes)
    loader = torch.utils.data.DataLoader(data, batch_size=plan.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done.steps, folder = [], plan.folder / (way.value if way else "eager")
    last = last_checkpoint(folder)
    if last is not None:
        accelerator.load_state(str(last))
    start = len(done.steps)
    accelerator.print(f"{folder.name}: {f'resumed after step {start}' if start else 'started'}")
    batches = iter(accelerator.skip_first_batches(loader, start * plan.accumulate))
    with compiled_by(way), bars(disable=not accelerator.is_main_process) as bar:
        task = bar.add_task(folder.name, total=plan.steps, completed=start)
        for step in range(start, plan.steps):
            done.steps.append(one_step(accelerator, model, optimizer, [next(batches) for _ in range(plan.accumulate)]))
            bar.update(task, advance=1, note=f"loss {done.steps[-1]:.3f}")
            if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
                save(accelerator, folder, step + 1)
    accelerator.free_memory()
    return done.steps


def one_step(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]
) -> float:
    """Accumulates the gradients of the batches, takes one step, and returns the mean loss of all processes."""
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)  # divides by the number of batches
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # does nothing before the last batch
            optimizer.zero_grad()
        losses.append(loss.detach().double())
    mean: Any = accelerator.reduce(torch.stack(losses).mean(), "mean")
    return float(mean)


def main(
    way: Annotated[
        Way, typer.Option("--compile", help="Who compiles the layers: Accelerate, or the model before it.")
    ] = Way.accelerate,
    steps: trainer_model.Steps = Plan.steps,
    every: trainer_model.Every = Plan.every,
    accumulate: trainer_model.Accumulate = Plan.accumulate,
    batch: trainer_model.Batch = Plan.batch,
    seq: trainer_model.Seq = Plan.seq,
    layers: trainer_model.Layers = Plan.layers,
    dim: trainer_model.Dim = Plan.dim,
    bf16: trainer_model.Bf16 = Plan.bf16,
    device: trainer_model.Device = None,
    folder: trainer_model.Folder = pathlib.Path("train_accelerate"),
    seed: trainer_model.Seed = Plan.seed,
) -> None:
    """Trains eager, then compiled, each from its last checkpoint on, and prints the losses of both."""
    plan = checked(Plan(folder, steps, every, accumulate, batch, seq, layers, dim, bf16, device or "", seed))
    accelerator = accelerator_of(plan, way)
    where = f"{accelerator.num_processes} x {plan.device}, {accelerator.distributed_type.value}"
    accelerator.print(f"accelerate {accelerate.__version__}, torch {torch.__version__}, {where}")
    done = Losses()
    accelerator.register_for_checkpointing(done)
    eager = train(plan, accelerator, done, None)
    before = mhc_inductor.counters()
    compiled = train(plan, accelerator, done, way)
    if accelerator.is_main_process:
        compare(eager, compiled, routed(before))
    accelerator.end_training()


if __name__ == "__main__":
    typer.run(main)
