"""Command line: ``python -m benchmarks mhc`` and ``python -m benchmarks table FILE.json``."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as e:
    sys.exit(f"the benchmarks need typer, rich and matplotlib: {e}")

from . import report

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 140)
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def show(result: report.Result) -> None:
    for line in report.facts(result):
        console.print(line, highlight=False, markup=False)
    for title, headings, rows in report.sections(result):
        table = Table(title=title, title_justify="left", header_style="bold")
        for heading in headings:
            table.add_column(heading)
        for row in rows:
            style = "red" if any("not met" in cell or cell.startswith("failed") for cell in row) else None
            table.add_row(*(cell.replace("**", "") for cell in row), style=style)
        console.print(table)
    for bad in report.wrong_outputs(result):
        console.print(f"wrong output: {bad}", style="red", markup=False)


@app.command()
def mhc(
    peers: Annotated[bool, typer.Option("--peers", help="Measure eager, torch.compile and liger-kernel too.")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="D = 4096, npu and accuracy only; 20 rounds.")] = False,
    rows: Annotated[str, typer.Option(help="Groups to run, by comma: 2560,4096,7168,npu,decode,memory,...")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; every variant once a round.")] = 40,
    compiled: Annotated[bool, typer.Option(help="Measure compiled steps as well as direct op calls.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs; fresh and recorded when left out.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Another token count than the table's.")] = None,
    dim: Annotated[int | None, typer.Option(min=16, help="Another D than the table's.")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="Folder for the JSON, the Markdown table and the PNG.")] = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the files; mhc when left out, with -cpu or -partial.")] = "",
) -> None:
    """Measure the mHC operators: time, memory, errors against fp64, equal bits."""
    import torch

    from . import mhc as run

    chosen = tuple(r.strip() for r in rows.split(",") if r.strip()) or (run.QUICK_GROUPS if quick else run.GROUPS)
    if unknown := [r for r in chosen if r not in run.GROUPS]:
        raise typer.BadParameter(f"no such rows: {', '.join(unknown)}; there are {', '.join(run.GROUPS)}")
    settings = run.Settings(
        device=device,
        groups=chosen,
        rounds=20 if quick else rounds,
        measure_peers=peers,
        compiled=compiled,
        seed=seed,
        tokens=tokens,
        dim=dim,
    )
    where = settings.resolve()
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        # One small shape stands for every width there.
        settings.groups = tuple(dict.fromkeys("4096" if g in ("2560", "7168") else g for g in chosen))
        console.print(run.CPU_NOTICE, style="yellow")
    out.mkdir(parents=True, exist_ok=True)
    whole = chosen == run.GROUPS and tokens is None and dim is None
    stem = name or "mhc" + ("" if where.type == "cuda" else "-cpu") + ("" if whole else "-partial")
    path = out / f"{stem}.json"
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(settings.groups) + 1)

        def step(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(text, highlight=False, markup=False)

        save = run.saver(path)

        def saved(result: report.Result) -> None:
            save(result)
            progress.advance(task)

        result = run.Run(settings, saved, step).run()
    result = json.loads(path.read_text())
    show(result)
    written = write_reports(result, path)
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def write_reports(result: report.Result, path: pathlib.Path) -> list[pathlib.Path]:
    """The Markdown table and the PNG beside a JSON file; returns what there is now."""
    written = [path, path.with_suffix(".md")]
    written[1].write_text(report.table(result))
    try:
        report.plot(result, path.with_suffix(".png"))
    except ImportError as e:
        console.print(f"no picture: {e}", style="yellow")
    if path.with_suffix(".png").exists():
        written.append(path.with_suffix(".png"))
    return written


@app.command()
def table(
    file: Annotated[pathlib.Path, typer.Argument(exists=True, dir_okay=False, help="A result's JSON.")],
    write: Annotated[bool, typer.Option("--write", help="Write the Markdown and PNG beside it again.")] = False,
) -> None:
    """Print a stored run as Markdown."""
    result = json.loads(file.read_text())
    print(report.table(result), end="")
    if write:
        write_reports(result, file)


if __name__ == "__main__":
    app()
