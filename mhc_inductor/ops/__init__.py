"""The ops: schemas, fakes, autograd, vmap and the reference implementation of ``torch.ops.mhc_inductor``."""

from mhc_inductor.ops import e79, fused, mhc, selection, selection_blocks

__all__ = ["e79", "fused", "mhc", "selection", "selection_blocks"]
