# SPDX-License-Identifier: Apache-2.0
"""The report of ``python -m mhc_inductor doctor``: versions, devices, where kernels run, and why not.

``collect()`` gathers the facts and prints nothing. ``show()`` prints them as rich tables, or as plain lines without
rich.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import platform
import subprocess
from typing import Any

import torch

import mhc_inductor
from mhc_inductor import backend, compat, fingerprint, kernels, tuning, versions
from mhc_inductor.kernels import eager, launch

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "MHC_INDUCTOR_TUNED",
    "TORCH_LOGS",
    "TORCH_COMPILE_DEBUG",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
"""Environment variables that change what runs here: one of this package, and those of torch and Triton."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclasses.dataclass
class Report:
    """The facts of the report, by name.

    ``ops[device][op]`` is what an op runs on a device. ``problems`` make the installation unusable; ``notes`` do not.
    """

    versions: dict[str, str]
    devices: dict[str, str]
    ops: dict[str, dict[str, str]]
    state: dict[str, str]
    environment: dict[str, str]
    problems: list[str]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """Returns 0 if this installation can be used, else 1."""
        return 1 if self.problems else 0


def torch_problem(version: str) -> str | None:
    """Returns why this torch version cannot be used, or None."""
    low = versions.TESTED["torch"][0]
    if versions.minor(version) >= low:
        return None
    return f"torch {version} is too old: at least {versions.written(low)} is needed"


def _triton() -> tuple[str | None, str]:
    """Returns Triton's version, or None and the reason why it is missing."""
    try:
        return importlib.import_module("triton").__version__, ""
    except ImportError as error:
        return None, str(error)


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"


def _versions() -> dict[str, str]:
    triton_version, why = _triton()
    return {
        "mhc_inductor": f"{mhc_inductor.__version__} in {os.path.dirname(os.path.abspath(mhc_inductor.__file__))}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version or f"missing: {why}",
        "CUDA": torch.version.cuda or "this torch is built without it",
        "HIP": torch.version.hip or "this torch is built without it",
        "driver": _driver(),
    }


def _devices() -> dict[str, str]:
    found = {"cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        size = f"{p.multi_processor_count} multiprocessors, {p.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{index}"] = f"{p.name}, sm_{p.major}{p.minor}, {size}"
    return found


def kernels_on(device: torch.device, op: str) -> str:
    """Returns which dtypes of op ``op`` run as kernels on a GPU, and why the others run the reference formula.

    It asks the function by which the op itself decides.
    """
    found: dict[str | None, list[str]] = {None: []}
    for dtype in _DTYPES:
        reason = eager.why_not(op, (torch.empty(0, dtype=dtype, device=device),), launch.EagerBuilder(device))
        found.setdefault(reason, []).append(str(dtype).removeprefix("torch."))
    runs = found.pop(None)
    words = [f"kernels for {', '.join(runs)}"] if runs else []
    words += [f"reference formula for {', '.join(of)}: {reason}" for reason, of in found.items()]
    return "; ".join(words)


def _ops(devices: dict[str, str]) -> dict[str, dict[str, str]]:
    cpu = "reference formula; compiled: fused by Inductor"
    return {
        name: {op: cpu if name == "cpu" else kernels_on(torch.device(name), op) for op in eager.OPS} for name in devices
    }


def _backend_registered() -> str:
    try:
        from torch.compiler import list_backends

        there = "mhc_inductor" in list_backends(exclude_tags=())
    except Exception as error:  # it imports Dynamo: a failure must not abort the report
        return f"unknown: {error}"
    return "yes" if there else "no: torch.compile will not find it"


def _state() -> dict[str, str]:
    return {
        'backend "mhc_inductor" registered': _backend_registered(),
        "enable() active in this process": "no" if backend.enabled() is None else "yes",
        "kernels that cannot be loaded": "; ".join(unloadable()) or "none",
        "tuned configurations": str(tuning.found()),
        "cache fingerprint": _fingerprint(),
        "float32 matmul precision": compat.matmul_precision(),
    }


def unloadable() -> list[str]:
    """Returns each module of kernels that this Triton cannot load, with the reason; plain Triton runs for a Gluon one.

    Where Triton is missing, there is nothing to say about its version.
    """
    if _triton()[0] is None:
        return []
    return [*filter(None, (_problem(m.name) for m in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")))]


def _problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a Triton raises that lacks a feature
        return f"{module}: {error}"
    return None


def _fingerprint() -> str:
    try:
        return fingerprint.fingerprint()
    except Exception as error:  # reported, because nothing can be compiled without it
        return f"cannot be computed: {error}"


def _notes(devices: dict[str, str]) -> list[str]:
    notes = [*versions.untested(), *versions.missing()]
    if not any(name.startswith("cuda") for name in devices):
        why = "this torch is built without CUDA" if not (torch.version.cuda or torch.version.hip) else "none is visible"
        notes.append(f"no GPU ({why}): the CPU formulas run, and Inductor fuses them under torch.compile")
    if _triton()[0] is None:
        notes.append("triton is missing: no kernel can run on a GPU")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        notes.append("TRITON_INTERPRET is set: kernels run in Triton's interpreter, slowly, and compile to nothing")
    return notes


def collect() -> Report:
    """Gathers all facts of the report for this process on this machine."""
    environment = {name: os.environ.get(name, "not set") for name in ENVIRONMENT}  # read before torch sets some of them
    devices = _devices()
    problem = torch_problem(torch.__version__)
    return Report(
        versions=_versions(),
        devices=devices,
        ops=_ops(devices),
        state=_state(),
        environment=environment,
        problems=[problem] if problem else [],
        notes=_notes(devices),
    )


def _summary(of: dict[str, str]) -> dict[str, str]:
    """Groups ops that run the same way: comma-separated op names to what they run."""
    grouped: dict[str, list[str]] = {}
    for op, how in of.items():
        grouped.setdefault(how, []).append(op)
    return {", ".join(names): how for how, names in grouped.items()}


def tables(report: Report) -> list[tuple[str, dict[str, str]]]:
    """Returns title and rows of each part, in the order in which they are shown."""
    parts = [("versions", report.versions), ("devices", report.devices)]
    parts += [(f"ops on {device}", _summary(of)) for device, of in report.ops.items()]
    return [*parts, ("state", report.state), ("environment variables honoured", report.environment)]


def plain(report: Report) -> str:
    """Returns the report as plain text."""
    lines = []
    for title, rows in tables(report):
        lines += [f"{title}:", *(f"  {name}: {value}" for name, value in rows.items()), ""]
    lines += [*(f"note: {n}" for n in report.notes), *(f"problem: {p}" for p in report.problems), verdict(report)]
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """Returns the last line of the report, "usable" or "not usable"."""
    return "not usable" if report.problems else "usable"


def show(report: Report) -> None:
    """Prints the report, with rich if it is installed."""
    try:
        console: Any = importlib.import_module("rich.console").Console()
        table_type: Any = importlib.import_module("rich.table").Table
        text: Any = importlib.import_module("rich.text").Text
    except ImportError:
        print(plain(report))
        return
    for title, rows in tables(report):
        table = table_type(title=title, title_justify="left", show_header=False, min_width=60)
        table.add_column(ratio=2, overflow="fold")
        table.add_column(ratio=3, overflow="fold")
        for name, value in rows.items():
            table.add_row(text(name), text(value))
        console.print(table)
    for kind, lines, style in (("note", report.notes, "yellow"), ("problem", report.problems, "bold red")):
        for line in lines:
            console.print(text(f"{kind}: {line}", style=style))
    console.print(text(verdict(report), style="bold red" if report.problems else "bold green"))


def main(as_json: bool = False) -> int:
    """Prints the report, as tables or as one JSON object. Returns 0 if this torch is supported, 1 if it is too old."""
    report = collect()
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "usable": not report.problems}, indent=1))
    else:
        show(report)
    return report.exit_code
