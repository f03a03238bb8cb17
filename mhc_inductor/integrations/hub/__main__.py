# SPDX-License-Identifier: Apache-2.0
"""``python -m mhc_inductor.integrations.hub FOLDER``: builds the kernel of the hub."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from mhc_inductor.integrations.hub import BACKENDS, build


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits with 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m mhc_inductor.integrations.hub", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that does not exist or is empty")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="once for each; cpu and cuda")
    parser.add_argument("--version", type=int, default=0, help="the kernel's version on the hub; 0")
    asked = parser.parse_args(arguments)
    try:
        made = build(asked.folder, asked.backend or ("cpu", "cuda"), asked.version)
    except ValueError as error:
        parser.error(str(error))
    for backend, variant in made.items():
        print(f"{backend}: {variant}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
