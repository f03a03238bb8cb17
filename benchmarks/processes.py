# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of whole models share: worker processes, rows that a later run keeps, bars, results and their tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import environment, running
from .source_hash import ROOT, ROUTING, source_hash

Row = dict[str, Any]

# ---- processes


def environ(*paths: str, **changes: str) -> dict[str, str]:
    """Returns the environment of a process that imports from ``paths`` first, then from this checkout."""
    places = [*paths, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **changes}


class Worker:
    """A process of :mod:`benchmarks.worker`, which takes lines and answers with lines; ``log`` holds what it prints."""

    def __init__(self, words: Sequence[str], log: pathlib.Path, env: Mapping[str, str]) -> None:
        self.log, pipe = log, subprocess.PIPE
        words = [sys.executable, "-m", "benchmarks.worker", *words]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=out, text=True, errors="replace"
            )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> str:
        """Returns the next line that the process answers with, "" where it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ended(self, limit: float | None = None) -> object:
        """Waits for the end, at most ``limit`` seconds; returns the exit code, or which limit ended the process."""
        try:
            self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.close()
            return f"its limit of {limit:.0f} s"
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def output(self) -> str:
        """Returns the end of what the process printed."""
        return self.log.read_text(errors="replace")[-3000:]


def begin(module: str, job: Any, folder: pathlib.Path, env: Mapping[str, str]) -> Worker:
    """Starts the process of a job of ``module``. Its row and its log are files in ``folder`` with the job's name."""
    path = folder / f"{job.name}.json"
    path.unlink(missing_ok=True)
    words = ["measure", module, json.dumps(dataclasses.asdict(job)), str(path)]
    return Worker(words, folder / f"{job.name}.log", env)


def finish(worker: Worker, job: Any, folder: pathlib.Path, limit: float | None = None, **further: Any) -> Row:
    """Waits for a job's process, and returns and keeps its row; a failed one has "error", and what it had saved."""
    path, ended = folder / f"{job.name}.json", worker.ended(limit)
    row = {**job.named, "error": f"the process ended with {ended}"}
    with contextlib.suppress(OSError, ValueError):
        row = {**(row if ended else {}), **json.loads(path.read_text())}
    if "error" in row:
        row["output"] = worker.output()
    row |= further | {"stamp": stamp(job)}
    path.write_text(json.dumps(row))
    return row


def stamp(job: Any) -> Row:
    """Returns what a kept row must carry to be reused: job, hashes of the sources, commit, transformers."""
    import transformers

    return {
        "job": json.loads(json.dumps(dataclasses.asdict(job))),
        "sources": [environment.source_hash(), source_hash(folders=ROUTING)],
        "transformers": transformers.__version__,
        **environment.commit(),
    }


def kept(folder: pathlib.Path, job: Any) -> Row | None:
    """Returns the kept row of a job, if it is of this code and did not fail."""
    with contextlib.suppress(OSError, ValueError):
        row: Row = json.loads((folder / f"{job.name}.json").read_text())
        if row.get("stamp") == stamp(job) and "error" not in row:
            return row
    return None


def make_importable(words: str, folder: pathlib.Path) -> tuple[str, ...]:
    """Prepends folders and wheels to ``sys.path``; returns the folders.

    Args:
        words: paths separated as in PYTHONPATH. Each is a folder with packages, or a wheel.
        folder: where wheels are unpacked: transformers looks for its models among files.

    Raises:
        FileNotFoundError: if a path does not exist.
        ImportError: if transformers cannot be imported with these paths, with what to carry too.
    """
    paths = []
    for word in filter(None, words.split(os.pathsep)):
        path = pathlib.Path(word).resolve()
        if not path.exists():
            raise FileNotFoundError(f"--transformers: {path} does not exist")
        if path.suffix == ".whl":
            wheel, path = path, folder / path.stem
            if not path.exists():
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(path)
        paths.append(str(path))
    sys.path[:0] = paths
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"transformers cannot be imported: {error}. transformers 5.23 needs huggingface-hub 1.31 or newer, where "
            "5.17 accepts 1.5; tokenizers 0.23.1, safetensors 0.8.0 and regex 2025.10.22 are enough for both. "
            f"Name folders or wheels of what is too old in --transformers too, separated by {os.pathsep!r}"
        ) from error
    return tuple(paths)


# ---- figures


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Returns how long a call takes, with all that it leaves to the device, on the host's clock."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def against(value: float, bar: float | None, goal: float | None, least: bool = False) -> Row:
    """Returns a figure with its bar and its goal, and whether it meets them: at most, or at ``least``, these values."""

    def met(limit: float | None) -> bool | None:
        return None if limit is None else value >= limit if least else value <= limit

    return {"value": value, "bar": bar, "met_bar": met(bar), "goal": goal, "met_goal": met(goal)}


# ---- results


def header(operator: str, device: torch.device, **further: Any) -> Row:
    """Returns what a result begins with: commit, sources, device, versions with transformers'."""
    import transformers

    found = environment.header(device) | {"operator": operator} | further
    found["versions"]["transformers"] = transformers.__version__
    return found


def notice(device: torch.device) -> str | None:
    return None if device.type == "cuda" else running.CPU_NOTICE


def without_stamps(rows: Sequence[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "stamp"} for row in rows]


def write(
    result: Row,
    path: pathlib.Path,
    table: Callable[[Row], str],
    plot: Callable[[Row, pathlib.Path], None] | None = None,
) -> None:
    """Writes the JSON and, next to it, the table, and the picture where matplotlib is installed."""
    running.save(result, path)
    saved = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(saved))
    if plot is not None:
        with contextlib.suppress(ImportError):
            plot(saved, path.with_suffix(".png"))


def figure(row: Mapping[str, Any], name: str, spec: str) -> str:
    """Returns a cell of a table, empty where the row has no such figure."""
    return "" if row.get(name) is None else f"{row[name]:{spec}}"


def met(of: Mapping[str, Any], level: str, spec: str = "") -> str:
    """Returns a cell of a table with a bar or a goal of :func:`against`, empty where there is none."""
    return "" if of[level] is None else f"{of[level]:{spec}} {'met' if of[f'met_{level}'] else '**not met**'}"


def counted(ops: Mapping[str, int], none: str = "none") -> str:
    return ", ".join(f"{n} {op}" for op, n in ops.items()) or none


def document(title: str, lines: Sequence[str], *parts: str) -> str:
    """Returns a page of Markdown: the title, a list of ``lines``, and the parts that are not empty."""
    return "\n\n".join(filter(None, [f"# {title}", "\n".join(f"- {line}" for line in lines), *parts])) + "\n"
