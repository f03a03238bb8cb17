# SPDX-License-Identifier: Apache-2.0
"""The CUDA implementations of the ops: each op's launch plan, run eagerly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from mhc_inductor.log import logger, warn_once

from . import background
from .launch import EagerBuilder, Recorder, device_props

# The module of each launch plan.
_PLANS = {
    "mhc_pre": "mhc.plan",
    "mhc_pre_backward": "mhc.plan",
    "mhc_sinkhorn": "mhc.plan",
    "mhc_sinkhorn_backward": "mhc.plan",
    "mhc_post": "mhc.plan",
    "mhc_post_backward": "mhc.plan",
    "mhc_head": "mhc.plan",
    "mhc_head_backward": "mhc.plan",
    "mhc_post_pre": "mhc.fused_plan",
    "mhc_post_pre_backward": "mhc.fused_plan",
    "mhc_post_head": "mhc.fused_plan",
    "mhc_post_head_backward": "mhc.fused_plan",
    "mhc_coefficients": "mhc.single_pass_plan",
    "mhc_coefficients_backward": "mhc.single_pass_plan",
    "mhc_collapse": "mhc.single_pass_plan",
    "mhc_collapse_backward": "mhc.single_pass_plan",
    "mhc_single_pass": "mhc.single_pass_plan",
    "mhc_single_pass_backward": "mhc.single_pass_plan",
    "e79_scan": "e79.plan",
    "e79_scan_backward": "e79.plan",
    "selection_attention": "selection.plan",
    "selection_attention_backward": "selection.backward_plan",
    "selection_list_attention": "selection.lists_plan",
    "selection_list_attention_backward": "selection.lists_plan",
    "selection_entry_attention": "selection.lists_plan",
    "selection_entry_attention_backward": "selection.lists_plan",
    "selection_mask_attention": "selection.masks_plan",
    "selection_mask_attention_backward": "selection.masks_plan",
    "selection_blocks": "selection.blocks_plan",
    "index_scores": "index.plan",
    "index_scores_backward": "index.backward_plan",
    "index_loss": "index.loss_plan",
    "index_loss_backward": "index.loss_plan",
    "index_topk": "index.plan",
    "index_topk_scores": "index.plan",
}
OPS = tuple(_PLANS)
# What is no op: context parallelism calls it between ops.
_PLANS |= dict.fromkeys(("selection_join", "selection_part_gradients"), "selection.join_plan")


def _is_tensor(a: Any) -> bool:
    return isinstance(a, torch.Tensor)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{_PLANS[name]}")


def plan_of(name: str) -> Callable[..., Any]:
    """Returns the launch plan ``name``."""
    return cast("Callable[..., Any]", getattr(_module(name), f"plan_{name}"))


def why_not(
    name: str, args: tuple[Any, ...], builder: Any, is_tensor: Callable[[Any], bool] = _is_tensor
) -> str | None:
    """Returns why op ``name`` with these arguments runs the reference on a CUDA device, or None if the kernels run."""
    try:
        module = _module(name)
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    reason = module.unsupported(builder, *(a for a in args if is_tensor(a)))
    if reason is None and len(args) > 1 and hasattr(module, "unsupported_sizes"):
        reason = module.unsupported_sizes(builder, *args)
    return cast("str | None", reason)


def run(name: str, reference: Callable[..., Any], *args: Any) -> Any:
    """Runs op ``name`` by its launch plan, or by ``reference`` with a warning that is logged once.

    The first tensor of ``args`` is on a CUDA device.
    """
    device = next(a for a in args if isinstance(a, torch.Tensor)).device
    with torch.cuda.device(device):
        builder = EagerBuilder(device)
        reason = why_not(name, args, builder)
        if reason is not None:
            warn_once(f"{name}: {reason}", f"{name} runs the reference formula on {device}: {reason}")
            return reference(*args)
        return plan_of(name)(builder, *args)


def compile_in_background(name: str, args: Sequence[Any], device: torch.device) -> None:
    """Starts to compile, in the background, the kernels that op ``name`` launches on ``device`` for these arguments.

    ``args`` holds meta tensors in place of tensors.
    """
    recorder = Recorder(device_props(device.index or 0))
    try:
        plan_of(name)(recorder, *args)
    except Exception as error:
        logger.debug("the kernels of %s are compiled at its first call: %s", name, error)
        return
    for launch in recorder.launches:
        background.start(launch, device)
