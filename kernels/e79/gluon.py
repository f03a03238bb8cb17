"""Whether the Gluon kernels of E79 run here."""

from __future__ import annotations

from typing import Any

from .. import gluon


def kernels(b: Any, shared: int) -> Any:
    """(forward, backward), or None where plain Triton runs; ``shared``: the bytes of shared memory they need."""
    names = ("e79.gluon_forward:e79_forward_gluon", "e79.gluon_backward:e79_backward_gluon")
    return gluon.kernels(b, shared, "E79", *names)
