# SPDX-License-Identifier: Apache-2.0
"""Checks of models under the engines for several ranks: DDP, FSDP2, tensor and sequence parallel plans, pipeline stages.

Each runs with every kind of model in :mod:`tests.formulas.engine_models`, under the name ``CHECK[KIND]``.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from mhc_inductor.nn import HyperHead
from tests.formulas.engine_models import DEPTH, KINDS, STREAMS, WIDTH, gradients, linear
from tests.formulas.laws import Compiled
from tests.ranks.sharded_tools import compiled as _compiled
from tests.ranks.sharded_tools import error


def _agree(got: Any, want: Any, case: object = None) -> None:
    """Asserts that the same names have tensors, and that these are equal up to the order of sums."""
    assert got.keys() == want.keys(), (case, got.keys() ^ want.keys())
    apart = {name: error(t, want[name]) for name, t in got.items()}
    assert apart and max(apart.values()) < 1e-12, (case, apart)


def _stepped(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Returns the parameters after one step of SGD on the mean over the ranks' batches."""
    step = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    step.step()
    named = model.named_parameters()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in named}


class _Stages(nn.Module):
    """Layers with wide ones in between, each of which fills a bucket, so that no formula is cut."""

    WIDE = 1024

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = KINDS[kind].layers()
        self.stages = nn.Sequential(
            *(nn.Sequential(layer, linear(WIDTH, self.WIDE), linear(self.WIDE, WIDTH)) for layer in layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x)


def ddp_buckets_are_routed(mesh: Any, kind: str) -> None:
    made, cap, seen = KINDS[kind], 8 * WIDTH * _Stages.WIDE, Compiled()
    model, plain, x = _Stages(kind), _Stages(kind), made.x(mesh.get_rank())
    torch._dynamo.reset()
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", cap), torch._dynamo.config.patch(optimize_ddp=True):
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
        out, want = torch.compile(ddp, backend=seen.backend)(x), plain(x)
        out.square().mean().backward()
    want.square().mean().backward()
    averaged = gradients(plain)
    for grad in averaged.values():
        dist.all_reduce(grad.div_(mesh.size()))
    _agree(gradients(model) | {"output": out.detach()}, averaged | {"output": want.detach()})
    assert seen.ops == made.expected() and not seen.report.problems, (seen.ops, seen.near)
    assert len(seen.graphs) > DEPTH, len(seen.graphs)


def fsdp2_layers_are_routed(mesh: Any, kind: str) -> None:
    from torch.distributed.fsdp import fully_shard

    made, seen = KINDS[kind], Compiled()
    x, model = made.x(batch=2 * mesh.size()), made.model()
    want = _stepped(made.model(), x)
    torch._dynamo.reset()
    for layer in model:
        layer.compile(backend=seen.backend)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _agree(_stepped(model, x.chunk(mesh.size())[mesh.get_local_rank()]), want)
    assert seen.ops == made.expected() and not seen.report.problems, seen
    assert len(seen.graphs) == len(model), seen.graphs


def dtensor_models_are_routed(mesh: Any, kind: str) -> None:
    """All parameters as DTensors, the input sharded along the batch, or along the sequence with weights in columns."""
    if torch.__version__ < "2.13":  # Dynamo of torch 2.11 cannot trace F.linear of these, whatever the backend
        return
    made = KINDS[kind]
    x, model = made.x(), made.model()
    want = _stepped(made.model(), x)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if made.split and isinstance(module, nn.Linear) else Replicate()
            shared = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]), requires_grad=p.requires_grad)
            module.register_parameter(name, shared)
    compiled, seen = _compiled(model)
    with implicit_replication():
        got = _stepped(compiled, distribute_tensor(x, mesh, [Shard(made.split)]))
    _agree({name.removeprefix("_orig_mod."): t for name, t in got.items()}, want)
    assert seen.ops == made.expected(), (seen.ops, seen.near, seen.report.problems)


# --- plans of parallelize_module, and pipeline stages --------------------------------------------------------


class _Headed(nn.Module):
    """A model's layers, and a head: the package's for streams, else a norm."""

    def __init__(self, kind: str, written: bool) -> None:
        super().__init__()
        self.blocks = KINDS[kind].model(written)
        torch.manual_seed(9)
        self.head = (HyperHead(WIDTH, STREAMS) if kind == "mHC" else nn.LayerNorm(WIDTH)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def _plan(kind: str, sequence: bool) -> dict[str, Any]:
    """Returns the plan: sublayers by columns and rows; with ``sequence``, all else sharded along the sequence."""
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    made = KINDS[kind]
    plan: dict[str, Any] = {"head": SequenceParallel(sequence_dim=1, use_local_output=True)} if sequence else {}
    for sub in (f"blocks.{k}.sublayer" for k in range(DEPTH)):
        for name in made.columns:
            plan[f"{sub}.{name}"] = ColwiseParallel(**({"input_layouts": Shard(1)} if sequence else {}))
        plan[f"{sub}.{made.rows}"] = RowwiseParallel(**({"output_layouts": Shard(1)} if sequence else {}))
        if sequence and made.whole:
            gathers = {"desired_input_layouts": Replicate(), "use_local_output": True}
            plan[f"{sub}.{made.whole}"] = PrepareModuleInput(input_layouts=Shard(1), **gathers)
    return plan


def _planned(mesh: Any, kind: str, written: bool, sequence: bool, compiled: bool) -> Any:
    """Compares loss and gradients of a model under a plan with the model's on one rank; returns what was routed."""
    from torch.distributed.tensor.parallel import parallelize_module

    case, x = (kind, written, sequence, compiled), KINDS[kind].x()
    one, model = _Headed(kind, written), parallelize_module(_Headed(kind, written), mesh, _plan(kind, sequence))
    call, seen = _compiled(model) if compiled else (model, None)
    want, got = (
        m(t).sin().sum() for m, t in ((one, x), (call, x.chunk(mesh.size(), 1)[mesh.get_rank()] if sequence else x))
    )
    want.backward()
    got.backward()
    total = got.detach().clone()
    if sequence:
        dist.all_reduce(total)
    _agree({"loss": total}, {"loss": want.detach()}, case)
    grads = gradients(model)
    for name, grad in grads.items():
        if isinstance(grad, DTensor):
            grads[name] = grad.full_tensor()
        elif sequence or name.endswith(KINDS[kind].partial):
            dist.all_reduce(grad)  # a plain parameter has the gradient of this rank's tokens, or of its heads
    _agree(grads, gradients(one), case)
    return seen


def tensor_and_sequence_parallel_plans_are_routed(mesh: Any, kind: str) -> None:
    for sequence in (False, True):
        seen = _planned(mesh, kind, written=True, sequence=sequence, compiled=True)
        expected = KINDS[kind].expected()
        assert {op: seen.ops[op] for op in expected} == expected, (sequence, seen.ops, seen.near)
        assert not seen.report.problems, seen.report.problems


def plans_over_the_packages_functions(mesh: Any, kind: str) -> None:
    for sequence, compiled in ((False, True), (True, False)):
        seen = _planned(mesh, kind, written=False, sequence=sequence, compiled=compiled)
        assert seen is None or not seen.report.problems


def pipeline_stages_are_routed(mesh: Any, kind: str) -> None:
    """Each rank compiles one layer; micro-batches go through both. The losses are those of the whole model."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    made = KINDS[kind]
    x, target = (made.x(seed) for seed in (8, 9))
    rank, last, seen = mesh.get_rank(), mesh.size() - 1, Compiled()
    whole, model = made.model(), made.model()
    torch._dynamo.reset()
    model[rank].compile(backend=seen.backend)
    stage = PipelineStage(model[rank], rank, mesh.size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, want: (out - want).square().mean())
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == last:
        schedule.step(target=target, losses=losses)
    parts = [(whole(a) - b).square().mean() for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    (sum(parts) / 2).backward()  # type: ignore[union-attr]
    assert rank != last or [error(a, b) < 1e-12 for a, b in zip(losses, parts, strict=True)] == [True, True]
    _agree(gradients(model[rank]), gradients(whole[rank]))
    assert seen.ops == made.expected(len(seen.graphs)) and seen.graphs, (seen.ops, seen.near)
    assert not seen.report.problems, seen.report.problems


ENGINES = (
    ddp_buckets_are_routed,
    fsdp2_layers_are_routed,
    dtensor_models_are_routed,
    tensor_and_sequence_parallel_plans_are_routed,
    plans_over_the_packages_functions,
    pipeline_stages_are_routed,
)
CHECKS = {
    f"{check.__name__}[{kind}]": functools.partial(check, kind=kind)
    for check in ENGINES
    for kind in ("mHC", "lists", "E79")
}
EACH_COMMIT = {f"{check.__name__}[{kind}]" for check, kind in zip(ENGINES, ("mHC", "lists", "E79") * 2, strict=True)}
"""Each engine with one model. Which plan has which needs: see ``whole`` and ``partial`` in ``engine_models.py``."""
