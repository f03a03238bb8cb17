"""Needles in real text: ``<ab=x>`` hidden in Python's standard library, and asked for at the end.

A sequence is text with needles in it, then each needle again in another order: the byte after ``=`` is what the model has to know.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

LETTERS = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyz"))
WIDTH = len("<ab=x>")
ASK, ANSWER = WIDTH - 3, WIDTH - 2
"""Where ``=`` and the answer stand in a needle."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """``tokens[B, S]`` bytes; ``ask[n]``: positions of the last ``=`` of each question, the answer comes next.

    ``answer[B, n]``: that byte; ``where[B, n]``: the position of the answer in the text; ``depth[B, n]``: its needle's number,
    from the beginning of the text.
    """

    tokens: Tensor
    ask: Tensor
    answer: Tensor
    where: Tensor
    depth: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))


def needles(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """``[batch, count, WIDTH]`` bytes: distinct names of two letters in a sequence, any letter as value."""
    pairs = len(LETTERS) ** 2
    names = torch.rand(batch, pairs, generator=generator).argsort(1)[:, :count]
    made = torch.empty(batch, count, WIDTH, dtype=torch.int64)
    made[..., 0], made[..., ASK], made[..., -1] = ord("<"), ord("="), ord(">")
    made[..., 1], made[..., 2] = LETTERS[names // len(LETTERS)], LETTERS[names % len(LETTERS)]
    made[..., ANSWER] = LETTERS[torch.randint(len(LETTERS), (batch, count), generator=generator)]
    return made


def make(text: Tensor, batch: int, seq: int, count: int, generator: torch.Generator) -> Batch:
    """``batch`` sequences of ``seq`` bytes with ``count`` needles each, one in every ``count``-th part of the text."""
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
