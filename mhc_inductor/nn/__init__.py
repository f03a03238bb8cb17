# SPDX-License-Identifier: Apache-2.0
"""Modules built on the ops.

mHC residuals (:class:`HyperConnection`, :class:`HyperHead`), E79 (:class:`E79Cell`, :class:`E79Layer`) and sparse
attention (:class:`SelectionAttention`, :class:`SparseIndexer`, :class:`NativeSparseAttention`).
"""

from mhc_inductor.nn.e79 import E79Cell, E79Layer, E79State
from mhc_inductor.nn.indexer import SparseIndexer
from mhc_inductor.nn.mhc import CONVENTIONS, HyperConnection, HyperHead, expand
from mhc_inductor.nn.selection import SelectionAttention
from mhc_inductor.nn.sparse import NativeSparseAttention, NSACache

__all__ = [
    "CONVENTIONS",
    "E79Cell",
    "E79Layer",
    "E79State",
    "HyperConnection",
    "HyperHead",
    "NSACache",
    "NativeSparseAttention",
    "SelectionAttention",
    "SparseIndexer",
    "expand",
]
