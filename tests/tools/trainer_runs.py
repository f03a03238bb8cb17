# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of the Trainer and of Accelerate in processes of their own, as tests need them.

``trainer FOLDER`` trains compiled and dies by SIGKILL in the third step. ``accelerate FOLDER``, a process of torchrun,
trains with FSDP2, eagerly, compiled, and compiled but stopped in between, and writes what it found to FOLDER, a file for each rank.
Graphs run without Inductor's C++, which takes a minute to compile.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import sys
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx_module
from torch._dynamo.backends.debugging import aot_eager

import mhc_inductor
from tests.tools import example_modules, quick_torch

SIZES = {"steps": 4, "every": 2, "seq": 16, "dim": 32}
"""Sizes of each run, of :class:`trainer_model.Plan`."""


def without_inductor() -> None:
    quick_torch.apply()
    mhc_inductor.enable()
    mhc_inductor.disable()
    compile_fx_module.compile_fx = lambda gm, inputs, *_, **__: aot_eager(gm, inputs)


def trainer(folder: pathlib.Path) -> None:
    """Is killed after the backward of the third step's first batch; the last checkpoint is of the second step."""
    from transformers import TrainerCallback

    class Killed(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    with example_modules.imported("train_trainer") as example:
        example.build = example_modules.with_fewer_iterations(example.build)
        plan = example.Plan(folder, **SIZES)
        example.train(plan, example.Way.trainer, [Killed()])


def accelerate(folder: pathlib.Path) -> None:
    """Trains with FSDP2: eager; compiled by Accelerate; the same stopped in the third step, and resumed."""
    with example_modules.imported("train_accelerate") as example:
        example.build = example_modules.with_fewer_iterations(example.build)
        found: dict[str, Any] = {}
        accelerator = example.accelerator_of(example.Plan(folder, **SIZES), example.Way.accelerate)
        done = example.Losses()
        accelerator.register_for_checkpointing(done)

        def run(name: str, way: Any) -> None:
            before = mhc_inductor.counters()
            losses = example.train(example.Plan(folder / name, **SIZES), accelerator, done, way)
            found[name] = {"losses": losses, "ops": example.routed(before)}

        run("eager", None)
        run("whole", example.Way.accelerate)
        plain, example.one_step = example.one_step, stopped_after(example.one_step, 3)
        try:
            run("cut", example.Way.accelerate)
        except KeyboardInterrupt:
            accelerator.free_memory()
        found["kept"] = sorted(f.name for f in (folder / "cut" / "accelerate").iterdir())
        example.one_step = noted(plain, found)
        run("cut", example.Way.accelerate)
        (folder / f"found{accelerator.process_index}.json").write_text(json.dumps(found))
        accelerator.end_training()


def stopped_after(one_step: Any, steps: int) -> Any:
    """Returns ``one_step`` so that it raises KeyboardInterrupt at the end of the given call."""
    calls = itertools.count(1)

    def step(*args: Any) -> Any:
        loss = one_step(*args)
        if next(calls) == steps:
            raise KeyboardInterrupt
        return loss

    return step


def noted(one_step: Any, found: dict[str, Any]) -> Any:
    """Returns ``one_step`` so that it notes the kinds of parameters, and which layers have compiled calls."""

    def step(accelerator: Any, model: Any, *args: Any) -> Any:
        found["kinds"] = sorted({type(p).__name__ for p in model.parameters()})
        found["compiled"] = [name for name, m in model.named_modules() if m._compiled_call_impl is not None]
        return one_step(accelerator, model, *args)

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    without_inductor()
    quick_torch.roomy({"trainer": trainer, "accelerate": accelerate}[sys.argv[1]], pathlib.Path(sys.argv[2]))
