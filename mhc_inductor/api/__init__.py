"""The public functions."""

from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre, mhc_sinkhorn

__all__ = ["mhc_head", "mhc_post", "mhc_pre", "mhc_sinkhorn"]
