# SPDX-License-Identifier: Apache-2.0
"""Loading of Gluon kernels, which need CUDA and a Triton with the Gluon version that they are written for."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from mhc_inductor.log import warn_once

from .launch import shared_limit


@functools.cache
def _load(what: str, names: tuple[str, ...]) -> tuple[Any, ...] | None:
    try:
        parts = [name.split(":") for name in names]
        return tuple(getattr(importlib.import_module(f"{__package__}.{module}"), name) for module, name in parts)
    except (ImportError, AttributeError) as error:
        reason = f"this Triton's Gluon is not usable ({error})"
        warn_once(f"gluon {what}", f"{what} runs on plain Triton kernels: {reason}")
        return None


def kernels(b: Any, shared: int, what: str, *names: str) -> tuple[Any, ...] | None:
    """Loads the Gluon kernels ``names`` (``folder.module:name``); returns None if plain Triton must run instead.

    ``shared`` is the shared memory that they need, in bytes; ``what`` names them in the log.
    """
    if not b.gluon:
        return None
    props = b.device_props()
    if props.backend != "cuda" or props.arch < 80 or shared > shared_limit(props.backend, props.arch):
        return None
    return _load(what, names)
