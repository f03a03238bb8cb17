"""mHC: manifold-constrained hyper-connections (arXiv 2512.24880)."""

from . import plan

__all__ = ["plan"]
