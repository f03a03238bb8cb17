# SPDX-License-Identifier: Apache-2.0
"""Routing of mHC (manifold-constrained hyper-connections): pre, Sinkhorn, post and head."""
