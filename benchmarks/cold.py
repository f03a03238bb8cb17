# SPDX-License-Identifier: Apache-2.0
"""A compile that finds nothing in any cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Gives this process empty folders for the caches of Inductor and Triton. Enter it before torch is imported."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        yield
