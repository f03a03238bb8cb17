# SPDX-License-Identifier: Apache-2.0
"""Toy runs of the operators' benchmarks on a CPU, and what their fields have in common with those of committed results."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
from typing import Any

import pytest

from benchmarks import lists_peers, running, selection_cases
from benchmarks.pages import RESULTS, read

ONLY_GPU = {
    *("bar_us", "goal_us", "measured_separately_us", "met_bar", "met_goal", "not_slower_than_best_peer"),
    *("best_peer", "best_peer_us", "bar_speedup", "published", "tflops", "captured", "note", "peak_above_mb"),
    *(
        "times_fla",
        "times_tilelang",
        "times_attn_gym",
        "times_compiled",
        "times_dense",
        "error",
        "reason",
        "peak_gib",
        "of_run",
    ),
}
"""Fields of rows that need a GPU, published shapes or peers that one run had not, or what a CPU's run does not meet."""
OTHER = {"kernels", "origins", "resumed", "device", "settings", "skipped", "seconds_of", "versions"}
"""Fields of a result that say where and how it was measured."""
SETTINGS: dict[str, dict[str, Any]] = {
    "mhc": {"rounds": 3, "seed": 5, "parts": ("4096",), "compiled": False},
    "e79": {"rounds": 3, "seed": 4, "compiled": False, "small": True},
    "selection": {"rounds": 4, "seed": 4, "small": True},
    "lists": {"rounds": 4, "seed": 4},
    "index": {"rounds": 4, "seed": 4},
}
"""What makes a run a toy."""
PARTS = {
    "mhc": {"parts": ("4096", "npu", "decode", "memory", "accuracy", "determinism"), "peers": True},
    "e79": {"parts": ("speed", "batch", "further", "decode", "memory", "accuracy", "determinism", "cpu")},
    "selection": {"parts": ("speed", "crossing", "errors", "memory", "layers", "cpu", "cpu_dense")},
}
"""What a whole run has that the settings' defaults do not."""


def settings(name: str, **changes: Any) -> Any:
    return importlib.import_module(f"benchmarks.{name}").Settings(**{"device": "cpu", **SETTINGS[name], **changes})


def run(name: str, path: pathlib.Path | None = None, **changes: Any) -> dict[str, Any]:
    """Returns a toy run's result as it was saved last, to ``path`` too if it is given."""
    saved: list[str] = []

    def save(result: dict[str, Any]) -> None:
        saved.append(json.dumps(running.cleaned(result)))
        if path is not None:
            running.save(result, path)

    module = importlib.import_module(f"benchmarks.{name}")
    made = module.Run(settings(name, **changes), save, lambda _: None).run()
    assert json.loads(saved[-1]) == json.loads(json.dumps(running.cleaned(made)))
    found: dict[str, Any] = json.loads(saved[-1])
    return found


def uncompiled(fn: Any, dynamic: bool) -> Any:
    """Stands in for torch.compile of a peer of lists, which takes most of a run on a CPU."""
    return fn


@functools.cache
def _whole(name: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists_peers, "compiled", uncompiled)
        patch.setattr(selection_cases, "CROSSING_LENGTHS", (2048, 32768))
        found = run(name, **PARTS.get(name, {}))
    return json.dumps(found)


def whole(name: str) -> dict[str, Any]:
    """Returns a toy run of every part that takes seconds, which each process makes once."""
    found: dict[str, Any] = json.loads(_whole(name))
    return found


IDENTITY = ("case", "name", "of", "model", "way", "job", "part", "what", "variant")
"""What names a row, where it has it, apart from sizes."""


def fields(result: dict[str, Any]) -> dict[tuple[str, ...], set[str]]:
    """Returns the fields of the rows of each name in each list, those of their errors too, and of the result itself."""
    named = [k for k in IDENTITY if k != "case" or result["operator"] != "sparse_models"]
    found: dict[tuple[str, ...], set[str]] = {("",): result.keys() - OTHER}
    for part, rows in result.items():
        for row in (r for r in rows if "error" not in r) if isinstance(rows, list) else ():
            inner = {f"{k}: {name}" for k in ("errors", "found") if isinstance(row.get(k), dict) for name in row[k]} - {
                "errors: compiled"
            }
            cell = (part, *(str(row[k]) for k in named if k in row))
            found[cell] = found.get(cell, set()) | (row.keys() - ONLY_GPU) | inner
    return found


def unlike(toy: dict[str, Any], name: str, *lists: str) -> dict[tuple[str, ...], set[str]]:
    """Returns the fields that only one of a toy run and a committed result has, for the rows that both have.

    Of a committed result, rows of this package's ops must be in the toy run too, but for sizes of a crossing.

    Args:
        toy: The toy run.
        name: The committed result.
        lists: Lists that one of both need not have.
    """
    a, b = ({k: v for k, v in fields(r).items() if k[0] not in lists} for r in (toy, read(name)))
    differ = {k: (a[k] ^ b[k]) - {*lists} for k in a.keys() & b.keys() if (a[k] ^ b[k]) - {*lists}}
    ours = {k for k in b if k[-1] == "ops" and k[0] != "crossing"} if toy["operator"] in SETTINGS else set()
    return differ | {k: {"not in the toy run"} for k in ours - a.keys()}


def pages() -> dict[str, pathlib.Path]:
    """Returns the JSON of every committed result that has a page of its own next to it, by name."""
    return {f.stem: f for f in sorted(RESULTS.glob("*.json")) if f.with_suffix(".md").exists()}
