# SPDX-License-Identifier: Apache-2.0
"""Runs ``python -m mhc_inductor``: ``doctor`` reports what this machine runs as kernels, ``tune`` measures them."""

from __future__ import annotations

import pathlib
import sys

from mhc_inductor import doctor

HELP = """mHC residuals, E79 recurrences, selection attention and indexers on Triton kernels.

Exit status: 0 if it is done; 1 if it cannot be done here (torch is too old; no GPU to measure on); 2 for wrong
arguments. With --json, standard output is one JSON object and nothing else.
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
            print("usage: python -m mhc_inductor doctor [--json] (tune needs typer)", file=sys.stderr)
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

    app(arguments, prog_name="python -m mhc_inductor")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
