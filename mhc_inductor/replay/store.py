# SPDX-License-Identifier: Apache-2.0
""":class:`IndexStore`: the keys that indexers chose, a tensor for each choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_DTYPES = (torch.int32, torch.int64)


class IndexStore:
    """The keys that the indexers of a model chose: a tensor for each choice, in the order of the calls.

    Its tensors keep their addresses: recording into a store that holds keys, and :meth:`copy_`, write new values into
    them. So CUDA graphs that read them stay valid.

    Args:
        tensors: Keys ``[B, S, n]`` for each choice, int32 or int64, in any order; -1 where a query has fewer than n.
            They are copied, as int32. Or a mapping, such as :meth:`state_dict` returns, from names to such tensors. n is
            what the indexer chooses, ``min(topk, T)``. Without tensors the store is for recording.

    Raises:
        TypeError: An entry is not a tensor, or not int32 or int64.
        ValueError: A shape is not ``[B, S, n]``, or a key is below -1 or above 2**31 - 2.
    """

    def __init__(self, tensors: Iterable[Tensor] | Mapping[str, Tensor] = ()) -> None:
        named = tensors.items() if isinstance(tensors, Mapping) else [("", t) for t in tensors]
        self.names: list[str] = []
        """The module and line of each choice; empty for tensors that came without a name."""
        self._keys: list[Tensor] = []
        self._wrong: list[Tensor | None] = []
        for name, t in named:
            _check(f"tensors[{len(self)}]", t)
            self._append(re.sub(r"^\d+: ", "", name), t)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> Tensor:
        return self._keys[at]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._keys)

    def __repr__(self) -> str:
        lines = [
            f"  {at}: {n or 'no name'} {list(t.shape)}"
            for at, (n, t) in enumerate(zip(self.names, self._keys, strict=True))
        ]
        return "\n".join([f"IndexStore, entries: {len(self)}", *lines])

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors by number, module and line, for ``torch.save``; ``IndexStore(state)`` reads them."""
        return {f"{at}: {name}": t for at, (name, t) in enumerate(zip(self.names, self._keys, strict=True))}

    def to(self, device: torch.device | str) -> IndexStore:
        """Returns a copy of this store on another device."""
        moved = IndexStore()
        for name, t in zip(self.names, self._keys, strict=True):
            moved._append(name, t.to(device))
        return moved

    def copy_(self, tensors: Iterable[Tensor]) -> IndexStore:
        """Writes new keys into this store's tensors, which keep their addresses, and returns the store.

        Args:
            tensors: A tensor for each choice, in this store's order and shapes; int32 or int64.

        Raises:
            TypeError: As for the class.
            ValueError: As for the class; or the number of tensors or a shape is another. Then nothing was written.
        """
        new = list(tensors)
        if len(new) != len(self):
            raise ValueError(f"IndexStore.copy_: tensors must be {len(self)}, one for each choice, got {len(new)}")
        for at, (t, old) in enumerate(zip(new, self._keys, strict=True)):
            _check(f"tensors[{at}]", t, old.shape)
        for t, old in zip(new, self._keys, strict=True):
            old.copy_(t)
        return self

    def check(self) -> None:
        """Raises ValueError if keys were replayed that cannot be an indexer's choice, and forgets them.

        A context does so at its end, by a read of the device. Only after the replay of a CUDA graph that was captured
        by hand is this needed.
        """
        counts = [0 if w is None else int(w) for w in self._wrong]
        for w in self._wrong:
            if w is not None:
                w.zero_()
        if any(counts):
            at = next(i for i, many in enumerate(counts) if many)
            raise ValueError(
                f"replayed_indices: keys of {counts[at]} queries cannot be a choice of {self._words(at)}: expected "
                "min(n, visible keys) distinct keys that the query sees, then -1, in any order; the call's results are wrong"
            )

    def _words(self, at: int) -> str:
        return f"entry {at} ({self.names[at]})" if self.names[at] else f"entry {at}"

    def _append(self, name: str, t: Tensor) -> None:
        with torch.inference_mode(False):  # else training could not save what inference recorded
            self._keys.append(torch.empty(t.shape, dtype=torch.int32, device=t.device))
        self._keys[-1].copy_(t)
        self.names.append(name)
        self._wrong.append(None)

    def _note(self, at: int, wrong: Tensor) -> None:
        """Adds to the number of queries whose keys of entry ``at`` cannot be a choice."""
        total = self._wrong[at]
        if total is None:
            with torch.inference_mode(False):
                total = self._wrong[at] = torch.zeros(1, dtype=torch.int32, device=wrong.device)
        total += wrong


def _check(name: str, t: Tensor, shape: torch.Size | None = None) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"IndexStore: {name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in _DTYPES:
        raise TypeError(f"IndexStore: {name} must be int32 or int64, got {t.dtype}")
    if t.dim() != 3 or (shape is not None and t.shape != shape):
        expected = "[B, S, n]" if shape is None else list(shape)
        raise ValueError(f"IndexStore: {name} must have shape {expected}, got {list(t.shape)}")
    if t.numel() and (int(t.min()) < -1 or int(t.max()) > 2**31 - 2):
        raise ValueError(
            f"IndexStore: {name} must hold keys from 0 and -1 for none, got {int(t.min())} to {int(t.max())}"
        )
