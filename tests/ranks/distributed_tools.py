# SPDX-License-Identifier: Apache-2.0
"""What the checks of ``mhc_inductor.distributed`` share: the ranks, their shares, and joined results."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

CHECKS: dict[str, Callable[[], None]] = {}
GROUP: Any = None
"""The group of the running check; None for all ranks."""
DEVICE = torch.device("cpu")
"""Where the functions under test run; the oracles stay on the CPU."""
ALL = slice(None)


def check(fn: Callable[[], None]) -> Callable[[], None]:
    CHECKS[fn.__name__] = fn
    return fn


def me() -> int:
    return dist.get_rank(GROUP)


def ranks() -> int:
    return dist.get_world_size(GROUP)


def shares(total: int, *parts: int) -> list[slice]:
    """Returns one slice per rank: of the sizes ``parts``, or nearly even."""
    sizes = list(parts) or [total * (i + 1) // ranks() - total * i // ranks() for i in range(ranks())]
    assert len(sizes) == ranks() and sum(sizes) == total, (sizes, total)
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def uneven(n: int) -> list[slice]:
    """Returns shares of very different sizes, 0 among them if there are more than two ranks."""
    return shares(n, *([n // 4, n - n // 4] if ranks() == 2 else [n - n // 4, *[0] * (ranks() - 2), n // 4]))


def everywhere(value: Any) -> list[Any]:
    """Returns the values of all ranks, without the package's own messages."""
    values: list[Any] = [None] * ranks()
    dist.all_gather_object(values, tree_map(_on_host, value), group=GROUP)
    return values


def on_first(body: Callable[[], None]) -> None:
    """Runs a comparison on the first rank. Where it fails, every rank raises: none goes on to messages alone."""
    failure = None
    if me() == 0:
        try:
            body()
        except Exception:
            failure = traceback.format_exc()
    (failure, *_) = everywhere(failure)
    assert failure is None, f"on rank 0: {failure}"


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def here(t: Tensor | None) -> Any:
    """Returns a tensor on the device of the functions under test."""
    return None if t is None else t.to(DEVICE)


def joined(t: Tensor, dim: int) -> Tensor:
    return torch.cat(everywhere(t.detach()), dim)


def total(t: Tensor) -> Tensor:
    """Returns the sum over the ranks, in fp64, in t's dtype."""
    return torch.stack(everywhere(t.detach().double())).sum(0).to(t.dtype)


def leaf(t: Tensor | None, at: tuple[Any, ...] = (), grad: bool = True) -> Tensor | None:
    return None if t is None else here(t[at].clone()).requires_grad_(grad)


def message(fn: Callable[[], Any]) -> str:
    """Returns the type and text of the error that ``fn`` raises."""
    try:
        fn()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Yields a list of one number: the bytes that this rank sent to others inside the context."""
    from mhc_inductor.distributed import moves

    sent = [0]
    plain = moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv

    def gathers(out: Tensor, t: Tensor, **kwargs: Any) -> Any:
        sent[0] += t.numel() * (ranks() - 1)
        return plain[0](out, t, **kwargs)

    def scatters(out: Tensor, t: Tensor, into: list[int], sizes: list[int], **kwargs: Any) -> Any:
        sent[0] += sum(sizes) - sizes[me()]
        return plain[1](out, t, into, sizes, **kwargs)

    def passes(ops: list[Any]) -> Any:
        sent[0] += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return plain[2](ops)

    moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv = gathers, scatters, passes
    try:
        yield sent
    finally:
        moves._all_gather, dist.all_to_all_single, dist.batch_isend_irecv = plain
