# SPDX-License-Identifier: Apache-2.0
"""The process group of a call: its ranks, and the devices that its messages may be on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

F = TypeVar("F", bound=Callable[..., Any])


def eagerly(fn: F) -> F:
    """Makes a function break the graph of torch.compile: its messages and their order must not be compiled away."""
    return torch.compiler.disable(fn)


class Members(NamedTuple):
    """A process group as one of its ranks sees it, in a call of a public function."""

    op: str
    """Name of the function, for messages."""
    group: Any
    rank: int
    size: int
    devices: frozenset[str]
    """Types of the devices whose tensors the group can move."""

    @property
    def host(self) -> torch.device:
        """The device for numbers that Python reads: the CPU where the group can, so that no GPU has to wait."""
        return torch.device("cpu" if "cpu" in self.devices else min(self.devices))

    def global_rank(self, rank: int) -> int:
        """Returns the rank in the default group of a rank of this group, counted round: -1 is the last."""
        return dist.get_global_rank(self.group, rank % self.size)

    def check_device(self, op: str, name: str, t: torch.Tensor) -> None:
        """Raises ValueError if the group cannot move a tensor on this device."""
        if t.device.type not in self.devices:
            can = ", ".join(sorted(self.devices))
            raise ValueError(f"{op}: {name} is on {t.device}, but the group moves tensors on {can} only")


def members(op: str, group: Any) -> Members:
    """Returns the group of a call.

    Args:
        op: Name of the public function, for messages.
        group: A process group, a device mesh of one dimension, or None for the default group.

    Raises:
        RuntimeError: torch.distributed is missing or has no process group.
        TypeError: The group is something else.
        ValueError: This process is no rank of the group.
    """
    if not dist.is_available():
        raise RuntimeError(f"{op}: this build of torch has no torch.distributed")
    if not dist.is_initialized():
        raise RuntimeError(
            f"{op}: torch.distributed has no process group; call torch.distributed.init_process_group first"
        )
    if isinstance(group, dist.device_mesh.DeviceMesh):
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    outside = group == dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group must be a process group, a device mesh or None, got {type(group).__name__}")
    rank = -1 if outside else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{op}: this process (rank {dist.get_rank()}) is not in the group")
    config = dist.get_backend_config(group)
    devices = frozenset(pair.split(":")[0] for pair in config.split(","))
    return Members(op, group, rank, dist.get_world_size(group), devices)
