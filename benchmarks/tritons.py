# SPDX-License-Identifier: Apache-2.0
"""Compares two versions of Triton on one card: times, registers and spills of the same benchmarks' runs with each.

for each Triton: python -m benchmarks mhc --no-compiled --out FOLDER, lists --quick and index --quick likewise
python -m benchmarks tritons FOLDER ANOTHER_FOLDER
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from . import report
from .report import markdown

SLOWER = 1.03
"""A row that takes more than this many times as long is named in NOT_YET_MET.md with its cause."""
_IDENTITY = ("case", "name", "what", "tokens", "n", "dim", "heads", "topk", "S", "h", "Dk")


def _key(operator: str, row: dict[str, Any]) -> str:
    return " ".join([operator, *(f"{k}={row[k]}" for k in _IDENTITY if k in row)])


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the versions, the device, and the times (us) and kernels of the runs in a folder."""
    runs = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    rows = ((r["operator"], row) for r in runs for part in ("rows", "decode") for row in r.get(part, ()))
    return {
        "device": runs[0]["device"]["name"],
        **{k: runs[0][k] for k in ("commit", "dirty", "kernel_sources_sha256", "date", "versions")},
        "us": {_key(o, row): row["median_us"] for o, row in rows if row["variant"] == "ops" and "median_us" in row},
        "kernels": {name: k for r in runs for name, k in r["kernels"].items()},
    }


def compare(older: pathlib.Path, newer: pathlib.Path) -> dict[str, Any]:
    """Returns the two runs, and by row how many times as long it takes with the second Triton.

    Raises:
        ValueError: The runs are of different kernels or devices, or have different rows.
    """
    a, b = read(older), read(newer)
    for k in ("device", "kernel_sources_sha256"):
        if a[k] != b[k]:
            raise ValueError(f"{k}: the first run has {a[k]}, the second {b[k]}")
    if a["us"].keys() != b["us"].keys():
        raise ValueError(f"rows of one run only: {sorted(a['us'].keys() ^ b['us'].keys())}")
    return {"runs": [a, b], "ratios": {k: b["us"][k] / a["us"][k] for k in a["us"]}}


def table(result: dict[str, Any]) -> str:
    """Returns the comparison as Markdown: a row a case, then a row a kernel whose registers or spills differ."""
    a, b = result["runs"]
    tritons = [f"Triton {r['versions']['triton']}" for r in (a, b)]
    times = [[k, f"{a['us'][k]:.1f}", f"{b['us'][k]:.1f}", f"{r:.3f}"] for k, r in result["ratios"].items()]
    lines = []
    for name in sorted(a["kernels"].keys() | b["kernels"].keys()):
        both = [r["kernels"].get(name) for r in (a, b)]
        if both[0] != both[1]:
            lines.append([name, *("-" if k is None else f"{k['registers']} / {k['spilled']}" for k in both)])
    slow = [k for k, r in result["ratios"].items() if r > SLOWER]
    head = f"{a['device']}, torch {a['versions']['torch']}, commit {a['commit']}; microseconds."
    return report.document(
        f"{' and '.join(tritons)} on one card",
        [],
        head,
        markdown(["case", *tritons, "ratio"], times),
        f"More than {SLOWER - 1:.0%} slower with the second: {', '.join(slow) or 'none'}.",
        "Registers / spilled registers a thread, where they differ:",
        markdown(["kernel", *tritons], lines),
    )


write = report.writer(table)
