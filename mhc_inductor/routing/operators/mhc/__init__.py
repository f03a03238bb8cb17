"""Routing of mHC (manifold-constrained hyper-connections): pre, Sinkhorn, post and head."""
