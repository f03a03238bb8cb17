"""Runs ``python -m mhc_inductor doctor``, which reports what this machine runs as kernels and why not."""

from __future__ import annotations

import sys

from mhc_inductor import doctor


def main(arguments: list[str]) -> int:
    """Runs the command line and returns the exit status. Parses the only command by hand if typer is missing."""
    try:
        import typer
    except ImportError:
        if arguments not in (["doctor"], []):
            print("usage: python -m mhc_inductor doctor", file=sys.stderr)
            return 2
        return doctor.main()

    app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

    @app.callback()
    def group() -> None:
        """Manifold-constrained hyper-connections (mHC) on Triton kernels."""

    @app.command(name="doctor")
    def command() -> None:
        """Print versions, devices, what runs as kernels, and why not. Exits with 1 if this torch is not supported."""
        raise typer.Exit(doctor.main())

    result = app(arguments, standalone_mode=False)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
