"""``python -m mhc_inductor doctor``: what this machine would run as kernels, and why not."""

from __future__ import annotations

import sys

from mhc_inductor import doctor


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status. Without typer the one command is read by hand."""
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
        """mHC residuals on Triton kernels."""

    @app.command(name="doctor")
    def command() -> None:
        """Print versions, devices, what runs as kernels, and why not. Fails if this torch cannot be used."""
        raise typer.Exit(doctor.main())

    result = app(arguments, standalone_mode=False)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
