# SPDX-License-Identifier: Apache-2.0
"""The steps of ``python -m mhc_inductor try``, and what it prints and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mhc_inductor.explanation import explain
from mhc_inductor.try_model import INSTALL, configuration
from mhc_inductor.try_model.worker import COMPILE, EAGER, OURS, Job, kind_of, step
from mhc_inductor.tuning.command import progress

TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Relative differences from eager that rounding explains, by dtype."""


def main(job: Job, settings: Sequence[str], as_is: bool, folder: pathlib.Path, limit: float, as_json: bool) -> int:
    """Tries a model; writes ``report.html``, ``figures.json`` and the variants' logs to ``folder``.

    Args:
        job: what to build and call, before its configuration is changed.
        settings: ``key=value`` of the configuration.
        as_is: whether the configuration keeps its sizes.
        folder: where to write; it is made if it does not exist.
        limit: the largest relative difference from eager that is accepted.
        as_json: whether to print the figures as one JSON object and nothing else. Progress goes to standard error.

    Returns:
        The exit status: 0 if every variant ran and is within ``limit``; 1 if not, or if something that is needed cannot
        be had here; 2 for wrong arguments.
    """
    if missing := [name for name in ("rich", "transformers") if importlib.util.find_spec(name) is None]:
        print(f"try needs {' and '.join(missing)}: {INSTALL}", file=sys.stderr)
        return 1
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with progress(5) as (begin, say):
            begin("build")
            job, model, notes = settled(job, settings, as_is)
            folder.mkdir(parents=True, exist_ok=True)
            for note in notes:
                say(note)
            figures = _header(job, model) | {"notes": notes, "tolerance": limit}
            figures |= _measured(job, model, folder, limit, begin)
    except (ValueError, OSError) as error:
        print(f"try: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    (folder / "figures.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if as_json:
        print(json.dumps(figures))
    else:
        _show(figures, folder)
    return 0 if figures["passed"] else 1


def settled(job: Job, settings: Sequence[str], as_is: bool) -> tuple[Job, Any, list[str]]:
    """Returns the job with a configuration that the model takes, the model, and notes on what was changed.

    Raises:
        ValueError: if an argument is wrong, or the model takes none of the configurations that were tried.
        OSError: if the configuration cannot be fetched.
    """
    config, user = _asked(job, settings)
    always = configuration.without_chance(config) if job.training else {}
    before, notes = configuration.fields(config), list[str]()
    every = configuration.STEPS
    fewer = [tuple(s for s in every if s != left) for left in reversed(every)]
    for steps in ((),) if as_is or job.weights else (every, *fewer):
        try:
            changes = always | configuration.smaller(config, user, steps) | user
            small = dataclasses.replace(job, changes=changes)
            model = small.build()
            step(model, model, small.inputs(model))
        except Exception as error:  # whatever a model raises for sizes that it does not take
            sizes = f"with smaller {', '.join(steps)}" if steps else "as it is"
            notes.append(f"the model refuses its configuration {sizes}: {type(error).__name__}: {error}")
            continue
        notes += _notes(small, model, before)
        return small, model, notes
    raise ValueError("\n     ".join(notes))


def _asked(job: Job, settings: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration before any change, and what the user sets in it. Raises as :func:`settled` does."""
    if job.weights and not pathlib.Path(job.source).is_dir():
        raise ValueError(f"--weights takes a folder with config.json and weights, got {job.source!r}")
    if job.device != "cpu" and not (job.device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"--device takes cpu, or cuda where torch sees a GPU; got {job.device!r}")
    config = configuration.load(job.source, job.trust_remote_code)
    kind_of(config)  # raises if there is no such model
    user = configuration.given(config, settings)
    most = user.get("max_position_embeddings", getattr(config.get_text_config(), "max_position_embeddings", None))
    if most is not None and job.tokens > most:
        raise ValueError(f"--tokens {job.tokens}: the model takes at most {most} (max_position_embeddings)")
    return config, user


def _notes(job: Job, model: Any, before: dict[str, Any]) -> list[str]:
    """Returns what was changed in a configuration that was ``before``, and whether its indexers choose any keys."""
    told = {k: v for k, v in job.changes.items() if v != before[k] and not isinstance(v, (list, dict))}
    short = [f"{k} {before[k]} -> {v}" for k, v in told.items()]
    notes = [f"changed for this run: {', '.join(short)}"] if short else []
    keys = job.tokens // min((before.get("compress_rates") or {"": 1}).values())
    if (topk := configuration.fields(model.config).get("index_topk") or 0) >= keys:
        notes.append(f"index_topk={topk} takes all of {keys} keys: more --tokens, or --set index_topk=, and it chooses")
    return notes


def _header(job: Job, model: Any) -> dict[str, Any]:
    import transformers

    import mhc_inductor

    device = "cpu" if job.device == "cpu" else torch.cuda.get_device_name(job.device)
    own = {
        "mhc_inductor": mhc_inductor.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    size = sum(p.numel() for p in model.parameters())
    return {"model": type(model).__name__, "parameters": size, "job": dataclasses.asdict(job), "device": device} | own


def _measured(
    job: Job, model: Any, folder: pathlib.Path, limit: float, begin: Callable[[str | None], None]
) -> dict[str, Any]:
    """Returns the rows of all variants and what ``explain`` printed, whose page it writes."""
    rows, found = dict[str, Any](), dict[str, Any]()
    for name in (EAGER, "explain", COMPILE, OURS):
        begin(None)
        begin(name)
        if name != "explain":
            rows[name] = _variant(job, name, folder / f"{name}.log")
            errors = rows[name].get("errors", {})
            rows[name]["passed"] = "error" not in rows[name] and all(
                e is not None and e <= limit for e in errors.values()
            )
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), torch.set_grad_enabled(job.training):
                report = explain(model, **job.inputs(model))
            report.save(folder / "report.html")
            found = {"routed": len(report.routed), "near_misses": len(report.near_misses), "explain": said.getvalue()}
        except Exception as error:  # the variants are measured all the same
            found = {"error": f"explain failed: {type(error).__name__}: {error}"}
        del model
    begin(None)
    passed = "error" not in found and all(row["passed"] for row in rows.values())
    return {"variants": rows, "routing": found, "passed": passed}


def _variant(job: Job, variant: str, log: pathlib.Path) -> dict[str, Any]:
    """Returns what a process of its own measured, with empty compile caches; "error" says why it failed."""
    with tempfile.TemporaryDirectory() as empty, log.open("w", encoding="utf-8") as output:
        path, words = pathlib.Path(empty, "row.json"), json.dumps(dataclasses.asdict(job))
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        command = [sys.executable, "-m", "mhc_inductor.try_model.worker", words, variant, str(path)]
        code = subprocess.run(command, env=env, stdout=output, stderr=output, check=False).returncode
        row: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if code and "error" not in row:
        row["error"] = f"its process ended with {code}" + (", killed: was memory full?" if code == -9 else "")
    if "error" in row:
        row["error"] += f" ({log} has all of it)"
    return row


def _show(figures: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.console import Console
    from rich.table import Table

    job, limit = figures["job"], figures["tolerance"]
    of = f"{'a training step' if job['training'] else 'a forward'} of {job['batch']} x {job['tokens']} tokens"
    size = f"{figures['parameters'] / 1e6:.1f} M parameters"
    table = Table(title=f"{figures['model']}, {size}: {of}, {job['dtype']}, {figures['device']}", title_justify="left")
    for heading in ("", "compile, s", "call, ms", "peak, GiB", f"relative difference from eager, at most {limit:g}"):
        table.add_column(heading, overflow="fold", no_wrap=not heading)
    for name, row in figures["variants"].items():
        peak = "not measured" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**30:.2f}"
        numbers = [f"{row[k] * f:.4g}" if k in row else "" for k, f in (("compile_s", 1), ("call_s", 1e3))]
        errors = ", ".join(f"{k} {'not finite' if e is None else f'{e:.1e}'}" for k, e in row.get("errors", {}).items())
        verdict = row.get("error") or errors + ("" if row["passed"] else ": TOO MUCH")
        title = f'backend="{name}"' if name == OURS else name
        table.add_row(title, *numbers, peak, verdict)
    console = Console(highlight=False, markup=False)
    console.print(table)
    print(
        "Peak: memory of the GPU in a call." if job["device"] != "cpu" else "Peak: RSS of the process, compiling too."
    )
    print(figures["routing"].get("explain", "").rstrip() or figures["routing"]["error"])
    if not figures["routing"].get("routed"):
        print("Nothing of this model is routed: with this package it runs as torch.compile compiles it.")
    print(f"Written to {folder}: report.html, figures.json, and a log of each variant")
