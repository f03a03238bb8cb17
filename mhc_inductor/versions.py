# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch and Triton this package is tested with. Others are tried, and named in a warning, once."""

from __future__ import annotations

import importlib.metadata
import re

import torch

from mhc_inductor.log import warn_once

TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}
"""The oldest and the newest minor version of each that the tests have passed with."""
MISSING = (((2, 13), "AOTInductor packages that contain E79 do not compile for a CPU: torch fails on their loop"),)
"""What does not work before a version of torch."""


def minor(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version, or (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def written(version: tuple[int, int]) -> str:
    """Returns a major and minor number as text."""
    return ".".join(map(str, version))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """Returns the version of the installed Triton, or None. Imports nothing."""
    names = ("triton", "triton-rocm", "pytorch-triton", "pytorch-triton-rocm")
    return next(filter(None, map(_installed, names)), None)


def untested() -> list[str]:
    """Returns a sentence for each of torch and Triton that is of no tested version."""
    found = {"torch": torch.__version__, "triton": triton_version()}
    return [
        f"{name} {found[name]} is untested; tested are {written(low)} to {written(high)}"
        for name, (low, high) in TESTED.items()
        if found[name] is not None and not low <= minor(str(found[name])) <= high
    ]


def missing() -> list[str]:
    """Returns a sentence for each thing that does not work with this torch and does with a newer one."""
    found = minor(torch.__version__)
    return [
        f"torch {torch.__version__}: {what} (from {written(low)} on they do)" for low, what in MISSING if found < low
    ]


def warn() -> None:
    """Logs each sentence of :func:`untested` once per process."""
    for sentence in untested():
        warn_once(sentence, sentence)
