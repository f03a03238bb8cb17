# SPDX-License-Identifier: Apache-2.0
"""The contexts in which indexers record the keys that they choose, or take given ones.

``mode`` is "off", "record" or "replay" for the whole process. Dynamo guards on it where a graph chooses keys, so that each
mode has compiled code of its own, and new keys need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.api import index
from mhc_inductor.replay import ops
from mhc_inductor.replay.store import IndexStore

mode = "off"
_OWN = (str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(torch.__file__).parent))
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_REGION = (
    "a recomputation would choose keys of its own. Pass context_fn=mhc_inductor.checkpointed_indices and "
    "use_reentrant=False to torch.utils.checkpoint.checkpoint, or compile the model and its checkpoints as one graph"
)


@dataclasses.dataclass
class Run:
    """One context: what happens to choices, and the store's entry of the next one.

    Args:
        mode: "record" or "replay".
        store: holds the keys.
        next: the entry of the next choice.
        again: whether a checkpointed region is computed again, so that recorded keys are in the store already.
        regions: how many regions of :func:`checkpointed_indices` are open.
    """

    mode: str
    store: IndexStore
    next: int = 0
    again: bool = False
    regions: int = 0

    def keep(self, name: str, keys: Tensor) -> None:
        """Writes the keys of the next choice into the store."""
        at, self.next = self.next, self.next + 1
        if self.again:
            return
        if at == len(self.store):
            if keys.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"recorded_indices: {_GIVE}; the store has no entry {at} yet")
            self.store._append(name, keys)
        elif self.store[at].shape != keys.shape or self.store[at].device != keys.device:
            old = self.store[at]
            raise ValueError(
                f"recorded_indices: {self.store._words(at)} of the given store is {list(old.shape)} on {old.device}, but "
                f"{name} chose {list(keys.shape)} on {keys.device}; record into a new store"
            )
        else:
            self.store[at].copy_(keys)

    def give(self, name: str, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
        """Returns the keys of the next choice. Raises ValueError if there are none of its shape and device."""
        at, self.next = self.next, self.next + 1
        if at >= len(self.store):
            raise ValueError(f"replayed_indices: the store has {len(self.store)} entries, but {name} chooses once more")
        keys = self.store[at]
        fits = all(want in (None, got) for want, got in zip(shape, keys.shape, strict=True))
        if not fits or keys.device != device:
            raise ValueError(
                f"replayed_indices: {self.store._words(at)} must have shape [B, S, n] = {list(shape)} on {device}, for "
                f"{name}; got {list(keys.shape)} on {keys.device}"
            )
        return keys

    def note(self, at: int, wrong: Tensor) -> None:
        """Takes the number of queries whose keys of entry ``at`` cannot be a choice. A CPU raises ValueError at once."""
        if not self.again:
            self.store._note(at, wrong)
            if not wrong.is_cuda:
                self.store.check()


_GIVE = "call the model once before a CUDA graph is captured, and give that store to the context inside"
_run: Run | None = None


@contextlib.contextmanager
def recorded_indices(store: IndexStore | None = None) -> Iterator[IndexStore]:
    """Records the keys that indexers choose inside the context, in the order of their calls.

    A choice is one call of :func:`mhc_inductor.index_topk`, as :class:`~mhc_inductor.nn.SparseIndexer` makes it, or one
    indexer that was recognised in a model compiled with ``backend="mhc_inductor"`` or after ``enable()``. A compiled model
    is compiled once for recording. The context holds for the whole process.

    Args:
        store: Where to write; an :class:`IndexStore` that holds keys must have the shapes of this call, and its tensors
            keep their addresses. None for a new one.

    Yields:
        The store. Its tensors ``[B, S, n]`` hold, for each choice, the n chosen keys of each query, int32, increasing
        or by falling score, as the model reads them; then -1 where fewer keys are visible.

    Raises:
        TypeError: store is not an IndexStore.
        ValueError: A choice does not fit the given store.
        RuntimeError: Nothing was recorded; another context is open; or a choice is in a checkpointed region outside of
            compiled code, see :func:`checkpointed_indices`.
        NotImplementedError: A choice is in a part of a graph, such as a branch, from which it cannot be recorded; or in
            torch.func, or of DTensors.
    """
    store = IndexStore() if store is None else store
    with _open("recorded_indices", Run("record", store)):
        yield store


@contextlib.contextmanager
def replayed_indices(store: IndexStore) -> Iterator[IndexStore]:
    """Makes indexers take the keys of a store, in the order of their calls, in place of scoring.

    What counts as a choice is said at :func:`recorded_indices`. A compiled model is compiled once for replay, never for
    new keys. Gradients of everything but the indexer are those of these keys; a choice has none. Keep the store's values
    until the backward is done.

    Args:
        store: An entry ``[B, S, n]`` for each choice, on its device: distinct keys that the query sees, as many as the
            indexer would choose, ``min(n, visible keys)``; the others -1, in any order.

    Yields:
        The store.

    Raises:
        TypeError: store is not an IndexStore.
        ValueError: The store is empty, or has another number of entries, shape or device than the choices; or keys that
            cannot be a choice. On a GPU the last is raised at the end of the context, which reads the device once.
        RuntimeError: As for :func:`recorded_indices`.
        NotImplementedError: As for :func:`recorded_indices`.
    """
    if isinstance(store, IndexStore) and not len(store):
        raise ValueError("replayed_indices: the store is empty; record into it, or make it from tensors")
    with _open("replayed_indices", Run("replay", store)):
        yield store


@contextlib.contextmanager
def _open(name: str, run: Run) -> Iterator[None]:
    """Holds a context open, and checks at its end that it took all choices."""
    if not isinstance(run.store, IndexStore):
        raise TypeError(f"{name}: store must be an IndexStore, got {type(run.store).__name__}")
    if _run is not None:
        raise RuntimeError(f"{name}: {'recorded' if _run.mode == 'record' else 'replayed'}_indices is open already")
    with _entered(run):
        yield
    taken, held = run.next, len(run.store)
    if not taken or (run.mode == "replay" and taken < held):
        raise (RuntimeError if run.mode == "record" else ValueError)(
            f"{name}: {f'{taken} of the {held} entries were taken' if held else 'nothing was recorded'}; a choice is seen in "
            'a model compiled with backend="mhc_inductor" where explain(model, ...) lists index_topk, and in a call of '
            "mhc_inductor.index_topk that is not compiled"
        )
    if taken < held:
        raise ValueError(
            f"{name}: the given store has {held} entries, but {taken} were recorded; record into a new store"
        )
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        run.store.check()


@contextlib.contextmanager
def _entered(run: Run) -> Iterator[None]:
    global _run, mode
    before = _run, mode, index.chooser
    _run, mode, index.chooser = run, run.mode, chosen
    try:
        yield
    finally:
        _run, mode, index.chooser = before


def checkpointed_indices() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a checkpointed region whose recomputation takes the keys that its forward took.

    It is the ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` for regions that are not
    part of a compiled graph: eager code, and layers that are compiled one by one. The recomputation records nothing.
    It may run after the context was left. Outside of both contexts the region is an ordinary one.

    Raises:
        RuntimeError: In the recomputation, if the keys of the store were changed since the forward.
    """
    if compat.tracing():  # the graph's own checkpoint, in which keys are an argument
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(_recompute)
    if _run is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    region = _Region(_run)
    return region, _Again(region)


def _recompute(*_: Any, **__: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


class _Region(AbstractContextManager[None]):
    """The forward of a checkpointed region: which entries of the store it takes."""

    def __init__(self, run: Run) -> None:
        self.run, self.first, self.versions = run, run.next, list[int]()

    def __enter__(self) -> None:
        self.first = self.run.next
        self.run.regions += 1

    def __exit__(self, *_: object) -> None:
        self.run.regions -= 1
        self.versions = self.present(self.run.next)

    def present(self, end: int) -> list[int]:
        """Returns how often the keys of the entries up to ``end`` have been written."""
        return [t._version for t in list(self.run.store)[self.first : end]]


class _Again(AbstractContextManager[None]):
    """The recomputation of a region, as often as there are backwards: the entries of its forward once more."""

    def __init__(self, region: _Region) -> None:
        self.region, self.left = region, contextlib.ExitStack()

    def __enter__(self) -> None:
        run, first, versions = self.region.run, self.region.first, self.region.versions
        if run.mode == "replay" and self.region.present(first + len(versions)) != versions:
            raise RuntimeError(
                "replayed_indices: the store was changed before the backward, which needs its keys; write new ones after "
                "it, or into another store"
            )
        self.left.enter_context(_entered(Run(run.mode, run.store, first, again=True)))

    def __exit__(self, *_: object) -> None:
        self.left.close()


def current(what: str) -> Run:
    """Returns the open context for a choice of keys. Raises RuntimeError if its recomputation could not be followed."""
    run = _run
    if run is None:
        raise RuntimeError(f"{what} was compiled inside recorded_indices or replayed_indices; call it inside one")
    if not _followed(run) or (compat.backend.in_backward() and not run.again):
        name = "recorded_indices" if run.mode == "record" else "replayed_indices"
        raise RuntimeError(f"{name}: {what} is in a checkpointed region, in which {_REGION}")
    return run


def _followed(run: Run) -> bool:
    """Returns whether every region of ``torch.utils.checkpoint`` that runs on this thread recomputes with its own keys.

    Without gradients a region does not enter its contexts, and is not computed again.
    """
    frame, found = sys._getframe(1), list[Any]()
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            found.append(frame.f_locals.get("context_fn"))
        frame = frame.f_back  # type: ignore[assignment]
    return len(found) == run.regions or all(context is checkpointed_indices for context in found)


def chosen(op: Callable[..., Tensor], q: Tensor, k: Tensor, w: Tensor, topk: int, *rest: Any) -> Tensor:
    """Returns the keys that an eager ``index_topk`` chooses, which a context records, or those that it replays.

    Args:
        op: The op.
        q: Queries, checked as all arguments are.
        k: Keys.
        w: Weights.
        topk: n.
        *rest: ``scale`` and what says which keys are visible.

    Raises:
        NotImplementedError: Inside torch.func or for a DTensor.
        RuntimeError: See :func:`current`.
        ValueError: The store does not fit.
    """
    name = _caller()
    run = current(name)
    if compat.functorch_active() or compat.is_wrapper(q):
        raise NotImplementedError(f"{name}: keys are neither recorded nor replayed inside torch.func, or of DTensors")
    if run.mode == "record":
        found = op(q, k, w, topk, *rest)
        run.keep(name, found)
        return found
    at = run.next
    keys = run.give(name, (*q.shape[:2], topk), q.device)
    indices, wrong = ops.replayed(keys, k.shape[1], *rest[1:], False)
    run.note(at, wrong)
    return indices


def _caller() -> str:
    """Returns file and line of the innermost code outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_OWN)):
        frame = frame.f_back
    return f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
