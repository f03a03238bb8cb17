# SPDX-License-Identifier: Apache-2.0
"""Loading of the Gluon kernels of E79."""

from __future__ import annotations

from typing import Any

from .. import gluon


def kernels(b: Any, shared: int) -> Any:
    """Returns (forward, backward), or None if plain Triton must run. ``shared``: bytes of shared memory needed."""
    names = ("e79.gluon_forward:e79_forward_gluon", "e79.gluon_backward:e79_backward_gluon")
    return gluon.kernels(b, shared, "E79", *names)
