# SPDX-License-Identifier: Apache-2.0
"""Trains the byte-level mHC transformer with FSDP2 on several processes; what is killed resumes where it was.

Each layer is compiled with ``backend="mhc_inductor"`` and sharded with ``fully_shard``; the text is that of
``train_bytes.py``. Checkpoints hold weights, optimizer and losses, so that a run that was killed and started again has
the losses of one that was not. At the end a picture shows the losses and the speed.

    torchrun --nproc-per-node 2 examples/train_fsdp.py          # gloo on a CPU; NCCL where there are GPUs
    torchrun --nproc-per-node 2 examples/train_fsdp.py --model deepseek_v4 --checkpoint policy --compare
    torchrun --nproc-per-node 2 examples/train_fsdp.py --help
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import fsdp_compare
import fsdp_picture
import fsdp_v4
import stdlib_text
import torch
import torch.distributed as dist
import training
import typer
from byte_model import ByteTransformer
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import Size, console

from mhc_inductor.progress import bars


class Model(str, enum.Enum):
    """What is trained."""

    bytes = "bytes"
    deepseek_v4 = "deepseek_v4"


Build = Callable[[Size, int, torch.device, DeviceMesh], nn.Module]
STREAMS = 4
COMPARED_STEPS = 2000
"""Steps of the run of which a comparison takes the first ones."""
DEFAULTS = {
    Model.bytes: {"cpu": Size(100, 64, 1, 4, 64), "cuda": Size(600, 768, 8, 8, 1024)},
    Model.deepseek_v4: fsdp_v4.DEFAULTS,
}
TITLES = {Model.bytes: "mHC byte transformer", Model.deepseek_v4: "DeepSeek-V4 on bytes"}
NO_CONTEXT_PARALLEL = (
    "--context-parallel must be 1: the compressors and indexers of transformers' DeepSeek-V4 read the tokens of other "
    "ranks, and its layers make no calls of mhc_inductor.distributed; see docs/distributed.md, Context parallel"
)


@dataclasses.dataclass
class Progressed:
    """What a checkpoint holds next to weights and optimizer: one entry a step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """The steps at which the run was started or resumed."""


def built(
    size: Size, seed: int, device: torch.device, mesh: DeviceMesh, backend: str | None = "mhc_inductor"
) -> nn.Module:
    """Returns the model with each layer compiled and sharded; all ranks draw the same weights."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = ByteTransformer(size.dim, size.layers, size.seq, STREAMS, dtype).to(device)
    for block in model.blocks:
        if backend is not None:
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch_of(text: Tensor, size: Size, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's batch of a step, which depends on nothing before it."""
    own = (seed * 1_000_003 + step) * dist.get_world_size() + dist.get_rank()
    return next(stdlib_text.batches(text, size.batch, size.seq, 1, own))


# --- checkpoints --------------------------------------------------------------------------------------------


def complete(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Returns the steps and folders of the checkpoints that were written to the end, the last one last."""
    # The metadata is written after all data: a folder without it was cut off.
    found = [f.parent for f in folder.glob("step_*/.metadata")]
    return sorted((int(f.name.removeprefix("step_")), f) for f in found)


def save(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer, done: Progressed) -> None:
    """Writes a checkpoint, each rank its shards, and removes all but the last two."""
    weights, moments = get_state_dict(model, optimizer)
    history = {k: torch.tensor(v, dtype=torch.float64) for k, v in dataclasses.asdict(done).items()}
    state = {"model": weights, "optimizer": moments, "history": history}
    save_shards(state, checkpoint_id=folder / f"step_{len(done.losses):06d}")
    if dist.get_rank() == 0:
        for _, old in complete(folder)[:-2]:
            _remove(old)


def _remove(folder: pathlib.Path) -> None:
    # The metadata first: what is left of a folder whose removal is cut off counts as incomplete.
    for file in sorted(folder.iterdir(), key=lambda f: f.name != ".metadata"):
        file.unlink()
    folder.rmdir()


def resumed(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progressed:
    """Loads the last complete checkpoint, if there is one, and returns what was done before it."""
    found = complete(folder)
    if not found:
        return Progressed()
    step, last = found[-1]
    sizes = FileSystemReader(last).read_metadata().state_dict_metadata
    weights, moments = get_state_dict(model, optimizer)
    history = {}
    for f in dataclasses.fields(Progressed):
        stored = sizes[f"history.{f.name}"]
        assert isinstance(stored, TensorStorageMetadata)
        history[f.name] = torch.empty(stored.size, dtype=torch.float64)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "history": history}
    load(state, checkpoint_id=last)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses, seconds, starts = (state["history"][f.name].tolist() for f in dataclasses.fields(Progressed))
    assert len(losses) == step
    return Progressed(losses, seconds, [int(s) for s in starts])


# --- training -----------------------------------------------------------------------------------------------


def train(
    size: Size,
    seed: int,
    device: torch.device,
    folder: pathlib.Path,
    every: int,
    out: pathlib.Path,
    build: Build = built,
    title: str = TITLES[Model.bytes],
) -> Progressed:
    """Trains from the last checkpoint in ``folder`` on to the end; the first rank shows it, and draws it at the end."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build(size, seed, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    done = resumed(folder, model, optimizer)
    start, first = len(done.losses), dist.get_rank() == 0
    if start < size.steps:
        done.starts.append(start)
    if first:
        what = f"resumed after step {start}" if start else "started"
        console.print(f"{what}: {dist.get_world_size()} processes, {training.device_name(device)} each")
    text = stdlib_text.load().train.to(device)
    with bars(console, disable=not first) as bar:
        task = bar.add_task("training", total=size.steps, completed=start, note="first step: compiling")
        for step in range(start, size.steps):
            one_step(model, optimizer, batch_of(text, size, seed, step), size, done)
            bar.update(task, advance=1, note=f"loss {done.losses[-1]:.3f}, {done.seconds[-1] * 1e3:.0f} ms a step")
            if (step + 1) % every == 0 or step + 1 == size.steps:
                save(folder, model, optimizer, done)
    if first:
        report(size, done, device, out, title)
    return done


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], size: Size, done: Progressed
) -> None:
    """Takes one step, and notes the mean loss of all ranks and the time."""
    device = batch[0].device
    training.synchronize(device)
    began = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = training.learning_rate(len(done.losses), size)
    loss = training.loss_of(model, *batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().double() / dist.get_world_size()
    dist.all_reduce(mean)
    done.losses.append(mean.item())
    training.synchronize(device)
    done.seconds.append(time.perf_counter() - began)


def report(size: Size, done: Progressed, device: torch.device, out: pathlib.Path, title: str) -> None:
    """Prints and draws losses and speed."""
    tokens = size.batch * size.seq * dist.get_world_size()
    speed = tokens / statistics.median(done.seconds)
    console.print(f"loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f} nats a byte, {speed:,.0f} tokens a second")
    shape = f"D = {size.dim}, {size.layers} layers, {dist.get_world_size()} x {size.batch} x {size.seq} bytes a step"
    rates = [tokens / s for s in done.seconds]
    fsdp_picture.draw(
        done.losses, rates, done.starts[1:], out, f"{title}, FSDP2: {shape}, {training.device_name(device)}"
    )
    console.print(f"picture: {out.resolve()}", soft_wrap=True)


def compare(
    model: Model, size: Size, seed: int, device: torch.device, how: fsdp_v4.Checkpoint, out: pathlib.Path | None
) -> list[fsdp_compare.Run]:
    """Trains the model eager, by torch.compile and by mhc_inductor on the same batches, and prints what each took."""
    mesh, text = init_device_mesh(device.type, (dist.get_world_size(),)), stdlib_text.load().train.to(device)

    def build(backend: str | None) -> nn.Module:
        if model is Model.bytes:
            return built(size, seed, device, mesh, backend)
        return fsdp_v4.built(size, seed, device, mesh, backend, how)

    # Few steps of a long run's warm-up: at its full rate losses jump, and then any rounding grows into another curve.
    rates = dataclasses.replace(size, steps=COMPARED_STEPS)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, done: Any) -> None:
        one_step(module, optimizer, batch_of(text, size, seed, len(done.losses)), rates, done)

    about = {"model": model.value, "checkpoint": how.value, "seed": seed}
    return fsdp_compare.compare(build, step, Progressed, size, device, about, out)


def chosen(
    model: Model, how: fsdp_v4.Checkpoint, device: str | None, given: dict[str, int | None]
) -> tuple[torch.device, Size]:
    """Returns this process's device and the sizes. Raises BadParameter for what the model cannot be trained with."""
    where, size = training.chosen(device, DEFAULTS[model], given)
    try:
        if size.dim % 32:
            raise ValueError(f"--dim must be a multiple of 32, got {size.dim}")
        if model is Model.deepseek_v4:
            fsdp_v4.check(size)
        elif how is not fsdp_v4.Checkpoint.none:
            raise ValueError(f"--checkpoint {how.value} needs --model deepseek_v4")
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if where.type == "cuda" else where, size


def main(
    model: Annotated[
        Model, typer.Option(help="The example's own, or a small DeepSeek-V4 of transformers.")
    ] = Model.bytes,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps in all.")] = None,
    dim: Annotated[int | None, typer.Option(min=32, help="Width D of a stream, a multiple of 32.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of one attention and one MLP.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step and process.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Bytes a sequence.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    folder: Annotated[pathlib.Path, typer.Option(help="Checkpoints.")] = pathlib.Path("train_fsdp"),
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 20,
    out: Annotated[pathlib.Path, typer.Option(help="The picture to write.")] = pathlib.Path("train_fsdp.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    checkpoint: Annotated[
        fsdp_v4.Checkpoint, typer.Option(help="What a layer of DeepSeek-V4 computes again in its backward.")
    ] = fsdp_v4.Checkpoint.none,
    comparing: Annotated[
        bool, typer.Option("--compare", help="Train eager, by torch.compile and by mhc_inductor; keep no checkpoints.")
    ] = False,
    json: Annotated[pathlib.Path | None, typer.Option(help="With --compare: the figures to write.")] = None,
    context_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share a sequence: 1.")] = 1,
) -> None:
    """Trains on the processes of torchrun; resumes from the last checkpoint of the folder."""
    if context_parallel != 1:
        raise typer.BadParameter(NO_CONTEXT_PARALLEL)
    if "RANK" not in os.environ:
        raise typer.BadParameter("start it with torchrun, for example: torchrun --nproc-per-node 2 train_fsdp.py")
    given = {"steps": steps, "dim": dim, "layers": layers, "batch": batch, "seq": seq}
    where, size = chosen(model, checkpoint, device, given)
    if comparing and size.steps <= fsdp_compare.WARM:
        raise typer.BadParameter(f"--steps must be above {fsdp_compare.WARM} with --compare, got {size.steps}")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    build: Build = built if model is Model.bytes else functools.partial(fsdp_v4.built, how=checkpoint)
    try:
        if comparing:
            compare(model, size, seed, where, checkpoint, json)
        else:
            train(size, seed, where, folder, every, out, build, TITLES[model])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
