# SPDX-License-Identifier: Apache-2.0
"""Needles in real text: ``<ab=x>`` is hidden in Python's standard library and asked for at the end.

A sequence is text with needles, followed by the same needles in another order. The model has to predict the byte after
each ``=`` of the second part.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

LETTERS = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyz"))
WIDTH = len("<ab=x>")
ASK, ANSWER = WIDTH - 3, WIDTH - 2
"""Positions of ``=`` and of the answer in a needle."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of sequences with questions.

    ``tokens[B, S]``: bytes. ``ask[n]``: position of the ``=`` of each question; the answer is the next byte.
    ``answer[B, n]``: that byte. ``where[B, n]``: position of the answer in the text. ``depth[B, n]``: number of the
    needle, counted from the beginning of the text.
    """

    tokens: Tensor
    ask: Tensor
    answer: Tensor
    where: Tensor
    depth: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))


def needles(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns random needles, bytes ``[batch, count, WIDTH]``: two-letter names, distinct in a sequence; any value."""
    pairs = len(LETTERS) ** 2
    names = torch.rand(batch, pairs, generator=generator).argsort(1)[:, :count]
    made = torch.empty(batch, count, WIDTH, dtype=torch.int64)
    made[..., 0], made[..., ASK], made[..., -1] = ord("<"), ord("="), ord(">")
    made[..., 1], made[..., 2] = LETTERS[names // len(LETTERS)], LETTERS[names % len(LETTERS)]
    made[..., ANSWER] = LETTERS[torch.randint(len(LETTERS), (batch, count), generator=generator)]
    return made


def make(text: Tensor, batch: int, seq: int, count: int, generator: torch.Generator) -> Batch:
    """Returns ``batch`` sequences of ``seq`` bytes with ``count`` needles each, one in each of ``count`` equal parts.

    Raises ValueError if ``seq`` is too short for them.
    """
    body = seq - WIDTH * count
    part = body // count
    if part < WIDTH:
        raise ValueError(f"seq must be at least {2 * WIDTH * count} for {count} needles, got {seq}")
    start = torch.randint(len(text) - body, (batch, 1), generator=generator)
    tokens = torch.empty(batch, seq, dtype=torch.int64)
    tokens[:, :body] = text[start + torch.arange(body)]
    made = needles(batch, count, generator)
    at = torch.arange(count) * part + torch.randint(part - WIDTH + 1, (batch, count), generator=generator)
    tokens.scatter_(1, (at[..., None] + torch.arange(WIDTH)).flatten(1), made.flatten(1))
    order = torch.rand(batch, count, generator=generator).argsort(1)
    asked = made.gather(1, order[..., None].expand(-1, -1, WIDTH))
    tokens[:, body:] = asked.flatten(1)
    ask = body + WIDTH * torch.arange(count) + ASK
    return Batch(tokens, ask, asked[..., ANSWER], at.gather(1, order) + ANSWER, order)
