"""Whether the Gluon kernels of E79 run here. They need CUDA and a Triton whose Gluon is the one they are written for."""

from __future__ import annotations

import functools
from typing import Any

from mhc_inductor.log import warn_once

# Bytes of shared memory a block can have, by architecture; 99 KiB on the others.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}


@functools.cache
def _kernels() -> Any:
    try:
        from .gluon_backward import e79_backward_gluon
        from .gluon_forward import e79_forward_gluon
    except (ImportError, AttributeError) as error:
        warn_once("gluon", f"E79 runs on plain Triton kernels: this Triton's Gluon is not usable ({error})")
        return None
    return e79_forward_gluon, e79_backward_gluon


def kernels(b: Any, shared: int) -> Any:
    """(forward, backward), or None where plain Triton runs; ``shared``: the bytes of shared memory they need."""
    if not b.gluon:
        return None
    props = b.device_props()
    if props.backend != "cuda" or props.arch < 80 or shared > _SHARED.get(props.arch, 99 << 10):
        return None
    return _kernels()
