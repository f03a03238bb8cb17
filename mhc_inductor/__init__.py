# SPDX-License-Identifier: Apache-2.0
"""Compiles mHC, E79 and selection attention formulas to hand-tuned Triton kernels through ``torch.compile``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING, Any

_checkout = pathlib.Path(__file__).resolve().parent.parent


class _CheckoutFinder(importlib.abc.MetaPathFinder):
    """Finds ``mhc_inductor.kernels`` and ``mhc_inductor.lowerings`` at the root of a source checkout.

    In a checkout the folders kernels/ and lowerings/ are siblings of this package; in an installation setuptools maps
    them into it. A finder is used because another entry in ``__path__`` would expose the whole checkout, this package
    included, to code that walks the package, as ``TORCH_LOGS="mhc_inductor"`` does.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in ("mhc_inductor.kernels", "mhc_inductor.lowerings"):
            return None
        folder = _checkout / name.rpartition(".")[2]
        return importlib.util.spec_from_file_location(name, folder / "__init__.py")


if (_checkout / "kernels" / "launch.py").exists() and (_checkout / "lowerings").is_dir():
    sys.meta_path.append(_CheckoutFinder())

from mhc_inductor import ops, versions  # noqa: E402
from mhc_inductor.api.checkpoint import ops_to_save  # noqa: E402
from mhc_inductor.api.e79 import e79_scan  # noqa: E402
from mhc_inductor.api.index import index_loss, index_scores, index_topk  # noqa: E402
from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre, mhc_sinkhorn  # noqa: E402
from mhc_inductor.api.selection import blocks_to_ranges, selection_attention  # noqa: E402
from mhc_inductor.api.single_pass import mhc_coefficients, mhc_collapse  # noqa: E402
from mhc_inductor.backend import counters, disable, enable  # noqa: E402
from mhc_inductor.explanation import explain  # noqa: E402
from mhc_inductor.exported.api import decompositions, route_exported  # noqa: E402
from mhc_inductor.integrations.attention_interface import register_attention  # noqa: E402
from mhc_inductor.profiling import OpCounts, count_ops, op_scopes  # noqa: E402
from mhc_inductor.reference.segments import ANY_SEGMENT  # noqa: E402
from mhc_inductor.replay.run import checkpointed_indices, recorded_indices, replayed_indices  # noqa: E402
from mhc_inductor.replay.store import IndexStore  # noqa: E402
from mhc_inductor.warming.warmup import warmup  # noqa: E402

if TYPE_CHECKING:
    from mhc_inductor import distributed, nn

__version__ = "0.1.0"
__all__ = [
    "ANY_SEGMENT",
    "IndexStore",
    "OpCounts",
    "blocks_to_ranges",
    "checkpointed_indices",
    "count_ops",
    "counters",
    "decompositions",
    "disable",
    "distributed",
    "e79_scan",
    "enable",
    "explain",
    "index_loss",
    "index_scores",
    "index_topk",
    "mhc_coefficients",
    "mhc_collapse",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "mhc_sinkhorn",
    "nn",
    "op_scopes",
    "ops",
    "ops_to_save",
    "recorded_indices",
    "register_attention",
    "replayed_indices",
    "route_exported",
    "selection_attention",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in ("distributed", "nn"):
        return importlib.import_module(f"mhc_inductor.{name}")
    raise AttributeError(f"module 'mhc_inductor' has no attribute {name!r}")


versions.warn()
