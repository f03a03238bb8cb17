# SPDX-License-Identifier: Apache-2.0
"""Compares the fields of a benchmark's toy run on a CPU with those of its committed result."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.pages import RESULTS

ONLY_GPU = {
    *("bar_us", "goal_us", "measured_separately_us", "met_bar", "met_goal", "not_slower_than_best_peer"),
    *("best_peer", "best_peer_us", "bar_speedup", "published", "tflops", "captured", "note", "peak_above_mb"),
    *("times_fla", "times_tilelang", "error", "reason"),
}
"""Fields of rows that need a GPU, published shapes, or what a CPU's run does not meet."""
OTHER = {"kernels", "origins", "resumed", "device", "settings", "skipped", "seconds_of", "versions"}
"""Fields of a result that say where and how it was measured."""


def fields(result: dict[str, Any]) -> dict[str, set[str]]:
    """Returns the fields of each list of rows that has any, and of the result itself as ""."""
    found = {"": result.keys() - OTHER}
    rows = {k: v for k, v in result.items() if isinstance(v, list) and v}
    return found | {k: set().union(*v) - ONLY_GPU for k, v in rows.items()}


def unlike(toy: dict[str, Any], name: str, *lists: str) -> dict[str, set[str]]:
    """Returns, by list, the fields that only one of a toy run and a committed result has.

    Args:
        toy: The toy run.
        name: The committed result.
        lists: Lists that one of both need not have.
    """
    a, b = fields(toy), fields(json.loads((RESULTS / f"{name}.json").read_text()))
    differ = {k: a.get(k, set()) ^ b.get(k, set()) for k in a.keys() | b.keys() if k not in lists}
    return {k: found - set(lists) for k, found in differ.items() if found - set(lists)}
