# SPDX-License-Identifier: Apache-2.0
"""What the ranks must know of each other before the first tensor moves.

One all-gather of a few integers tells every rank the sizes of all parts, and whether an argument is wrong on any rank
or differs between ranks. Then all ranks raise the same error, and none waits for a message that never comes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc_inductor.distributed import moves
from mhc_inductor.distributed.groups import Members

_SIZES = 4
_TEXT = 4096  # bytes of a rank's message
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class Facts(NamedTuple):
    """What one rank tells the others of its call."""

    same: dict[str, Any]
    """Values that must be equal on every rank, by the name that messages use."""
    sizes: tuple[int, ...]
    """At most four numbers that may differ."""
    needs: tuple[bool, ...]
    """Which arguments require a gradient."""


class Agreed(NamedTuple):
    """What every rank knows of all."""

    sizes: tuple[tuple[int, ...], ...]
    """The sizes of each rank, in the order of the ranks."""
    needs: tuple[bool, ...]
    """Which arguments require a gradient on any rank."""

    def anchor(self, device: torch.device, *of: int) -> Tensor:
        """Returns an input that connects this rank's outputs to autograd if any rank needs a gradient.

        The backward's messages need every rank, also one whose own inputs require no gradient. ``of`` are the positions
        in ``needs`` that count; none for all.
        """
        needs = self.needs if not of else tuple(self.needs[i] for i in of)
        return torch.empty((), device=device).requires_grad_(any(needs))


def requires(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Returns whether each tensor will get a gradient, for :class:`Facts`."""
    on = torch.is_grad_enabled()
    return tuple(on and t is not None and t.requires_grad for t in tensors)


def agree(op: str, members: Members, describe: Callable[[], Facts]) -> Agreed:
    """Checks the arguments on every rank, and exchanges the sizes; every rank of the group must call it.

    Args:
        op: Name of the public function, for messages.
        members: The group.
        describe: Checks this rank's arguments and returns its facts; it communicates nothing.

    Raises:
        ValueError: An argument is wrong on some rank, differs between ranks, or gradients are switched off on some
            ranks only. Every rank raises the same message, which names the rank.
        TypeError: The same, where the rank raised a TypeError.
    """
    error, facts = None, Facts({}, (), ())
    try:
        facts = describe()
    except Exception as e:  # any error: the other ranks wait for this rank's row
        error = e
    numbers = [int(error is not None), _digest(op, facts.same), int(torch.is_grad_enabled()), *map(int, facts.needs)]
    sizes = [*facts.sizes, *[0] * (_SIZES - len(facts.sizes))]
    # The row has one length on every rank, whatever this rank's facts are.
    row = [*numbers, *[0] * (16 - len(numbers)), *sizes]
    rows = moves.gather_rows(torch.tensor([row], device=members.host), (1,) * members.size, members).tolist()
    if any(r[0] for r in rows) or len({r[1] for r in rows}) > 1:
        _raise(op, members, facts, error)
    needs = tuple(any(r[3 + i] for r in rows) for i in range(len(facts.needs)))
    if any(needs) and not all(r[2] for r in rows):
        off = [i for i, r in enumerate(rows) if not r[2]]
        raise ValueError(f"{op}: gradients are needed, but switched off (torch.no_grad) on the group's ranks {off}")
    return Agreed(tuple(tuple(r[16 : 16 + len(facts.sizes)]) for r in rows), needs)


def _digest(op: str, same: dict[str, Any]) -> int:
    """Returns a number that is equal on two ranks where the function and all values are."""
    text = repr([op, *((k, str(v)) for k, v in same.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _raise(op: str, members: Members, facts: Facts, error: Exception | None) -> None:
    """Exchanges what went wrong, and raises it on every rank."""
    mine = {
        "error": None if error is None else str(error).removeprefix(f"{op}: ")[:1000],
        "type": type(error).__name__,
        "same": {"the function": op, **{k: str(v) for k, v in facts.same.items()}},
    }
    text = json.dumps(mine).encode()[:_TEXT].ljust(_TEXT)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(members.host)
    texts = moves.gather_rows(sent[None], (1,) * members.size, members).cpu()
    ranks = [json.loads(bytes(row.tolist())) for row in texts]
    for i, rank in enumerate(ranks):
        if rank["error"] is not None:
            kind = _ERRORS.get(rank["type"], RuntimeError)
            raise kind(f"{op}: on rank {i} of the group: {rank['error']}") from error
    name = next(n for n in ranks[0]["same"] if len({rank["same"].get(n) for rank in ranks}) > 1)
    listed = ", ".join(f"{rank['same'].get(name)} on rank {i}" for i, rank in enumerate(ranks))
    raise ValueError(f"{op}: {name} must be the same on every rank of the group, got {listed}")
