# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level E79 language model on the sources of Python's standard library, twice.

The model is plain PyTorch with a Python loop over time. One run is eager; the other uses
``torch.compile(model, backend="mhc_inductor")``, which turns each loop into one scan. Both start from the same weights
and see the same batches.

    python examples/e79_bytes.py            # two to three minutes on two CPU cores; larger sizes on a GPU
    python examples/e79_bytes.py --help

Dynamo unrolls ``--seq`` times ``--layers`` time steps before the plugin rolls them up. This takes seconds at 64 steps,
so keep sequences short here. ``mhc_inductor.nn.E79Layer`` has no such limit.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import torch
import training
import typer
from e79_model import E79LM
from training import Run

import mhc_inductor

SUBJECT = training.Subject(
    "E79 language model",
    kernels="e79",
    without="the scan ran as formulas, in as few calls a step as possible",
    valid_batches=4,
)


@dataclasses.dataclass(frozen=True)
class Size(training.Size):
    """Sizes of a run; ``n``: rows and columns of the states."""

    n: int


DEFAULTS = {"cpu": Size(150, 128, 2, 16, 64, 32), "cuda": Size(150, 512, 4, 32, 64, 64)}


def compare(device: torch.device, size: Size, seed: int, out: pathlib.Path, sample: int = 200) -> list[Run]:
    """Trains eager, then compiled; prints, draws and returns both runs; RuntimeError if no loop became a scan."""
    before = mhc_inductor.counters().get("routed e79_scan", 0)
    detail = f"states of {size.n} x {size.n}"
    runs = training.compare(
        lambda: E79LM(size.dim, size.layers, size.n), SUBJECT, device, size, seed, out, sample, detail
    )
    loops = mhc_inductor.counters().get("routed e79_scan", 0) - before
    if loops == 0:
        raise RuntimeError("no loop became a scan; TORCH_LOGS=mhc_inductor says why")
    training.console.print(f"loops that became a scan: {loops}, of {size.seq} steps each")
    return runs


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    dim: Annotated[int | None, typer.Option(min=8, help="Width D of the model.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of one E79 and one MLP.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Rows and columns of the states; kernels go up to 128.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Bytes a sequence: the steps of each loop.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("e79_bytes.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and the sample.")] = 0,
) -> None:
    """Trains eager and compiled from one seed on the same batches; compares losses and speeds."""
    given = {"steps": steps, "dim": dim, "layers": layers, "batch": batch, "seq": seq, "n": n}
    where, size = training.chosen(device, DEFAULTS, given)
    compare(where, size, seed, out)


if __name__ == "__main__":
    typer.run(main)
