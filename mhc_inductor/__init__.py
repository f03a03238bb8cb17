"""mhc_inductor: mHC residuals on hand-tuned Triton kernels, straight from ``torch.compile``."""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

# In a bare checkout kernels/ and lowerings/ stand beside this package; installed, setuptools maps them into it.
_checkout = pathlib.Path(__file__).resolve().parent.parent
if (_checkout / "kernels" / "launch.py").exists() and (_checkout / "lowerings").is_dir():
    __path__.append(str(_checkout))

from mhc_inductor import ops  # noqa: E402
from mhc_inductor.api import mhc_head, mhc_post, mhc_pre, mhc_sinkhorn  # noqa: E402
from mhc_inductor.backend import counters, disable, enable  # noqa: E402
from mhc_inductor.kernels import eager as _eager  # noqa: E402

if TYPE_CHECKING:
    from mhc_inductor import nn

__version__ = "0.1.0"
__all__ = [
    "counters",
    "disable",
    "enable",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "mhc_sinkhorn",
    "nn",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("mhc_inductor.nn")
    raise AttributeError(f"module 'mhc_inductor' has no attribute {name!r}")


_eager.register()
