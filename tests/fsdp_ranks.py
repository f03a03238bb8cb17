"""Runs the training of examples/train_fsdp.py as one process of torchrun, and dies by SIGKILL in the middle of a step.

Arguments: a folder; "first", which trains to the end, and again until it is killed, or "again", which resumes.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

import torch
import torch._inductor.compile_fx as compile_fx_module
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

KILLED_AFTER = 3  # steps; the last checkpoint is of step 2


def main() -> None:
    folder, turn = pathlib.Path(sys.argv[1]), sys.argv[2]
    root = pathlib.Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "examples")]
    import train_fsdp

    import mhc_inductor

    mhc_inductor.enable()
    mhc_inductor.disable()
    # The package's passes and ops without Inductor's C++, which takes a minute to compile.
    compile_fx_module.compile_fx = lambda gm, inputs, *_, **__: aot_eager(gm, inputs)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = train_fsdp.Size(steps=5, dim=32, layers=1, batch=2, seq=16)

    def run(name: str) -> list[float]:
        at = folder / name
        return train_fsdp.train(size, 0, torch.device("cpu"), at, 2, folder / f"{name}.png").losses

    if turn == "first":
        _note(folder, "whole", run("whole"))
        plain = train_fsdp.one_step

        def killed(*args: object) -> None:
            plain(*args)
            if len(args[-1].losses) == KILLED_AFTER:
                dist.barrier()  # both have taken the step, none has saved it
                os.kill(os.getpid(), signal.SIGKILL)

        train_fsdp.one_step = killed
        run("cut")
    _note(folder, "resumed", run("cut"))
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _note(folder, "graphs", [counted])
    dist.destroy_process_group()


def _note(folder: pathlib.Path, name: str, values: list[float]) -> None:
    (folder / f"{name}{dist.get_rank()}.json").write_text(json.dumps(values))


main()
