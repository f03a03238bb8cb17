# SPDX-License-Identifier: Apache-2.0
"""The tests' checks of sharded ops and of context parallelism, on this machine's devices and its own messages."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from .rank import Ranks

T = TypeVar("T")
CONTEXT = ("gather_ranges", "ring_ranges", "uneven_parts", "lists_of_positions", "keys_that_are_the_values_of_ranges")
CONTEXT += ("bf16", "scans", "index_of_all_keys", "gradients_that_only_some_ranks_need")
CONTEXT += ("two_runs_give_equal_bits", "errors_on_every_rank")
"""Names in ``tests/ranks/distributed_checks.py``."""
TRAINED = ("mhc_trains", "e79_trains", "selection_trains")
"""Names in ``tests/ranks/sharded_training.py``."""
PER_TOKEN = ("batch", "sequence", "queries")
"""Ways of sharding that leave a token's arithmetic as it is: its results must have equal bits."""


@contextlib.contextmanager
def fallbacks() -> Iterator[set[str]]:
    """Yields a set that collects what the package logs of inputs without a kernel."""
    found: set[str] = set()
    handler, logger = logging.Handler(), logging.getLogger("mhc_inductor")
    handler.emit = lambda record: found.add(record.getMessage()[:300])  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def sharded_ops(ranks: Ranks) -> dict[str, Any]:
    """Checks samples of every op of this job's share, forward and backward, and redistributes their first argument.

    The first sample of each op comes first, then the second: what the seconds do not allow is left out, and counted.
    Deterministic algorithms are on: without them, few queries split their keys, and add in an order that depends on it.
    """
    from torch.distributed.tensor import init_device_mesh

    from tests.ranks import sharded_ops as checks
    from tests.tools.deterministic import deterministic_algorithms

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    plan = _samples(checks, ranks.options["share"], ranks.options["shares"], ranks.options.get("most"))
    failed: dict[str, str] = {}
    row: dict[str, Any] = {"planned": len(plan), "samples": 0, "ways": 0, "ops": [], "other_bits": []}
    with fallbacks() as logged, deterministic_algorithms():
        for turn, op, case, args in _in_time(ranks, plan):
            sample = functools.partial(checks.sharded_sample, op, case, args, mesh)
            ways = _try(ranks, f"{op} {case}", sample, failed) or {}
            if turn == 0:
                first = functools.partial(checks.redistributed_sample, op, case, args, mesh)
                _try(ranks, f"{op} {case} redistributed", first, failed)
            row["samples"] += 1
            row["ways"] += len(ways)
            row["ops"] = sorted({*row["ops"], op})
            if ranks.cuda and not op.endswith("_backward"):  # a CPU's products add in an order that depends on sizes
                odd = [way for way, same in ways.items() if way in PER_TOKEN and not same]
                row["other_bits"] += [f"{op} {case} {way}" for way in odd]
            ranks.note(**row, failed=failed)
    return {**row, "failed": failed, "fallbacks": sorted(logged)}


def _samples(checks: Any, share: int, shares: int, most: int | None) -> list[tuple[int, str, str, Any]]:
    """Returns (how many of this op come before, op, case, arguments) of the ops of one share, in the order to run."""
    ops = sorted({op for op, _, _ in checks.samples()})[share::shares]
    before, found = dict.fromkeys(ops, 0), []
    for op, case, args in checks.samples():
        if op in before:
            found.append((before[op], op, case, args))
            before[op] += 1
    found.sort(key=lambda sample: sample[0])
    return found[:most]


def trained(ranks: Ranks) -> dict[str, Any]:
    """Runs the public functions on DTensors with gradients, in fp32: every split of the tests, against one rank."""
    from torch.distributed.tensor import init_device_mesh

    from tests.ranks import sharded_training as checks

    mesh, names = init_device_mesh(ranks.device.type, (ranks.size,)), TRAINED[: ranks.options.get("most")]
    return _all(ranks, {name: functools.partial(getattr(checks, name), mesh, torch.float32) for name in names})


def _all(ranks: Ranks, checks: Mapping[str, Callable[[], None]]) -> dict[str, Any]:
    """Runs checks on every rank, as many as the seconds allow; returns which, and what failed.

    A check that fails on one rank has failed on all.
    """
    failed: dict[str, str] = {}
    done: list[str] = []
    with fallbacks() as logged:
        for name, check in _in_time(ranks, checks.items()):
            _try(ranks, name, check, failed)
            done.append(name)
            ranks.note(checks=done, failed=failed)
    left = [name for name in checks if name not in done]
    return {"checks": done, "left_out": left, "failed": failed, "fallbacks": sorted(logged)}


def _in_time(ranks: Ranks, items: Iterable[T]) -> Iterator[T]:
    """Yields items until the seconds of one rank are over."""
    began = time.monotonic()
    for item in items:
        if max(ranks.everywhere(time.monotonic() - began)) > ranks.options["seconds"]:
            return
        yield item


def _try(ranks: Ranks, name: str, check: Callable[[], T], failed: dict[str, str]) -> T | None:
    """Returns a check's result; None where it fails, with the reason in ``failed``."""
    found = None
    try:
        found = check()
    except Exception:
        failed[name] = traceback.format_exc()[-1500:]
    if any(ranks.everywhere(name in failed)):
        failed.setdefault(name, "failed on another rank")
    return found


def context(ranks: Ranks) -> dict[str, Any]:
    """Runs the checks of context parallelism, forward and backward, against the fp64 oracles of one process."""
    from tests.ranks import distributed_checks as checks
    from tests.ranks import distributed_tools

    distributed_tools.DEVICE = ranks.device
    names = CONTEXT[ranks.options["share"] :: ranks.options["shares"]][: ranks.options.get("most")]
    return _all(ranks, {name: checks.CHECKS[name] for name in names})
