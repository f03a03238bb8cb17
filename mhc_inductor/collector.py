"""Full garbage collections wait while a graph compiles.

A compile makes objects by the million that live until its end, and every full collection walks all of them: 4 % of a model's
compile. The two younger generations are collected as ever; a full collection that came due follows the compile.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 2**31 - 1
_lock = threading.Lock()
_compiles = 0
_before = (0, 0, 0)


@contextlib.contextmanager
def full_collections_deferred() -> Iterator[None]:
    """Inside, no full collection starts by itself. Nests, on any number of threads; thresholds that others set meanwhile stay."""
    global _compiles, _before
    with _lock:
        if _compiles == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
        _compiles += 1
    try:
        yield
    finally:
        with _lock:
            _compiles -= 1
            if _compiles == 0 and gc.get_threshold() == (*_before[:2], _NEVER):
                gc.set_threshold(*_before)
