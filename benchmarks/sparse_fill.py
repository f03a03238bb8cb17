# SPDX-License-Identifier: Apache-2.0
"""Fills rows of peers that a run had no time for with those of a later run on the same kind of machine."""

from __future__ import annotations

from typing import Any

from . import sparse_targets as targets
from .running import same
from .sparse_models import SPENT, judge

Result = dict[str, Any]
PEERS = (targets.COMPILE, targets.COMPILE_GRAPHS, targets.EAGER)


def fill(result: Result, later: Result) -> Result:
    """Returns ``result`` with the rows of peers that its budget cut off taken from ``later``, each naming its run.

    Rows of this package are never taken: they belong to the commit that measured them.

    Raises:
        ValueError: if the runs differ in device or versions, or ``later`` has no row that is missing.
    """
    for what in ("name", "type"):
        same(f"device's {what}", result["device"].get(what), later["device"].get(what))
    for what in ("torch", "triton", "transformers"):
        same(what, result["versions"].get(what), later["versions"].get(what))
    measured = {(r["case"], r["variant"]): r for r in later["rows"] if r.get("error") != SPENT}
    rows, taken = [], 0
    for row in result["rows"]:
        found = measured.get((row["case"], row["variant"])) if row["variant"] in PEERS else None
        if row.get("error") == SPENT and found is not None:
            row, taken = {**found, "of_run": {k: later[k] for k in ("commit", "date")}}, taken + 1
        rows.append(row)
    if not taken:
        raise ValueError("the later run has none of the rows that the first one had no time for")
    filled = {**result, "rows": rows}
    judge(filled, [targets.Case(**made) for made in result["settings"]["cases"]])
    return filled
