# SPDX-License-Identifier: Apache-2.0
"""Checks of models under the engines that shard them: FSDP2, tensor and sequence parallel plans, pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.sharded_tools import compiled as _compiled
from tests.sharded_tools import error


class Layer(nn.Module):
    """A hyper-connection written out, around a linear sublayer."""

    def __init__(self, n: int = 4, width: int = 16) -> None:
        super().__init__()
        from tests.laws import mhc_leaves

        p = mhc_leaves(n, width, torch.float64)
        self.n, self.w = n, nn.Linear(width, width, bias=False, dtype=torch.float64)
        for name in ("phi", "alpha", "bias", "gamma"):
            setattr(self, name, nn.Parameter(p[name]))

    def forward(self, x: Tensor) -> Tensor:
        from tests.laws import post, pre

        h_in, h_post, res = pre(x, {k: getattr(self, k) for k in ("phi", "alpha", "bias", "gamma")})
        return post(x, torch.tanh(self.w(h_in)), h_post, res)


def _model() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(Layer(), Layer())


def _stepped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and the parameters after one step of SGD on the mean over the ranks' batches."""
    from torch.distributed.tensor import DTensor

    step = torch.optim.SGD(model.parameters(), 0.1)
    out = model(x)
    out.square().mean().backward()
    step.step()
    return [t.full_tensor().detach() if isinstance(t, DTensor) else t.detach() for t in model.parameters()]


def fsdp2_layers_are_routed(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    from tests.laws import normal

    x = normal(2 * mesh.size(), 3, 4, 16, seed=8)
    want = _stepped(_model(), x)
    model = _model()
    torch._dynamo.reset()
    from tests.laws import Compiled

    seen = Compiled()
    for layer in model:
        layer.compile(backend=seen.backend)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got = _stepped(model, x.chunk(mesh.size())[mesh.get_local_rank()])
    assert max(map(error, got, want)) < 1e-12
    assert seen.ops["mhc_pre"] >= 1 and seen.ops["mhc_post"] >= 1 and not seen.report.problems, seen


def sequence_parallel_models_are_routed(mesh: Any) -> None:
    """All parameters as DTensors, the sublayer's weight in columns and rows, the streams sharded along the sequence."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.laws import normal

    if torch.__version__ < "2.13":  # Dynamo of torch 2.11 cannot trace F.linear of these, whatever the backend
        return
    x = normal(2, 5, 4, 16, seed=8)
    want = _stepped(_model(), x)
    model = _model()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if isinstance(module, nn.Linear) else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    compiled, seen = _compiled(model)
    got = _stepped(compiled, distribute_tensor(x, mesh, [Shard(1)]))
    assert max(map(error, got, want)) < 1e-12
    assert seen.ops["mhc_pre"] == 2 and seen.ops["mhc_post"] == 2, (seen.ops, seen.near, seen.report.problems)


# --- plans of parallelize_module, and pipeline stages --------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False, dtype=torch.float64)
        self.down = nn.Linear(2 * width, width, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Streams(nn.Module):
    """Two hyper-connections around MLPs, written out or by the package's modules, and a head."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        from mhc_inductor.nn import HyperConnection, HyperHead

        torch.manual_seed(9)
        blocks = [Layer(), Layer()] if written else [HyperConnection(16, 4, MLP()).double() for _ in range(2)]
        self.blocks, self.head = nn.Sequential(*blocks), HyperHead(16, 4).double()
        for block in blocks:
            setattr(block, "w" if written else "sublayer", MLP())
            nn.init.constant_(block.alpha, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def _plan(written: bool, sequence: bool) -> dict[str, Any]:
    """Returns the plan: MLPs by columns and rows; with ``sequence``, streams and head sharded along the sequence."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    plan: dict[str, Any] = {"head": SequenceParallel(sequence_dim=1, use_local_output=True)} if sequence else {}
    for k in range(2):
        mlp = f"blocks.{k}.{'w' if written else 'sublayer'}"
        plan[f"{mlp}.up"] = ColwiseParallel(**({"input_layouts": Shard(1)} if sequence else {}))
        plan[f"{mlp}.down"] = RowwiseParallel(**({"output_layouts": Shard(1)} if sequence else {}))
    return plan


def _planned(mesh: Any, written: bool, sequence: bool, compiled: bool) -> Any:
    """Compares loss and gradients of a model under a plan with the model's on one rank; returns what was routed."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.laws import normal

    x = normal(2, 6, 4, 16, seed=8)
    one, model = Streams(written), parallelize_module(Streams(written), mesh, _plan(written, sequence))
    call, seen = _compiled(model) if compiled else (model, None)
    want, got = (
        m(t).square().sum() for m, t in ((one, x), (call, x.chunk(mesh.size(), 1)[mesh.get_rank()] if sequence else x))
    )
    want.backward()
    got.backward()
    total = got.detach().clone()
    if sequence:
        dist.all_reduce(total)
    assert error(total, want.detach()) < 1e-12
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        grad = p.grad
        assert grad is not None and q.grad is not None, name
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif sequence:  # a plain parameter has the gradient of this rank's tokens
            dist.all_reduce(grad)
        assert error(grad, q.grad) < 1e-12, name
    return seen


def tensor_and_sequence_parallel_plans_are_routed(mesh: Any) -> None:
    for sequence in (False, True):
        seen = _planned(mesh, written=True, sequence=sequence, compiled=True)
        assert seen.ops["mhc_pre"] == 2 and seen.ops["mhc_post"] == 2, (sequence, seen.ops, seen.near)
        assert not seen.report.problems, seen.report.problems


def plans_over_the_packages_modules(mesh: Any) -> None:
    for sequence, compiled in ((False, True), (True, False)):
        seen = _planned(mesh, written=False, sequence=sequence, compiled=compiled)
        assert seen is None or not seen.report.problems


def pipeline_stages_are_routed(mesh: Any) -> None:
    """Each rank compiles one layer; micro-batches go through both. The losses are those of the whole model."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from tests.laws import Compiled, normal

    x, target = (normal(4, 3, 4, 16, seed=s) for s in (8, 9))
    rank, last, seen = mesh.get_rank(), mesh.size() - 1, Compiled()
    whole, model = _model(), _model()
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
    for (name, p), q in zip(model[rank].named_parameters(), whole[rank].parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and error(p.grad, q.grad) < 1e-12, name
    assert seen.ops["mhc_pre"] == seen.ops["mhc_post"] == len(seen.graphs) > 0, (seen.ops, seen.near)
    assert not seen.report.problems, seen.report.problems
