# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmarks.

``mhc``, ``e79``, ``selection``, ``lists``, ``index``, ``rule``, ``sparse_models``, ``deepseek_v4``, ``multi_gpu``, ``routing``, ``ways``, ``readme``
and ``table FILE``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as e:
    sys.exit(f"the benchmarks need typer, rich and matplotlib: {e}")

import torch

from . import running
from .pages import RESULTS

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 140)

# ---- options

File, Folder = pathlib.Path, pathlib.Path
Later = Annotated[File, typer.Argument(exists=True, dir_okay=False, help="JSON of the later run.")]
Into = Annotated[File, typer.Option(help="JSON of the run to complete.")]
OPTIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "part": (str, "", {"help": "Some of its parts, by comma; another word names all that there are."}),
    "peers": (bool, False, {"help": "Measure other implementations too, where they import."}),
    "quick": (bool, False, {"help": "Times and errors of the op alone, and few rounds."}),
    "device": (str, "auto", {"help": "auto, cuda, cuda:N or cpu, where shapes are tiny."}),
    "rounds": (int, 20, {"min": 1, "help": "Timed rounds at most; a long call gets fewer."}),
    "compiled": (bool, True, {"help": "Measure compiled calls as well as direct op calls."}),
    "seed": (int | None, None, {"help": "Seed of the inputs; fresh and recorded when left out."}),
    "budget": (float, 1500.0, {"min": 0, "help": "Seconds after which nothing is begun that may be left out."}),
    "limit": (float, 300.0, {"min": 1, "help": "Seconds that one process, or one cell, may take."}),
    "small": (bool, False, {"hidden": True, "help": "Tiny shapes: to try the run out."}),
    "resume": (File | None, None, {"exists": True, "dir_okay": False, "help": "JSON of a run to go on from."}),
    "only": (str, "", {"help": "Words of names of what to measure, by comma."}),
    "parts": (str, "", {"help": "Some of checks,fsdp,scaling,context,failures."}),
    "variant": (str, "", {"help": "Some of the variants, by comma."}),
    "ranks": (int, 0, {"min": 0, "help": "Processes, each with a GPU; 0: as many as there are GPUs."}),
    "jobs": (int, 4, {"min": 1, "help": "Processes side by side."}),
    "toy": (bool, False, {"help": "Tiny models, for trying it out; the only ones on a CPU."}),
    "keep": (Folder, RESULTS, {"help": "Where rows, caches and logs are kept, so that a run goes on."}),
    "out": (Folder, RESULTS, {"help": "Folder for the JSON, the Markdown table and the pictures."}),
}
"""The type of an option, its usual default, and what typer is told of it."""
FLAGS = {"part": ("--part", "--only", "--rows")}


def _command(name: str, about: str, *words: str, **defaults: Any) -> Callable[[Callable[..., None]], None]:
    """Registers a function as a command: ``words`` are its options, ``defaults`` of those that have others."""
    made = []
    for word in (*words, "out"):
        kind, default, told = OPTIONS[word]
        default = defaults.get(word, default)
        if word == "keep":
            default = pathlib.Path(tempfile.gettempdir()) / f"mhc_inductor_{name}"
        flags = FLAGS.get(word, (f"--{word}/--no-{word}" if default is True else f"--{word}",))
        kind = Annotated[kind, typer.Option(*flags, **told)]
        made.append(inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def register(run: Callable[..., None]) -> None:
        def call(**given: Any) -> None:
            run(**given)

        call.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        app.command(name, help=about)(call)

    return register


# ---- what commands share


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _list(text: str) -> tuple[str, ...]:
    return tuple(w.strip() for w in text.split(",") if w.strip())


def _words(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    chosen = _list(text) or tuple(known)
    if unknown := [w for w in chosen if w not in known]:
        raise typer.BadParameter(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def _device(name: str) -> str:
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def _path(out: pathlib.Path, stem: str, **ends: bool) -> pathlib.Path:
    """Returns the JSON of a run in a folder, which is made; its stem gets each of the ends that hold."""
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{stem}{''.join(f'-{end}' for end, holds in ends.items() if holds)}.json"


def _done(run: Any, result: Any, path: pathlib.Path, good: bool) -> None:
    """Writes a result and its page, prints its table, and exits with 1 unless it is ``good``."""
    run.write(result, path)
    console.print(run.table(_read(path)), highlight=False, markup=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


def _filled(run: Any, into: pathlib.Path, fill: Callable[[Any], Any]) -> None:
    """Completes a result with rows of a later run."""
    try:
        result = fill(_read(into))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _done(run, result, into, True)


# ---- operators, and the rule

FAMILIES = {
    "mhc": (
        "the mHC operators: time, memory, errors against fp64, and bitwise determinism.",
        ("peers", "compiled"),
    ),
    "e79": (
        "the E79 scan: time per step, memory, errors against fp64, determinism. cpu and rollup need no GPU.",
        ("compiled", "budget", "small"),
    ),
    "selection": (
        "selection attention: time, memory, errors against fp64, determinism, and where it overtakes dense.",
        ("peers", "budget", "small"),
    ),
    "lists": (
        "attention over lists of keys: time, errors against fp64, memory, and where it overtakes dense.",
        ("quick", "budget", "resume"),
    ),
    "index": (
        "index scores and the keys that they choose: time, memory, errors against fp64, equal bits.",
        ("quick", "budget"),
    ),
    "rule": ("what the rule between dense attention and lists of keys assumes: both sides, a product, a softmax.", ()),
}
"""What a family measures, and the options that it has in addition to part, device, rounds and seed."""
FIELDS = {"budget": "budget_s", "resume": "earlier"}
"""Names of settings that differ from those of their options."""


def _settings(run: Any, part: str, quick: bool, given: dict[str, Any]) -> tuple[Any, bool]:
    """Returns the settings of a run of a family, and whether it is a whole one for its device."""

    def usual(gpu: bool) -> tuple[str, ...]:
        return getattr(run, "GPU_PARTS" if gpu else "CPU_PARTS", run.PARTS)

    shapes = getattr(run.Settings, "shapes", ())
    words = _words(part, (*shapes, *run.PARTS), "part") if part else ()
    quickly = run.QUICK if quick else {"parts": usual(torch.cuda.is_available() and given["device"] != "cpu")}
    made = run.Settings(**{FIELDS.get(k, k): v for k, v in given.items()} | quickly)
    made.parts = tuple(p for p in run.PARTS if p in words) or made.parts
    if shapes:
        made.shapes = tuple(s for s in shapes if s in words) or shapes
    same = not made.small and getattr(made, "shapes", ()) == shapes
    return made, same and made.parts == usual(made.resolve().type == "cuda") and not quick


def _family(family: str, about: str, options: tuple[str, ...]) -> None:
    """Registers the command of a family: its module has ``Settings``, ``PARTS``, ``Run``, ``write`` and ``table``."""
    run = importlib.import_module(f".{family}", __package__)
    defaults = {
        k: getattr(run.Settings, FIELDS.get(k, k)) for k in ("rounds", "peers", "budget") if k in (*options, "rounds")
    }

    @_command(family, f"Measures {about}", "part", "device", "rounds", "seed", *options, **defaults)
    def measure(part: str, out: pathlib.Path, quick: bool = False, **given: Any) -> None:
        if "resume" in given:
            given["resume"] = given["resume"] and _read(given["resume"])
        settings, whole = _settings(run, part, quick, given)
        where = settings.resolve()
        if where.type == "cuda":
            torch.cuda.set_device(where)
        else:
            console.print(run.Run.notice, style="yellow")
        path = _path(out, family, cpu=where.type == "cpu", partial=not whole)
        try:
            result = run.Run(settings, lambda found: running.save(found, path), _say).run()
        except running.OtherRun as error:
            raise typer.BadParameter(str(error)) from error
        _done(run, result, path, not result["skipped"].keys() & {*run.PARTS})


for _name, _of in FAMILIES.items():
    _family(_name, *_of)


@app.command("lists_fill")
def lists_filled(
    later: Later,
    only: Annotated[str, typer.Option(help="Some of its parts: crossing,peers; all when left out.")] = "",
    into: Into = RESULTS / "lists.json",
) -> None:
    """Puts the parts that a later run of lists has into another's result, with its device and commit. Measures nothing."""
    from . import lists

    found = _read(later)
    parts = _words(only, lists.PARTS, "part") if only else found["settings"]["parts"]
    _filled(lists, into, lambda result: lists.fill(result, found, parts))


@app.command("sparse_fill")
def sparse_filled(later: Later, into: Into = RESULTS / "sparse_models.json") -> None:
    """Completes a run of sparse_models with the peers' rows that it had no time for. Measures nothing."""
    from . import sparse_models

    _filled(sparse_models, into, lambda result: sparse_models.fill(result, _read(later)))


@app.command()
def tritons(
    older: Annotated[pathlib.Path, typer.Argument(help="Folder of runs with one Triton.")],
    newer: Annotated[pathlib.Path, typer.Argument(help="Folder of the same runs with another.")],
    out: Annotated[pathlib.Path, typer.Option(help=OPTIONS["out"][2]["help"])] = RESULTS,
) -> None:
    """Compares the times, registers and spills of two versions of Triton on one card."""
    from . import tritons as run

    _done(run, run.compare(older, newer), out / "tritons.json", True)


# ---- whole models, several GPUs, the pass


@_command(
    "deepseek_v4",
    "Measures DeepSeek-V4 end to end: eager, compiled, compiled with the plugin; with and without checkpointing.",
    *("variant", "part", "device", "rounds", "toy", "keep"),
    rounds=30,
)
def _deepseek(variant: str, part: str, device: str, rounds: int, toy: bool, keep: Folder, out: Folder) -> None:
    from . import deepseek_v4 as run
    from . import processes

    where = _device(device)
    toy = toy or where == "cpu"
    variants, parts = _words(variant, run.VARIANTS, "variant"), _words(part, run.PARTS, "part")
    path = _path(out, "deepseek_v4", tiny=toy, partial=(variants, parts) != (run.VARIANTS, run.PARTS))
    settings = run.settings(where, toy, variants, parts, rounds)
    result = run.gather(settings, processes.run("deepseek_v4", settings, keep, _say))
    _done(run, result, path, not any("error" in row for row in result["rows"]))


@_command(
    "sparse_models",
    "Measures models with sparse attention end to end: time, memory, compile time, errors against fp32.",
    *("only", "variant", "budget", "limit", "toy", "device", "rounds", "keep"),
)
def _sparse(only: str, variant: str, toy: bool, device: str, keep: Folder, out: Folder, **given: Any) -> None:
    from . import processes
    from . import sparse_cases as targets
    from . import sparse_models as run

    where = _device(device)
    toy = toy or where == "cpu"
    every = targets.TOY_CASES if toy else targets.CASES
    cases = tuple(c for c in every if all(w in c.name for w in _list(only)))
    if not cases:
        raise typer.BadParameter(f"no case has all of {only} in its name; there are {[c.name for c in every]}")
    variants = _words(variant, targets.VARIANTS, "variant")
    limits = (given["rounds"], toy, given["budget"], given["limit"])
    settings = run.Settings(where, cases, tuple(v for v in targets.VARIANTS if v in variants), *limits)
    path = _path(out, "sparse_models", toy=toy, partial=cases != every or {*variants} != {*targets.VARIANTS})
    save = lambda rows: run.write(run.gather(settings, rows), path)  # noqa: E731
    rows = processes.run("sparse_models", settings, keep, _say, save)
    _done(run, run.gather(settings, rows), path, not any("error" in row for row in rows))


@_command(
    "ways",
    "Checks models in every way of training and serving against eager, many cells at a time.",
    *("only", "jobs", "budget", "limit", "toy", "device", "keep"),
    jobs=12,
    budget=420.0,
    limit=400.0,
)
def _ways(only: str, jobs: int, toy: bool, device: str, keep: Folder, out: Folder, **given: Any) -> None:
    from . import ways as run

    where = _device(device)
    limits = (given["budget"], given["limit"], _list(only))
    settings = run.Settings(where, toy or where == "cpu", jobs, *limits)
    if not any(map(settings.chosen, settings.plan())):
        raise typer.BadParameter(f"no cell has one of {only} in its name")
    path = _path(out, "ways", toy=settings.toy)
    result = run.run(settings, path, keep, _say)
    _done(run, result, path, result["complete"])


@_command(
    "multi_gpu",
    "Checks and measures several GPUs of one host: sharded ops, FSDP2, scaling, context parallelism, failures.",
    *("parts", "only", "ranks", "device", "toy", "budget"),
    budget=290.0,
)
def _many(parts: str, only: str, ranks: int, device: str, toy: bool, budget: float, out: Folder) -> None:
    from . import multi_gpu as run

    where = _device(device)
    count = ranks or (torch.cuda.device_count() if where == "cuda" else 2)
    if count < 2 or (where == "cuda" and count > torch.cuda.device_count()):
        raise typer.BadParameter(f"--ranks {count}: it takes at least 2, and a GPU for each")
    settings = run.Settings(where, count, toy or where == "cpu", _words(parts, run.PARTS, "part"), budget, _list(only))
    path = _path(out, "multi_gpu", toy=settings.toy, partial={*settings.parts} != {*run.PARTS} or bool(only))
    result = run.run(settings, path, _say)
    _done(run, result, path, result["complete"] and all(job["passed"] for job in result["jobs"]))


@app.command()
def routing(
    out: Annotated[pathlib.Path, typer.Option(help=OPTIONS["out"][2]["help"])] = RESULTS,
    layers: Annotated[str, typer.Option(help="Depths to measure, by comma.")] = "2,4,8,16,43",
    compiled: Annotated[int, typer.Option(min=0, help="Depth of the whole compile; 0: none.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "cpu",
) -> None:
    """Measures the routing pass: seconds by depth, time per node, and share of a compile. Needs no GPU."""
    from . import routing as run

    depths = tuple(int(w) for w in _list(layers))
    _done(run, run.run(torch.device(_device(device)), depths, compiled, _say), _path(out, "routing"), True)


@app.command()
def table(
    file: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="A result's JSON.")],
    write: Annotated[bool, typer.Option("--write", help="Rewrite the Markdown and the PNG next to it.")] = False,
) -> None:
    """Prints a stored run as Markdown."""
    result = _read(file)
    module = importlib.import_module(f".{result['operator']}", __package__)
    print(module.table(result), end="")
    if write:
        module.write(result, file)


@app.command()
def readme() -> None:
    """Write the results into README.md and the documentation, and draw the README's picture."""
    from . import pages

    _say("\n".join(f"wrote {p.relative_to(pages.ROOT)}" for p in pages.write()) or "no page changed")


if __name__ == "__main__":
    app()
