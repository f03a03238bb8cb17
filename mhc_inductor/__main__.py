# SPDX-License-Identifier: Apache-2.0
"""Runs ``python -m mhc_inductor``: ``doctor`` says what runs as kernels, ``tune`` measures them, ``try`` a model."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from mhc_inductor import doctor
from mhc_inductor.try_model import INSTALL

HELP = """mHC residuals, E79 recurrences, selection attention and indexers on Triton kernels.

Exit status: 0 if it is done; 1 if it cannot be done here (torch is too old; no GPU to measure on; no network) or
what was tried fails or differs; 2 for wrong arguments. With --json, standard output is one JSON object and nothing else.
"""


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status. Without typer there is ``doctor`` only, parsed by hand.

    Raises:
        SystemExit: with the exit status, where typer is installed.
    """
    try:
        import typer
    except ImportError:
        if arguments not in (["doctor"], ["doctor", "--json"], []):
            print(
                f"usage: python -m mhc_inductor doctor [--json] (tune and try need typer: {INSTALL})", file=sys.stderr
            )
            return 2
        return doctor.main(as_json="--json" in arguments)

    app = typer.Typer(add_completion=False, no_args_is_help=True, help=HELP)

    @app.command(name="doctor")
    def command(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
        """Print versions, devices, what runs as kernels, and why not. Exits with 1 if this torch is not supported."""
        raise typer.Exit(doctor.main(as_json))

    @app.command(name="tune")
    def tune(
        only: str = typer.Option("", help="Operators, by comma: mhc,selection,lists,index,e79; all if left out."),
        widths: str = typer.Option("", help="Widths D of mHC, by comma; 2560,4096,7168 if left out."),
        minutes: float = typer.Option(30.0, min=0, help="After these, the next call goes on where this one ended."),
        again: bool = typer.Option(False, "--again", help="Measure anew what the table has."),
        out: pathlib.Path | None = typer.Option(None, help="The table's file; the one that is read if left out."),  # noqa: B008
        as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> None:
        """Measure launch configurations on this GPU and write the table that the package reads."""
        from mhc_inductor.tuning import command
        from mhc_inductor.tuning.workloads import KINDS, WIDTHS

        kinds = tuple(w.strip() for w in only.split(",") if w.strip()) or KINDS
        if unknown := [k for k in kinds if k not in KINDS]:
            raise typer.BadParameter(f"no such operator: {', '.join(unknown)}; there are {', '.join(KINDS)}")
        try:
            sizes = tuple(int(w) for w in widths.split(",") if w.strip()) or WIDTHS
        except ValueError:
            raise typer.BadParameter(f"widths must be integers by comma, got {widths!r}") from None
        raise typer.Exit(command.main(kinds, sizes, minutes, again, out, as_json))

    _add_try(app)
    app(arguments, prog_name="python -m mhc_inductor")
    return 0


def _add_try(app: Any) -> None:
    import typer

    @app.command(name="try")  # type: ignore[untyped-decorator]
    def command(
        model: str = typer.Argument(help="A model type (deepseek_v4), a folder, a config.json or an id of the hub."),
        tokens: int = typer.Option(256, min=2, help="Tokens of a sequence."),
        batch: int = typer.Option(1, min=1, help="Sequences."),
        training: bool = typer.Option(False, "--training/--inference", help="With gradients, or a forward alone."),
        device: str = typer.Option("", help="cpu or cuda; cuda if left out and there is one."),
        dtype: str = typer.Option("", help="Of the weights; float32 on a CPU, bfloat16 on a GPU if left out."),
        out: pathlib.Path | None = typer.Option(None, help="Folder to write to; mhc_inductor_try/MODEL if left out."),  # noqa: B008
        settings: list[str] = typer.Option([], "--set", help="key=value of the configuration; can be repeated."),  # noqa: B008
        as_is: bool = typer.Option(False, "--as-is", help="Keep the configuration's sizes, with random weights."),
        weights: bool = typer.Option(False, "--weights", help="Load the folder's weights, at the folder's sizes."),
        attention: str = typer.Option("", help="eager or sdpa; the model's default if left out."),
        tolerance: float | None = typer.Option(None, min=0, help="Largest relative difference; by dtype if left out."),
        trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code that the model brings."),
        as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> None:
        """Build a model small, run explain, and time it eager, with torch.compile and with this package."""
        import torch

        from mhc_inductor.try_model import command, worker

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        if dtype not in command.TOLERANCES:
            raise typer.BadParameter(f"--dtype takes one of {', '.join(command.TOLERANCES)}, got {dtype!r}")
        folder = out or pathlib.Path("mhc_inductor_try", re.sub(r"[^\w.-]+", "_", model).strip("_.") or "model")
        limit = command.TOLERANCES[dtype] if tolerance is None else tolerance
        job = worker.Job(model, {}, weights, trust_remote_code, attention, training, device, dtype, batch, tokens)
        raise typer.Exit(command.main(job, settings, as_is, folder, limit, as_json))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
