# SPDX-License-Identifier: Apache-2.0
"""``examples/train_fsdp.py`` under torchrun: trained to the end, killed in a step, and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..source_hash import ROOT
from .rank import Ranks

PROGRAM = pathlib.Path(__file__).with_name("resume.py")


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
    """Runs the program to its end; returns exit code and the end of the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [*command, str(PROGRAM), json.dumps(words)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    return {"code": done.returncode, "output": (done.stdout + done.stderr)[-6000:]}
