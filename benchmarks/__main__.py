# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmarks.

``mhc``, ``e79``, ``selection``, ``lists``, ``index``, ``rule``, ``sparse_models``, ``deepseek_v4``, ``multi_gpu``, ``routing``, ``ways``, ``readme``
and ``table FILE``.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import tempfile
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ImportError as e:
    sys.exit(f"the benchmarks need typer, rich and matplotlib: {e}")

from .pages import RESULTS

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 140)
_TEMPORARY = pathlib.Path(tempfile.gettempdir())
SPARSE_KEPT = _TEMPORARY / "mhc_inductor_sparse_models"
KEPT = _TEMPORARY / "mhc_inductor_deepseek_v4"
WAYS_KEPT = _TEMPORARY / "mhc_inductor_ways"

# ---- options

Device = Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu.")]
DeviceTiny = Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu (tiny shapes).")]
DeviceKind = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds; every variant once a round.")]
RoundsAtMost = Annotated[int, typer.Option(min=1, help="Timed rounds at most; a long call gets fewer.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the inputs; fresh and recorded when left out.")]
Warm = Annotated[bool, typer.Option(help="Compile everything first, in processes side by side.")]
Toy = Annotated[bool, typer.Option("--toy", help="Tiny models, for trying it out; the only ones on a CPU.")]
OutAll = Annotated[pathlib.Path, typer.Option(help="Folder for the JSON, the Markdown table and the PNG.")]
OutPictures = Annotated[pathlib.Path, typer.Option(help="Folder for the JSON, the Markdown table and the PNGs.")]
OutTable = Annotated[pathlib.Path, typer.Option(help="Folder for the JSON and the Markdown table.")]
OutShort = Annotated[pathlib.Path, typer.Option(help="Folder for the JSON and the table.")]
Kept = Annotated[
    pathlib.Path, typer.Option(help="Where finished rows are kept, so that a run goes on where it stopped.")
]
Later = Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="JSON of the later run.")]
Into = Annotated[pathlib.Path, typer.Option(help="JSON of the run to complete.")]


# ---- what commands share


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _shown(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _list(text: str) -> tuple[str, ...]:
    return tuple(w.strip() for w in text.split(",") if w.strip())


def _words(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    chosen = _list(text) or known
    if unknown := [w for w in chosen if w not in known]:
        raise typer.BadParameter(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def _device(name: str) -> str:
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _usual(run: Any, device: str) -> tuple[str, ...]:
    """Returns the parts that are run where none are named."""
    import torch

    parts: tuple[str, ...] = run.GPU_PARTS if torch.cuda.is_available() and device != "cpu" else run.CPU_PARTS
    return parts


def _whole(run: Any, settings: Any) -> bool:
    """Returns whether a run has all parts that there are for its device."""
    parts = run.GPU_PARTS if settings.resolve().type == "cuda" else run.CPU_PARTS
    return bool(settings.parts == parts)


def _run(run: Any, settings: Any, out: pathlib.Path, stem: str, whole: bool, as_named: bool = False) -> None:
    """Makes a run of a benchmark module, writes its files and prints its table; exits with 1 if a part failed.

    The files' stem gets -cpu and -partial where they hold, unless it is ``as_named``.
    """
    import torch

    from . import running

    where = settings.resolve()
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        console.print(run.Run.notice, style="yellow")
    if not as_named:
        stem += ("" if where.type == "cuda" else "-cpu") + ("" if whole else "-partial")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{stem}.json"
    result = run.Run(settings, lambda found: running.save(found, path), _say).run()
    run.write(result, path)
    _shown(run.table(_read(path)))
    if result["skipped"].keys() & set(getattr(run, "PARTS", ())):
        raise typer.Exit(1)


def _read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


# ---- operators


@app.command()
def mhc(
    peers: Annotated[bool, typer.Option("--peers", help="Measure eager, torch.compile and liger-kernel too.")] = False,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="D = 4096, npu and accuracy only; 20 rounds.")] = False,
    rows: Annotated[str, typer.Option(help="Groups to run, by comma: 2560,4096,7168,npu,decode,memory,...")] = "",
    rounds: Rounds = 40,
    compiled: Annotated[bool, typer.Option(help="Measure compiled steps as well as direct op calls.")] = True,
    seed: Seed = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Another token count than the table's.")] = None,
    dim: Annotated[int | None, typer.Option(min=16, help="Another D than the table's.")] = None,
    out: OutAll = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; mhc when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measures the mHC operators: time, memory, errors against fp64, and bitwise determinism."""
    from . import mhc as run

    chosen = _words(rows, run.GROUPS, "rows") if rows else run.QUICK_GROUPS if quick else run.GROUPS
    settings = run.Settings(
        device, chosen, 20 if quick else rounds, seed=seed, peers=peers, compiled=compiled, tokens=tokens, dim=dim
    )
    if settings.resolve().type != "cuda":
        # On a CPU one small shape stands for every width.
        settings.parts = tuple(dict.fromkeys("4096" if g in ("2560", "7168") else g for g in chosen))
    whole = chosen == run.GROUPS and tokens is None and dim is None
    _run(run, settings, out, name or "mhc", whole, as_named=bool(name))


@app.command()
def e79(
    part: Annotated[
        str, typer.Option(help="Some of speed,batch,further,decode,memory,accuracy,determinism,cpu,rollup.")
    ] = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure torch.compile of the loop too: a minute more.")
    ] = False,
    device: Device = "auto",
    rounds: Rounds = 40,
    compiled: Annotated[bool, typer.Option(help="Measure compiled calls as well as eager ones.")] = True,
    seed: Seed = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which nothing further is compiled.")] = 90.0,
    sizes: Annotated[str, typer.Option(help="Some n, by comma; the table's when left out.")] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Another B than the table's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another T than the table's.")] = None,
    out: OutAll = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; e79 when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measures the E79 scan: time per step, memory, errors against fp64, determinism. cpu and rollup need no GPU."""
    from . import e79 as run
    from . import e79_targets as targets

    parts = _words(part, run.PARTS, "part") if part else _usual(run, device)
    settings = run.Settings(
        device, parts, rounds, budget, seed, compiled=compiled, peers=peers, batch=batch, steps=steps
    )
    settings.sizes = tuple(int(w) for w in _list(sizes)) or targets.SIZES
    whole = _whole(run, settings) and settings.sizes == targets.SIZES and batch is None and steps is None
    _run(run, settings, out, name or "e79", whole, as_named=bool(name))


@app.command()
def selection(
    part: Annotated[str, typer.Option(help="Some of speed,crossing,errors,memory,layers,cpu,cpu_dense.")] = "",
    peers: Annotated[bool, typer.Option(help="Measure flash-linear-attention too, where it imports.")] = True,
    device: Device = "auto",
    rounds: RoundsAtMost = 40,
    warm: Warm = True,
    seed: Seed = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which the crossing adds no length.")] = 140.0,
    small: Annotated[bool, typer.Option("--small", hidden=True, help="Tiny shapes: to try the run out.")] = False,
    out: OutPictures = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; selection when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measures selection attention: time, memory, errors against fp64, determinism, and where it overtakes dense."""
    from . import selection as run

    parts = _words(part, run.PARTS, "part") if part else _usual(run, device)
    settings = run.Settings(device, parts, rounds, budget, seed, small, warm, peers)
    _run(run, settings, out, name or "selection", _whole(run, settings) and not small, as_named=bool(name))


@app.command()
def lists(
    only: Annotated[
        str, typer.Option(help="Some of A,B,C,D,decode and of speed,errors,memory,crossing,peers; all when left out.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Times of the op and errors only; 8 rounds.")] = False,
    device: DeviceTiny = "auto",
    rounds: RoundsAtMost = 20,
    warm: Warm = True,
    seed: Seed = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no crossing and no peer is begun.")] = 480.0,
    resume: Annotated[
        pathlib.Path | None, typer.Option(exists=True, dir_okay=False, help="JSON of a run to go on from.")
    ] = None,
    out: OutAll = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; lists when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measures attention over lists of keys: time, errors against fp64, memory, and where it overtakes dense."""
    from . import lists as run
    from . import lists_targets as targets
    from .running import OtherRun

    every = tuple(targets.SHAPES)
    words = _words(only, (*every, *run.PARTS), "case or part") if only else ()
    parts = tuple(p for p in run.PARTS if p in words) or (run.QUICK_PARTS if quick else run.PARTS)
    shapes = tuple(n for n in every if n in words) or every
    settings = run.Settings(
        device, parts, run.QUICK_ROUNDS if quick else rounds, budget, seed, warm=warm, shapes=shapes
    )
    settings.earlier = None if resume is None else _read(resume)
    try:
        _run(run, settings, out, name or "lists", parts == run.PARTS and shapes == every)
    except OtherRun as error:
        raise typer.BadParameter(str(error)) from error


@app.command("lists_fill")
def lists_filled(
    later: Later,
    only: Annotated[str, typer.Option(help="Some of its parts: crossing,peers; all when left out.")] = "",
    into: Into = RESULTS / "lists.json",
) -> None:
    """Puts the parts that a later run of lists has into another's result, with its device and commit. Measures nothing."""
    from . import lists as run
    from . import lists_fill

    found = _read(later)
    parts = _words(only, run.PARTS, "part") if only else found["settings"]["parts"]
    try:
        result = lists_fill.fill(_read(into), found, parts, run.LISTS_OF)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run.write(result, into)
    _shown(run.table(result))


@app.command()
def index(
    only: Annotated[str, typer.Option(help="Some of speed,errors,memory; all when left out.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Times and errors without other implementations.")] = False,
    device: DeviceTiny = "auto",
    rounds: RoundsAtMost = 20,
    seed: Seed = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no further peer is begun.")] = 50.0,
    out: OutTable = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; index when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measures index scores and the keys that they choose: time, memory, errors against fp64, equal bits."""
    from . import index as run

    parts = _words(only, run.PARTS, "part") if only else run.QUICK_PARTS if quick else run.PARTS
    settings = run.Settings(device, parts, rounds, budget, seed, peers=not quick)
    _run(run, settings, out, name or "index", parts == run.PARTS and not quick)


@app.command()
def tritons(
    older: Annotated[pathlib.Path, typer.Argument(help="Folder of runs with one Triton.")],
    newer: Annotated[pathlib.Path, typer.Argument(help="Folder of the same runs with another.")],
    out: OutTable = RESULTS,
) -> None:
    """Compares the times, registers and spills of two versions of Triton on one card."""
    from . import running
    from . import tritons as run

    result = run.compare(older, newer)
    running.save(result, out / f"{run.NAME}.json")
    (out / f"{run.NAME}.md").write_text(run.table(result) + "\n")
    _shown(run.table(result))


@app.command()
def rule(
    only: Annotated[str, typer.Option(help="Some of sides,product,written; all when left out.")] = "",
    device: DeviceTiny = "auto",
    rounds: RoundsAtMost = 12,
    seed: Seed = None,
    out: OutTable = RESULTS,
) -> None:
    """Measures what the rule between dense attention and lists of keys assumes: both sides, a product, a softmax."""
    from . import rule as run

    parts = _words(only, run.PARTS, "part") if only else run.PARTS
    settings = run.Settings(device=device, parts=parts, rounds=rounds, seed=seed)
    _run(run, settings, out, "rule", parts == run.PARTS)


# ---- whole models, several GPUs, the pass


@app.command("deepseek_v4")
def deepseek(
    out: OutShort = RESULTS,
    keep: Kept = KEPT,
    variant: Annotated[str, typer.Option(help="eager,torch.compile,trivial,mhc_inductor: some of them.")] = "",
    part: Annotated[str, typer.Option(help="forward,training,checkpointed: some of them.")] = "",
    device: DeviceKind = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 30,
    jobs: Annotated[
        int, typer.Option(min=1, help="Jobs that compile at the same time; some always compile alone.")
    ] = 4,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny model, for trying it out; the only one on a CPU.")
    ] = False,
) -> None:
    """Measures DeepSeek-V4 end to end: eager, compiled, compiled with the plugin; with and without checkpointing."""
    from . import deepseek_model, deepseek_v4
    from .deepseek_v4 import PARTS, VARIANTS

    where = _device(device)
    tiny = tiny or where == "cpu"
    settings = deepseek_v4.Settings(
        device=where,
        size=deepseek_model.TINY if tiny else deepseek_model.Size(),
        variants=_words(variant, VARIANTS, "variant"),
        parts=_words(part, PARTS, "part"),
        rounds=rounds,
        jobs=jobs,
    )
    whole = settings.variants == VARIANTS and settings.parts == PARTS
    stem = "deepseek_v4" + ("-tiny" if tiny else "") + ("" if whole else "-partial")
    rows = deepseek_v4.run(settings, keep, lambda text: console.print(text, highlight=False))
    result = deepseek_v4.gather(settings, rows)
    out.mkdir(parents=True, exist_ok=True)
    deepseek_v4.write(result, out / f"{stem}.json")
    _shown(deepseek_v4.table(result))
    if any("error" in row for row in result["rows"]):
        raise typer.Exit(1)


@app.command("sparse_models")
def sparse(
    only: Annotated[str, typer.Option(help="Words of the cases' names to measure, by comma: deepseek_v32,8192.")] = "",
    variant: Annotated[
        str, typer.Option(help="mhc_inductor,torch.compile,eager, the first two also with +graphs: some of them.")
    ] = "",
    transformers: Annotated[
        str, typer.Option(help="Folders or wheels to import transformers and its dependencies from, as in PYTHONPATH.")
    ] = "",
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which nothing begins; peers are last.")] = 1500.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one process may take.")] = 300.0,
    toy: Toy = False,
    device: DeviceKind = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls at most.")] = 20,
    keep: Kept = SPARSE_KEPT,
    out: OutAll = RESULTS,
) -> None:
    """Measures models with sparse attention end to end: time, memory, compile time, errors against fp32."""
    from . import processes
    from . import sparse_cases as targets
    from . import sparse_models as run

    where = _device(device)
    toy = toy or where == "cpu"
    words = _list(only)
    every = targets.TOY_CASES if toy else targets.CASES
    cases = tuple(c for c in every if all(w in c.name for w in words))
    if not cases:
        raise typer.BadParameter(f"no case has all of {words} in its name; there are {[c.name for c in every]}")
    try:
        paths = processes.make_importable(transformers, keep / "wheels")
    except (FileNotFoundError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    variants = _words(variant, targets.VARIANTS, "variant")
    settings = run.Settings(where, cases, variants, rounds, toy, budget, limit, paths)
    whole = cases == every and set(variants) == set(targets.VARIANTS)
    path = out / ("sparse_models" + ("-toy" if toy else "") + ("" if whole else "-partial") + ".json")
    out.mkdir(parents=True, exist_ok=True)

    def step(text: str) -> None:
        console.print(text, highlight=False, style="dim")

    rows = run.run(settings, keep, step, lambda rows: run.write(run.gather(settings, rows), path))
    result = run.gather(settings, rows)
    run.write(result, path)
    _shown(run.table(_read(path)))
    if any("error" in row for row in result["rows"]):
        raise typer.Exit(1)


@app.command()
def ways(
    only: Annotated[str, typer.Option(help="Words of cells' names, by comma: mhc: train,decode,8192.")] = "",
    transformers: Annotated[str, typer.Option(help="Folders or wheels, as of sparse_models.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 12,
    budget: Annotated[float, typer.Option(min=0, help="Seconds after which no cell begins.")] = 420.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 400.0,
    toy: Toy = False,
    device: DeviceKind = "auto",
    keep: Annotated[pathlib.Path, typer.Option(help="Folder for caches of compiled code and logs.")] = WAYS_KEPT,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the JSON, from which a run goes on.")] = RESULTS,
) -> None:
    """Checks models in every way of training and serving against eager, many cells at a time."""
    from . import processes
    from . import ways as run

    where = _device(device)
    toy = toy or where == "cpu"
    try:
        paths = processes.make_importable(transformers, keep / "wheels")
    except (FileNotFoundError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    words = _list(only)
    settings = run.Settings(where, toy, jobs, budget, limit, words, paths)
    if not any(map(settings.chosen, settings.plan())):
        raise typer.BadParameter(f"no cell has one of {words} in its name")
    path = out / f"ways{'-toy' if toy else ''}.json"
    out.mkdir(parents=True, exist_ok=True)
    result = run.run(settings, path, keep, _say)
    _shown(run.table(_read(path)))
    if not result["complete"]:
        raise typer.Exit(1)


@app.command("multi_gpu")
def many(
    parts: Annotated[str, typer.Option(help="Some of checks,fsdp,scaling,context,failures.")] = "",
    only: Annotated[str, typer.Option(help="Words of jobs' names, by comma: losses,e79.")] = "",
    ranks: Annotated[int, typer.Option(min=0, help="Processes, each with a GPU; 0: as many as there are GPUs.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda (NCCL) or cpu (gloo).")] = "auto",
    toy: Annotated[bool, typer.Option("--toy", help="Tiny sizes, for trying it out; the only ones on a CPU.")] = False,
    budget: Annotated[float, typer.Option(min=1, help="Seconds after which all is ended.")] = 290.0,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the JSON, the table and the picture.")] = RESULTS,
) -> None:
    """Checks and measures several GPUs of one host: sharded ops, FSDP2, scaling, context parallelism, failures."""
    import torch

    from . import multi_gpu as run

    where = _device(device)
    count = ranks or (torch.cuda.device_count() if where == "cuda" else 2)
    if count < 2 or (where == "cuda" and count > torch.cuda.device_count()):
        raise typer.BadParameter(f"--ranks {count}: it takes at least 2, and a GPU for each")
    words = _list(only)
    toy = toy or where == "cpu"
    settings = run.Settings(where, count, toy, _words(parts, run.PARTS, "part"), budget, words)
    stem = "multi_gpu" + ("-toy" if toy else "")
    stem += "" if set(settings.parts) == set(run.PARTS) and not words else "-partial"
    out.mkdir(parents=True, exist_ok=True)
    result = run.run(settings, out / f"{stem}.json", _say)
    _shown(run.table(result))
    if not result["complete"] or not all(job["passed"] for job in result["jobs"]):
        raise typer.Exit(1)


@app.command("sparse_fill")
def sparse_fill(later: Later, into: Into = RESULTS / "sparse_models.json") -> None:
    """Completes a run of sparse_models with the peers' rows that it had no time for. Measures nothing."""
    from . import sparse_models

    try:
        result = sparse_models.fill(_read(into), _read(later))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sparse_models.write(result, into)
    _shown(sparse_models.table(result))


@app.command()
def routing(
    out: OutShort = RESULTS,
    layers: Annotated[str, typer.Option(help="Depths to measure, by comma.")] = "2,4,8,16,43",
    compiled: Annotated[int, typer.Option(min=0, help="Depth of the whole compile; 0: none.")] = 4,
    device: DeviceKind = "cpu",
) -> None:
    """Measures the routing pass: seconds by depth, time per node, and share of a compile. Needs no GPU."""
    import torch

    from . import routing as run

    depths = tuple(int(w) for w in _list(layers))
    result = run.run(torch.device(_device(device)), depths, compiled, lambda text: console.print(text, highlight=False))
    out.mkdir(parents=True, exist_ok=True)
    run.write(result, out / "routing.json")
    _shown(run.table(result))


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

    changed = pages.write()
    console.print(
        "\n".join(f"wrote {p.relative_to(pages.ROOT)}" for p in changed) or "no page changed", highlight=False
    )


if __name__ == "__main__":
    app()
