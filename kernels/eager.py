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

# The launch plans of each module, without the name of the operator before them.
_MODULES = {
    "mhc.plan": "pre pre_backward sinkhorn sinkhorn_backward post post_backward head head_backward",
    "mhc.fused_plan": "post_pre post_pre_backward post_head post_head_backward",
    "mhc.single_pass_plan": "coefficients coefficients_backward collapse collapse_backward single_pass single_pass_backward",
    "e79.plan": "scan scan_backward",
    "selection.plan": "attention",
    "selection.backward_plan": "attention_backward",
    "selection.lists_plan": "list_attention list_attention_backward entry_attention entry_attention_backward",
    "selection.masks_plan": "mask_attention mask_attention_backward",
    "selection.blocks_plan": "blocks",
    "index.plan": "scores topk topk_scores",
    "index.backward_plan": "scores_backward",
    "index.loss_plan": "loss loss_backward",
}
_PLANS = {f"{m.partition('.')[0]}_{op}": m for m, ops in _MODULES.items() for op in ops.split()}
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
