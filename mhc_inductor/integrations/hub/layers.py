# SPDX-License-Identifier: Apache-2.0
"""Layers of the kernel: forwards that ``kernels.kernelize`` puts into layers of a model, for training and torch.compile.

A layer of a kernel has no constructor, no state and no method but ``forward``, which reads the adopting layer's
attributes. These are the attributes, of the same names, of the modules of :mod:`mhc_inductor.nn`.
"""

from __future__ import annotations

from torch import nn

from mhc_inductor.nn import indexer, mhc, selection

__all__ = ["HyperConnection", "SelectionAttention", "SparseIndexer"]


class HyperConnection(nn.Module):
    """``forward(x, *args, **kwargs)`` of :class:`mhc_inductor.nn.HyperConnection`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    forward = mhc.HyperConnection.forward


class SelectionAttention(nn.Module):
    """``forward(q, k, v, selection, ...)`` of :class:`mhc_inductor.nn.SelectionAttention`."""

    can_torch_compile: bool = True
    has_backward: bool = True
    forward = selection.SelectionAttention.forward


class SparseIndexer(nn.Module):
    """``forward(q, k, w, limit, ...)`` of :class:`mhc_inductor.nn.SparseIndexer`; a choice of keys has no gradient."""

    can_torch_compile: bool = True
    has_backward: bool = True
    forward = indexer.SparseIndexer.forward
