"""The public functions."""

from mhc_inductor.api.e79 import e79_scan
from mhc_inductor.api.mhc import mhc_head, mhc_post, mhc_pre, mhc_sinkhorn

__all__ = ["e79_scan", "mhc_head", "mhc_post", "mhc_pre", "mhc_sinkhorn"]
