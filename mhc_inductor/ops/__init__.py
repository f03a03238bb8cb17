# SPDX-License-Identifier: Apache-2.0
"""The ops ``torch.ops.mhc_inductor.*``: schemas, fakes, autograd, vmap rules and validation."""

from mhc_inductor.ops import e79, flops, fused, index, index_loss, mhc, selection, single_pass

__all__ = ["e79", "flops", "fused", "index", "index_loss", "mhc", "selection", "single_pass"]

flops.register()
