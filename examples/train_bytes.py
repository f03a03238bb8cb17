# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level transformer with mHC residuals on the sources of Python's standard library, twice.

One run is eager; the other uses ``torch.compile(model, backend="mhc_inductor")``. Both start from the same weights and
see the same batches. The table and the picture at the end compare their losses and speeds.

    python examples/train_bytes.py            # a few minutes on two CPU cores; larger sizes on a GPU
    python examples/train_bytes.py --help
"""

from __future__ import annotations

import pathlib
from typing import Annotated

import torch
import training
import typer
from byte_model import ByteTransformer
from training import Run, Size

SUBJECT = training.Subject(
    "mHC byte transformer", kernels="mhc", without="Inductor decomposed and fused the mHC formulas"
)
STREAMS = 4
DEFAULTS = {"cpu": Size(250, 128, 2, 8, 128), "cuda": Size(600, 768, 8, 16, 1024)}


def compare(device: torch.device, size: Size, seed: int, out: pathlib.Path, sample: int = 200) -> list[Run]:
    """Trains eager, then compiled; prints, draws and returns both runs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def build() -> ByteTransformer:
        return ByteTransformer(size.dim, size.layers, size.seq, STREAMS, dtype)

    detail = f"n = {STREAMS} streams in {dtype}"
    return training.compare(build, SUBJECT, device, size, seed, out, sample, detail)


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    dim: Annotated[int | None, typer.Option(min=32, help="Width D of a stream, a multiple of 32.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of one attention and one MLP.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Bytes a sequence.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("train_bytes.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and the sample.")] = 0,
) -> None:
    """Trains eager and compiled from one seed on the same batches; compares losses and speeds."""
    given = {"steps": steps, "dim": dim, "layers": layers, "batch": batch, "seq": seq}
    where, size = training.chosen(device, DEFAULTS, given)
    if size.dim % 32:
        raise typer.BadParameter(f"--dim must be a multiple of 32, got {size.dim}")
    compare(where, size, seed, out)


if __name__ == "__main__":
    typer.run(main)
