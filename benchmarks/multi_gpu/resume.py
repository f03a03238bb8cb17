# SPDX-License-Identifier: Apache-2.0
"""``examples/train_fsdp.py`` under torchrun: trained to the end, killed in a step, and resumed.

torchrun runs this module too, once for each rank. Its argument is JSON: "folder"; "turn", "first", which trains to the
end, and again until it dies by SIGKILL in the middle of a step, or "again", which resumes; "size" of
:class:`train_fsdp.Size`; "every", the steps between checkpoints; "killed_after", a step that no checkpoint holds;
"device"; and "inductor", false for a trial without Inductor's C++, which takes a minute to compile.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..source_hash import ROOT
from .rank import Ranks
from .training import make_deterministic

# --- the job ------------------------------------------------------------------------------------------------


def run(ranks: Ranks) -> dict[str, Any]:
    """Starts torchrun twice: the first is killed after a step that no checkpoint holds, the second resumes."""
    folder, count = ranks.folder / "example", ranks.options["ranks"]
    folder.mkdir()
    words = {**ranks.options, "device": ranks.device.type, "inductor": not ranks.toy, "folder": str(folder)}
    first = _torchrun(words | {"turn": "first"}, count)
    ranks.note(first=first)
    again = _torchrun(words | {"turn": "again"}, count)
    found = {n: [_losses(folder, n, rank) for rank in range(count)] for n in ("whole", "resumed")}
    picture = folder / "cut.png"
    if picture.exists():
        shutil.copyfile(picture, ranks.options["picture"])
    return {
        "first": first,
        "again": again,
        "losses": found["whole"][0],
        "checkpoints": sorted(f.parent.name for f in (folder / "cut").glob("*/.metadata")),
        "nothing_lost": None not in found["whole"] and found["whole"] == found["resumed"],
        "first_difference": _first_difference(found["whole"][0] or (), found["resumed"][0] or ()),
        "picture": picture.exists(),
    }


def _losses(folder: pathlib.Path, name: str, rank: int) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / f"{name}{rank}.json").read_text())
    return None


def _first_difference(a: Sequence[float], b: Sequence[float]) -> tuple[int, float] | None:
    """Returns the first step whose losses differ, counted from 0, and the largest relative difference of all."""
    differ = [step for step, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    return (differ[0], max(abs(a[i] - b[i]) / abs(a[i]) for i in differ)) if differ else None


def _torchrun(words: dict[str, Any], count: int) -> dict[str, Any]:
    """Runs this module as ``count`` ranks to its end; returns exit code and the end of the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "benchmarks.multi_gpu.resume", json.dumps(words)]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "COLUMNS": "200"}  # else cuBLAS is not deterministic
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return {"code": done.returncode, "output": (done.stdout + done.stderr)[-6000:]}


# --- a rank -------------------------------------------------------------------------------------------------


def main(words: dict[str, Any]) -> None:
    folder = pathlib.Path(words["folder"])
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import train_fsdp

    device = _device(words)
    size = train_fsdp.Size(**words["size"])

    def run(name: str) -> list[float]:
        at = folder / name
        losses: list[float] = train_fsdp.train(size, 0, device, at, words["every"], folder / f"{name}.png").losses
        return losses

    def note(name: str, values: list[Any]) -> None:
        (folder / f"{name}{dist.get_rank()}.json").write_text(json.dumps(values))

    if words["turn"] == "first":
        note("whole", run("whole"))
        _die_after(train_fsdp, words["killed_after"])
        run("cut")
    note("resumed", run("cut"))
    note("graphs", [torch._dynamo.utils.counters["stats"]["unique_graphs"]])
    dist.destroy_process_group()


def _device(words: dict[str, Any]) -> torch.device:
    """Joins the process group, and returns this process's device."""
    if not words["inductor"]:
        from tests.tools.trainer_runs import without_inductor

        without_inductor()
    make_deterministic()  # losses are compared in bits
    if words["device"] == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def _die_after(train_fsdp: Any, steps: int) -> None:
    plain = train_fsdp.one_step

    def killed(*args: Any) -> None:
        plain(*args)
        if len(args[-1].losses) == steps:
            dist.all_reduce(torch.zeros(1))  # all have taken the step, none has saved it
            os.kill(os.getpid(), signal.SIGKILL)

    train_fsdp.one_step = killed


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
