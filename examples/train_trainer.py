# SPDX-License-Identifier: Apache-2.0
"""Trains a small DeepSeek-V4 with transformers' Trainer, eager and compiled with mhc_inductor, and compares the losses.

Gradients are accumulated, the forward is in bf16, and checkpoints are saved: whatever ends the program, the next start
goes on from the last checkpoint, and has the losses of a run that nothing ended.

    python examples/train_trainer.py             # a few minutes on two CPU cores, most of them to compile
    python examples/train_trainer.py --help
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
from typing import Annotated, Any

import torch
import trainer_model
import transformers
import typer
from trainer_model import Plan, build, checked, compare, console, enabled, routed, sequences
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import mhc_inductor

SEQUENCES = 256
"""Sequences of an epoch."""


class Way(str, enum.Enum):
    """Who compiles the model."""

    trainer = "trainer"
    model = "model"


def arguments(plan: Plan, folder: pathlib.Path, way: Way | None) -> TrainingArguments:
    """Returns the Trainer's arguments. The name "mhc_inductor" is refused as a backend: "inductor" and enable()."""
    compiles = way is Way.trainer
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch,
        gradient_accumulation_steps=plan.accumulate,
        bf16=plan.bf16,
        learning_rate=3e-3,
        save_steps=plan.every,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        seed=plan.seed,
        use_cpu=plan.device == "cpu",
        torch_compile=compiles,
        torch_compile_backend="inductor" if compiles else None,
    )


def last_checkpoint(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the last checkpoint that was written to its end, or None."""
    # The Trainer writes its own state last: a folder without it was cut off.
    found = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    return max(found, key=lambda f: int(f.name.rpartition("-")[2]), default=None)


class ResumingTrainer(Trainer):
    """The Trainer, with a way to load DeepSeek-V4's checkpoints.

    Checkpoints have the names of DeepSeek's own weights. The Trainer of transformers 5.23 loads those that it knows by
    name and warns of the others, which keep their random weights; before that it refuses the kinds of MLP layers in
    config.json, with StrictDataclassClassValidationError. ``from_pretrained`` reads both.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        saved = type(model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        model.load_state_dict(saved.state_dict())


def losses_of(state: TrainerState) -> list[float]:
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


def train(plan: Plan, way: Way | None, callbacks: list[TrainerCallback] | None = None) -> list[float]:
    """Trains from the last checkpoint on to the end, eagerly where ``way`` is None.

    Returns the loss of each step, earlier starts' included.
    """
    name = way.value if way else "eager"
    last = last_checkpoint(plan.folder / name)
    if last is not None:
        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        if state.global_step >= plan.steps:  # the Trainer would take another step
            console.print(f"{name}: complete")
            return losses_of(state)
    model = build(plan)
    if way is Way.model:
        model.compile(backend="mhc_inductor")
    console.print(f"{name}: {f'resumed from {last.name}' if last else 'started'}")
    data: Any = sequences(plan, SEQUENCES)
    trainer = ResumingTrainer(model, arguments(plan, plan.folder / name, way), train_dataset=data, callbacks=callbacks)
    with enabled() if way is Way.trainer else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return losses_of(trainer.state)


def main(
    way: Annotated[
        Way, typer.Option("--compile", help="Who compiles: the Trainer, or the model before it.")
    ] = Way.trainer,
    steps: trainer_model.Steps = Plan.steps,
    every: trainer_model.Every = Plan.every,
    accumulate: trainer_model.Accumulate = Plan.accumulate,
    batch: trainer_model.Batch = Plan.batch,
    seq: trainer_model.Seq = Plan.seq,
    layers: trainer_model.Layers = Plan.layers,
    dim: trainer_model.Dim = Plan.dim,
    bf16: trainer_model.Bf16 = Plan.bf16,
    device: trainer_model.Device = None,
    folder: trainer_model.Folder = pathlib.Path("train_trainer"),
    seed: trainer_model.Seed = Plan.seed,
) -> None:
    """Trains eager, then compiled, each from its last checkpoint on, and prints the losses of both."""
    plan = checked(Plan(folder, steps, every, accumulate, batch, seq, layers, dim, bf16, device or "", seed))
    console.print(f"transformers {transformers.__version__}, torch {torch.__version__}, on {plan.device}")
    eager = train(plan, None)
    before = mhc_inductor.counters()
    compiled = train(plan, way)
    compare(eager, compiled, routed(before))


if __name__ == "__main__":
    typer.run(main)
