# SPDX-License-Identifier: Apache-2.0
"""Puts parts of a later run of the lists benchmark into an earlier result, each with the run that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import running
from .running import same

Result = dict[str, Any]
ORIGIN = ("device", "versions", "commit", "dirty", "kernel_sources_sha256", "date")
"""What a result says of a run, and of a part that is of another run."""


def same_machine(result: Result, earlier: Result) -> None:
    """Raises OtherRun if a run cannot go on from an earlier one: of another device, version, code or size."""
    for what in ("operator", "kernel_sources_sha256"):
        same(what, result[what], earlier[what])
    same("device", result["device"]["name"], earlier["device"]["name"])
    same("small", result["settings"]["small"], earlier["settings"]["small"])
    for what in ("torch", "triton"):
        same(what, result["versions"][what], earlier["versions"][what])


def fill(result: Result, later: Result, parts: Sequence[str], lists_of: dict[str, tuple[str, ...]]) -> Result:
    """Returns ``result`` with ``parts`` of ``later``, and ``origins``, which says of each what run it is of.

    A part is taken as a whole: its rows are compared with each other, and the op is among them.

    Raises:
        OtherRun: if ``later`` is of other shapes or of another benchmark, or has not begun one of the parts.
    """
    same("operator", result["operator"], later["operator"])
    for what in ("small", "shapes"):
        same(what, result["settings"][what], later["settings"][what])
    for part in parts:
        same(f"having {part}", True, part in later["seconds_of"])
    filled = {**result, **{name: later[name] for part in parts for name in lists_of[part]}}
    filled["seconds_of"] = result["seconds_of"] | {part: later["seconds_of"][part] for part in parts}
    origin = {k: later[k] for k in ORIGIN}
    filled["origins"] = result.get("origins", {}) | dict.fromkeys(parts, origin)
    # What the earlier run left out of these parts, or why they failed, no longer holds.
    gone = {*parts, *(_spent(result) if {"crossing", "peers"} <= set(parts) else ())}
    kept = {name: why for name, why in result["skipped"].items() if name not in gone}
    new = {name: why for name, why in later["skipped"].items() if name in parts or name not in lists_of}
    filled["skipped"] = kept | new
    known = {*result["settings"]["parts"], *parts}
    filled["settings"] = result["settings"] | {"parts": [part for part in lists_of if part in known]}
    filled["complete"] = _whole(filled, lists_of)
    return filled


def _spent(result: Result) -> list[str]:
    """Returns what a run left out for lack of time and did not put into a row."""
    return [name for name, why in result["skipped"].items() if running.SPENT.endswith(why)]


def _whole(result: Result, lists_of: dict[str, tuple[str, ...]]) -> bool:
    """Returns whether every part is there, none failed and no cell was left out for lack of time."""
    rows = (r for names in lists_of.values() for name in names for r in result.get(name, ()))
    left = any(r.get("reason") == running.SPENT for r in rows) or bool(_spent(result))
    return not left and lists_of.keys() == result["seconds_of"].keys() - result["skipped"].keys()
