# SPDX-License-Identifier: Apache-2.0
"""Helpers for policies of selective activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch

from mhc_inductor.ops import registry


def ops_to_save() -> list[Any]:
    """Returns the ops that replace routed formulas, for a selective checkpointing policy to name.

    Where a formula is routed, a policy of ``create_selective_checkpoint_contexts`` no longer sees the matrix products
    that the formula was made of; it sees these ops instead. In a region with a policy they are never fused with each
    other, so the policy always sees these ops::

        def policy(ctx, op, *args, **kwargs):
            saved = op in mhc_inductor.ops_to_save() or op is torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    Returns:
        The op overload of every op of this package but two kinds: those that compute gradients, and those that stand
        for several others (``mhc_post_pre``, ``mhc_post_head`` and ``mhc_single_pass``).
    """
    names = [n for n in registry.REFERENCE if n not in registry.FUSED and not n.endswith("_backward")]
    return [getattr(torch.ops.mhc_inductor, name).default for name in names]
