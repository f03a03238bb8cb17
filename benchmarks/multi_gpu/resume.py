# SPDX-License-Identifier: Apache-2.0
"""Trains examples/train_fsdp.py as one process of torchrun, and dies by SIGKILL in the middle of a step.

Its argument is JSON: "folder"; "turn", "first", which trains to the end, and again until it is killed, or "again", which
resumes; "size" of :class:`train_fsdp.Size`; "every", the steps between checkpoints; "killed_after", a step that no
checkpoint holds; "device"; and "inductor", false for a trial without Inductor's C++, which takes a minute to compile.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def main() -> None:
    words = json.loads(sys.argv[1])
    folder = pathlib.Path(words["folder"])
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import train_fsdp

    device = _device(words)
    size = train_fsdp.Size(**words["size"])

    def run(name: str) -> list[float]:
        at = folder / name
        losses: list[float] = train_fsdp.train(size, 0, device, at, words["every"], folder / f"{name}.png").losses
        return losses

    if words["turn"] == "first":
        _note(folder, "whole", run("whole"))
        _die_after(train_fsdp, words["killed_after"])
        run("cut")
    _note(folder, "resumed", run("cut"))
    _note(folder, "graphs", [torch._dynamo.utils.counters["stats"]["unique_graphs"]])
    dist.destroy_process_group()


def _device(words: dict[str, Any]) -> torch.device:
    """Joins the process group, and returns this process's device."""
    from benchmarks.multi_gpu.training import make_deterministic

    if not words["inductor"]:
        _without_inductor()
    make_deterministic()  # losses are compared in bits
    if words["device"] == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def _without_inductor() -> None:
    """Keeps the package's passes and ops, and runs the graphs without generated code."""
    import torch._inductor.compile_fx as compile_fx_module
    from torch._dynamo.backends.debugging import aot_eager

    import mhc_inductor

    mhc_inductor.enable()
    mhc_inductor.disable()
    compile_fx_module.compile_fx = lambda gm, inputs, *_, **__: aot_eager(gm, inputs)


def _die_after(train_fsdp: Any, steps: int) -> None:
    plain = train_fsdp.one_step

    def killed(*args: Any) -> None:
        plain(*args)
        if len(args[-1].losses) == steps:
            dist.all_reduce(torch.zeros(1))  # all have taken the step, none has saved it
            os.kill(os.getpid(), signal.SIGKILL)

    train_fsdp.one_step = killed


def _note(folder: pathlib.Path, name: str, values: list[Any]) -> None:
    (folder / f"{name}{dist.get_rank()}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main()
