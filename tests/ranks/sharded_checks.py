# SPDX-License-Identifier: Apache-2.0
"""Runs checks of DTensors, each by every rank of one gloo process group: ``run(shape, names)`` returns what failed.

A check is a function of the mesh, in the files ``sharded_*.py``. Names that begin with ``whole_`` run on a mesh of two
dimensions.
"""

from __future__ import annotations

import datetime
import pathlib
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import init_device_mesh

from tests.ranks import sharded_formulas, sharded_meshes, sharded_models, sharded_ops, sharded_training

TIMEOUT = datetime.timedelta(minutes=5)
ONE = (
    sharded_ops.ops_are_sharded_without_communication,
    sharded_ops.other_placements_are_redistributed,
    sharded_training.mhc_trains,
    sharded_training.e79_trains,
    sharded_training.selection_trains,
    sharded_ops.absent_arguments_are_told_apart,
    sharded_training.fewer_tokens_than_ranks_are_gathered,
    sharded_training.wrong_calls_raise_on_every_rank,
    sharded_formulas.formulas_on_dtensors_are_routed,
    sharded_formulas.a_recurrence_on_dtensors_is_routed,
    sharded_formulas.attention_on_dtensors_is_routed,
    sharded_formulas.an_indexer_on_dtensors_is_routed,
    sharded_formulas.other_placements_of_results_stay_the_formulas,
    sharded_formulas.local_tensors_in_a_formula_are_followed,
    sharded_formulas.explain_verifies_formulas_on_dtensors,
    sharded_formulas.local_tensors_and_redistribution_are_kept,
)
TWO = (
    sharded_meshes.whole_mesh_of_two_dimensions,
    sharded_meshes.whole_empty_shards,
    sharded_meshes.whole_a_dead_rank_ends_in_an_error,
)
ONE_NAMES = [check.__name__ for check in ONE] + list(sharded_models.CHECKS)
CHECKS = {check.__name__: check for check in (*ONE, *TWO)} | sharded_models.CHECKS


def _rank(rank: int, shape: tuple[int, ...], path: str, names: Sequence[str], results: Any) -> None:
    torch.set_num_threads(1)
    world = torch.Size(shape).numel()
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", shape)
    for name in names:
        results.put((rank, name, _told(CHECKS[name], mesh)))


def _told(check: Callable[[Any], None], mesh: Any) -> str:
    """Returns what went wrong in a check, or ""."""
    try:
        check(mesh)
    except Exception:
        return traceback.format_exc()
    return ""


def run(shape: tuple[int, ...], names: Sequence[str], seconds: float = 500) -> dict[str, list[str]]:
    """Runs checks on ranks of their own. Returns for each check what each rank said: "" or a traceback."""
    context, world = mp.get_context("spawn"), torch.Size(shape).numel()
    results, found = context.Queue(), dict[str, list[str]]({name: [] for name in names})
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(r, shape, path, names, results), daemon=True) for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            dead = "whole_a_dead_rank_ends_in_an_error" in names
            for _ in range(world * len(names) - dead):
                rank, name, trace = results.get(timeout=seconds)
                found[name].append(f"rank {rank}: {trace}" if trace else "")
        except queue.Empty:
            for told in found.values():
                told += ["no answer in time"] * (world - len(told))
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
    return found


if __name__ == "__main__":
    chosen = sys.argv[1:] or ONE_NAMES
    for check, told in run((2, 2) if chosen[0].startswith("whole_") else (2,), chosen).items():
        print(check, "good" if not any(told) else "\n".join(told))
