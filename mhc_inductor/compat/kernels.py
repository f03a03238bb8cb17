# SPDX-License-Identifier: Apache-2.0
"""Private torch APIs that the implementations on a CPU use.

- torch._inductor.codecache.CppCodeCache.load: compiles C++, or reads it from Inductor's cache on disk
- torch._inductor.codecache.CppCodeCache.load_async: has needs_vec_isa from 2.13 on
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any


def compiled_cpp(source: str, flags: Sequence[str]) -> Any:
    """Returns ``source`` as a loaded shared library (ctypes.CDLL), compiled or read from Inductor's cache on disk.

    Raises what Inductor raises where there is no compiler or it fails.
    """
    from torch._inductor.codecache import CppCodeCache

    # Spares three probe programs that look for vector instructions (from torch 2.13 on).
    known = "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters
    return CppCodeCache.load(source, "cpu", extra_flags=flags, **({"needs_vec_isa": False} if known else {}))
