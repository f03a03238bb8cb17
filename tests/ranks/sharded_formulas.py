# SPDX-License-Identifier: Apache-2.0
"""Checks of compiled formulas on DTensors: which are routed, and which stay as they are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import mhc_inductor as mi
from tests.formulas.laws import attention, block, e79, e79_leaves, mhc_leaves, sdpa, selection_leaves
from tests.ranks.sharded_tools import compiled as _compiled
from tests.ranks.sharded_tools import error, trained


def formulas_on_dtensors_are_routed(mesh: Any) -> None:
    names = list(mhc_leaves())

    def layer(*tensors: Tensor) -> Tensor:
        p = dict(zip(names, tensors, strict=True))
        return block(p["x"], p)

    for count, placement in ((5, Shard(0)), (6, Replicate())):
        leaves = mhc_leaves(tokens=count)
        args = [distribute_tensor(t, mesh, [placement if k == "x" else Replicate()]) for k, t in leaves.items()]
        compiled, seen = _compiled(layer)
        got, want = trained(compiled, args), trained(layer, list(leaves.values()))
        assert max(map(error, got, want)) < 1e-12
        assert seen.ops == {"mhc_pre": 1, "mhc_post": 1} and not seen.near and not seen.report.problems, seen
    compiled, seen = _compiled(lambda *tensors: checkpoint(layer, *tensors, use_reentrant=False))
    assert max(map(error, trained(compiled, args), want)) < 1e-12
    assert seen.ops == {"mhc_pre": 1, "mhc_post": 1} and not seen.report.problems, seen


def other_placements_of_results_stay_the_formulas(mesh: Any) -> None:
    """Streams sharded along n: the op would gather them, the formula's results are partial sums, so it is kept."""
    leaves = mhc_leaves()
    given = {k: distribute_tensor(t, mesh, [Shard(1) if k == "x" else Replicate()]) for k, t in leaves.items()}
    compiled, seen = _compiled(lambda p: block(p["x"], p))
    with torch.no_grad():
        got, want = compiled(given), block(given["x"], given)
    assert got.placements == want.placements and error(got.full_tensor(), want.full_tensor()) < 1e-12
    assert not seen.ops and not seen.report.problems
    assert "the op's result would be (Replicate(),) where the formula's is" in seen.near["mhc_pre"], seen.near


def local_tensors_in_a_formula_are_followed(mesh: Any) -> None:
    """A look at, then a write to, the local tensor of the streams in the middle of a formula that reads them later."""
    whole = {k: distribute_tensor(t, mesh, [Replicate()]) for k, t in mhc_leaves().items()}

    def model(x: Tensor, write: bool) -> tuple[Tensor, Tensor]:
        streams, seen = x * 1, []

        def touch(t: Tensor) -> Tensor:
            local = streams.redistribute(placements=[Shard(0)]).to_local()
            seen.append(local.mul_(2).sum() if write else local.sum())
            return t

        return block(streams, whole, {"h_pre": touch}), seen[0]

    x = distribute_tensor(mhc_leaves()["x"], mesh, [Shard(0)])
    for write in (False, True):
        compiled, seen = _compiled(lambda x, write=write: model(x, write))
        with torch.no_grad():
            got, want = compiled(x), model(x, write)
        assert error(got[0].full_tensor(), want[0].full_tensor()) < 1e-12 and error(got[1], want[1]) < 1e-12
        assert seen.ops["mhc_pre"] == (not write) and bool(seen.near) == write, (write, seen.ops, seen.near)
        assert not seen.report.problems, seen.report.problems


def explain_verifies_formulas_on_dtensors(mesh: Any) -> None:
    given = {k: distribute_tensor(t, mesh, [Shard(0) if k == "x" else Replicate()]) for k, t in mhc_leaves().items()}
    report = mi.explain(lambda p: block(p["x"], p), given, verify=True)
    assert [(r.op, r.error is not None and r.error < 1e-9) for r in report.routed] == [
        ("mhc_pre", True),
        ("mhc_post", True),
    ], report


def a_recurrence_on_dtensors_is_routed(mesh: Any) -> None:
    names = list(e79_leaves())

    def scan(*tensors: Tensor) -> Any:
        outs, S, M = e79(dict(zip(names, tensors, strict=True)))
        return torch.stack(outs), S, M

    leaves = e79_leaves(batch=3)
    split = {"kvqm": Shard(1), "S": Shard(0), "M": Shard(0)}
    args = [distribute_tensor(t, mesh, [split.get(k, Replicate())]) for k, t in leaves.items()]
    compiled, seen = _compiled(scan)
    assert max(map(error, trained(compiled, args), trained(scan, list(leaves.values())))) < 1e-12
    assert seen.ops["e79_scan"] == 1 and not seen.report.problems, (seen.ops, seen.near, seen.report.problems)


def attention_on_dtensors_is_routed(mesh: Any) -> None:
    """Masks of ranges and of listed keys, sharded by batch and by heads; positions are plain tensors.

    Lists by heads stay the formula: torch cannot gather by indices that a flattened inner dimension shards.
    """
    leaves = selection_leaves()
    ranges = leaves.pop("ranges")
    g = torch.Generator().manual_seed(5)
    lists = torch.rand(2, 6, 2, 12, generator=g).topk(5).indices

    def scattered(p: dict[str, Tensor]) -> Tensor:
        return torch.zeros(2, 6, 2, 12, dtype=torch.bool).scatter(-1, p["lists"], True)

    def by_ranges(form: Any, *tensors: Tensor) -> Tensor:
        return form(dict(zip(("q", "k", "v", "ranges"), tensors, strict=True)))

    def by_lists(form: Any, *tensors: Tensor) -> Tensor:
        return form(dict(zip(("q", "k", "v", "lists"), tensors, strict=True)), scattered)

    for kind, form, mask, placement, routed in (
        (by_ranges, attention, ranges, Shard(0), 1),
        (by_ranges, attention, ranges, Shard(2), 1),
        (by_ranges, sdpa, ranges, Replicate(), 1),
        (by_lists, attention, lists, Shard(0), 1),
        (by_lists, attention, lists, Shard(2), 0),
    ):
        args = [*leaves.values(), mask]
        layer = functools.partial(kind, form)
        compiled, seen = _compiled(layer)
        with implicit_replication():
            got = trained(compiled, [distribute_tensor(t, mesh, [placement]) for t in args])
        case = kind.__name__, form.__name__, placement
        assert max(map(error, got, trained(layer, args))) < 1e-12, case
        assert seen.ops["selection_attention"] == routed and bool(seen.near) is not bool(routed), (case, seen.near)
        assert not seen.report.problems, (case, seen.report.problems)


def an_indexer_on_dtensors_is_routed(mesh: Any) -> None:
    """The chosen keys as a mask, whose values do not depend on the order of the choice."""

    def chosen(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        """Returns 1 where a query [B, S, H, D] chooses a key [B, T, D] by its weighted scores, else 0: [B, S, T]."""
        S, T = q.shape[1], k.shape[1]
        scores = torch.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()) * q.shape[-1] ** -0.5)
        total = (scores * w.float().unsqueeze(-1)).sum(2)
        total = total.masked_fill(torch.arange(T) > torch.arange(S)[:, None], float("-inf"))
        return torch.zeros(total.shape).scatter(-1, total.topk(4, -1).indices, 1.0)

    g = torch.Generator().manual_seed(6)
    args = [torch.randn(shape, generator=g) for shape in ((2, 8, 4, 16), (2, 8, 16), (2, 8, 4))]
    for placements in ([Shard(0)] * 3, [Shard(1), Replicate(), Shard(1)], [Replicate()] * 3):
        compiled, seen = _compiled(chosen)
        with torch.no_grad(), implicit_replication():
            got = compiled(*(distribute_tensor(t, mesh, [p]) for t, p in zip(args, placements, strict=True)))
        assert seen.ops["index_topk"] == 1 and not seen.report.problems, (placements, seen.ops, seen.near)
        want = chosen(*args)
        # A query that sees fewer than four keys fills its choice with any others.
        assert torch.equal(got.full_tensor()[:, 3:], want[:, 3:]) and want[:, 3:].sum() == 40, placements


def local_tensors_and_redistribution_are_kept(mesh: Any) -> None:
    """Formulas between from_local, redistribute and to_local, and a write to the local tensor of their input."""
    leaves = mhc_leaves(tokens=6)
    whole = {k: distribute_tensor(t, mesh, [Replicate()]) for k, t in leaves.items()}

    def model(x: Tensor, write: bool) -> tuple[Tensor, Tensor]:
        streams = DTensor.from_local(x * 1, mesh, [Shard(0)], run_check=False)
        y = block(streams, {**whole, "x": streams})
        if write:
            streams.to_local().mul_(2)
        z = block(y.redistribute(placements=[Replicate()]), whole)
        return y.to_local(), (z + streams).full_tensor()

    mine = leaves["x"].chunk(mesh.size())[mesh.get_local_rank()]
    for write in (False, True):
        compiled, seen = _compiled(lambda x, write=write: model(x, write))
        with torch.no_grad():
            got, want = compiled(mine), model(mine, write)
        assert all(map(torch.equal, [got[0].isfinite()], [want[0].isfinite()]))
        assert max(map(error, got, want)) < 1e-12, write
        assert not seen.report.problems, seen.report.problems
        assert seen.ops["mhc_pre"] == 2, (write, seen.ops, seen.near)
