# SPDX-License-Identifier: Apache-2.0
"""What makes a job of several GPUs pass."""

from __future__ import annotations

from typing import Any

from .failures import DEAD
from .jobs import Job, Outcome
from .rank import worst

CONTEXT_ERROR, ONE_PROCESS_ERROR = 2e-2, 1e-2
"""Largest relative errors: of bf16 gradients summed over ranks, and of gradients on two devices of one process."""


def passed(job: Job, outcomes: list[Outcome]) -> tuple[bool, str]:
    """Returns whether a job passed, and if not, why."""
    if not outcomes:
        return False, "did not begin within the run's budget of seconds"
    if job.target.endswith("_dies"):
        why = _death(outcomes)
    else:
        why = _ended(outcomes) or _FOUND[job.target]([o.row or {} for o in outcomes])
    return not why, why


def _ended(outcomes: list[Outcome]) -> str:
    """Returns what is wrong with the processes: each must end by itself, without an error, with a row."""
    said = []
    for o in outcomes:
        if o.row is not None and "error" in o.row:
            said.append(f"rank {o.rank}: {o.row['error']}")
        elif o.code is None:
            said.append(f"rank {o.rank}: ended by the time limit after {o.seconds} s")
        elif o.code or o.row is None:
            said.append(f"rank {o.rank}: exit code {o.code}")
    return "; ".join(said)[:600]


def _death(outcomes: list[Outcome]) -> str:
    """Returns what is wrong where one rank dies: the others must raise, or be ended by NCCL, and none may hang."""
    *others, dead = outcomes
    if dead.code != DEAD:
        return f"the last rank ended with {dead.code}, not by its own death"
    for o in others:
        row = o.row or {}
        by_nccl = o.code not in (None, 0) and "waits" in row and ("NCCL" in o.log or "Watchdog" in o.log)
        if o.code is None:
            return f"rank {o.rank} hung for {o.seconds} s"
        if not row.get("raised") and not by_nccl:
            return f"rank {o.rank} ended with {o.code} and no error: {row.get('error', '')}"
        if row.get("op", "") not in row.get("raised", ""):
            return f"rank {o.rank}: the error does not name {row['op']}: {row['raised']}"
    return ""


def _failed(rows: list[dict[str, Any]]) -> str:
    """Returns the failed checks of the ranks, and ops whose results for a token have other bits."""
    failed = sorted(
        {f"{name}: {text.strip().splitlines()[-1]}" for row in rows for name, text in row["failed"].items()}
    )
    bits = sorted({case for row in rows for case in row.get("other_bits", ())})
    return "; ".join(failed + [f"other bits: {case}" for case in bits])[:1500]


def _losses(rows: list[dict[str, Any]]) -> str:
    (found, *_) = rows
    said = [
        f"{name}: losses differ by {row['difference']:.2g}"
        for name, row in found["variants"].items()
        if not row["difference"] <= row["allowed"]
    ]
    return "; ".join(said + [f"{name}: not routed" for name, row in found["variants"].items() if not row["routed"]])


def _example(rows: list[dict[str, Any]]) -> str:
    (row,) = rows
    if row["first"]["code"] == 0:
        return "the first run was not killed"
    if row["again"]["code"] != 0:
        errors = [line for line in row["again"]["output"].splitlines() if "Error" in line]
        return f"the second run ended with {row['again']['code']}: {' '.join(errors[:3])}"
    if not row["picture"]:
        return "there is no picture"
    if differ := row["first_difference"]:
        return f"the resumed losses differ from step {differ[0]} on, by at most {differ[1]:.2g}"
    return "" if row["nothing_lost"] else "losses of a rank are missing, or differ between the ranks"


def _context(rows: list[dict[str, Any]]) -> str:
    said = []
    for row in rows[0]["rows"][1:]:
        error = worst(row["results"][what] for what in ("output_error", "gradient_error"))
        if not error <= CONTEXT_ERROR:
            said.append(f"{row['variant']}: error {error:.2g}")
    return "; ".join(said)


def _one_process(rows: list[dict[str, Any]]) -> str:
    (row,) = rows
    if row["threads_failed"]:
        return "; ".join(row["threads_failed"])
    if bad := [name for name, same in row["ops"].items() if not same]:
        return f"other bits on another device: {', '.join(bad)}"
    return (
        "" if row["gradient_difference"] <= ONE_PROCESS_ERROR else f"gradients differ: {row['gradient_difference']:.2g}"
    )


_FOUND = {
    "checks:sharded_ops": _failed,
    "checks:trained": _failed,
    "checks:context": _failed,
    "training:losses": _losses,
    "training:scaling": lambda rows: "",
    "example:run": _example,
    "context:run": _context,
    "failures:one_process": _one_process,
}
