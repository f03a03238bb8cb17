# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of everything that decides what code is generated, for the keys of torch's compile caches."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Callable

import torch

PARTS: list[Callable[[], str]] = []
"""What else decides the generated code: each returns a digest, empty for nothing. The tuned configurations are one."""


def _folders() -> list[tuple[str, pathlib.Path]]:
    """Returns name and path of each folder with sources of this package."""
    folders = [("mhc_inductor", pathlib.Path(__file__).resolve().parent)]
    for name in ("kernels", "lowerings"):  # elsewhere in a checkout
        spec = importlib.util.find_spec(f"mhc_inductor.{name}")
        assert spec is not None and spec.origin is not None
        folders.append((name, pathlib.Path(spec.origin).resolve().parent))
    return folders


def fingerprint() -> str:
    """Returns a hex SHA-256 digest of what decides the generated code: :func:`sources`, and :data:`PARTS`."""
    others = "".join(part() for part in PARTS)
    return hashlib.sha256(f"{sources()}{others}".encode()).hexdigest() if others else sources()


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
