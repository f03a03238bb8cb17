# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine with Python has: the sources of the standard library, split by file."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator

import torch
from torch import Tensor

# Skips odd fixtures, character tables, generated text, and packages, which differ between machines.
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two uint8 tensors of concatenated files, ``train`` and ``valid``, without a common file."""

    train: Tensor
    valid: Tensor
    train_files: int
    valid_files: int

    def to(self, device: torch.device) -> Corpus:
        return dataclasses.replace(self, train=self.train.to(device), valid=self.valid.to(device))


def _is_valid(name: str) -> bool:
    # Hashing the name gives every machine the same split, whatever files it has.
    return hashlib.sha256(name.encode()).digest()[0] < 20


def load() -> Corpus:
    """Reads the ``*.py`` files below the standard library's folder; about 8 % of them are for validation."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIP.intersection(name.parts):
            parts[_is_valid(name.as_posix())].append(path.read_bytes())
    train, valid = (bytearray(b"\n\n".join(parts[key])) for key in (False, True))
    if min(len(train), len(valid)) < 1 << 16:
        raise RuntimeError(f"too little text: {root} holds {len(train) + len(valid)} bytes of *.py (a zipped stdlib?)")
    return Corpus(
        torch.frombuffer(train, dtype=torch.uint8),
        torch.frombuffer(valid, dtype=torch.uint8),
        len(parts[False]),
        len(parts[True]),
    )


def batches(text: Tensor, batch: int, seq: int, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ``count`` pairs (inputs, targets), int64 ``[batch, seq]`` on text's device; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(seq + 1)
    for _ in range(count):
        start = torch.randint(len(text) - seq, (batch, 1), generator=generator)
        window = text[(start + span).to(text.device)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
