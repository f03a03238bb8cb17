# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of mHC (manifold-constrained hyper-connections, arXiv 2512.24880)."""

from . import fused_plan, plan, single_pass_plan

__all__ = ["fused_plan", "plan", "single_pass_plan"]
