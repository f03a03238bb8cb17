# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of everything that decides what code is generated, for the keys of torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import pathlib

import torch


def _folders() -> list[tuple[str, pathlib.Path]]:
    """Returns name and path of each folder with sources of this package."""
    import mhc_inductor.kernels
    import mhc_inductor.lowerings

    package = pathlib.Path(__file__).resolve().parent
    kernels, lowerings = (
        pathlib.Path(next(iter(m.__path__))).resolve() for m in (mhc_inductor.kernels, mhc_inductor.lowerings)
    )
    return [("mhc_inductor", package), ("kernels", kernels), ("lowerings", lowerings)]


def fingerprint() -> str:
    """Returns a hex SHA-256 digest of what decides the generated code: :func:`sources`, and the tuned configurations."""
    from mhc_inductor.tuning import table

    tuned = table.digest()
    return hashlib.sha256(f"{sources()}{tuned}".encode()).hexdigest() if tuned else sources()


@functools.cache
def sources() -> str:
    """Returns a hex SHA-256 digest of this package's sources and the versions of torch and Triton."""
    digest = hashlib.sha256()
    for name, folder in _folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    try:
        digest.update(importlib.metadata.version("triton").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"no triton")
    return digest.hexdigest()
