# SPDX-License-Identifier: Apache-2.0
"""The names that the code of a page takes as given (``GIVEN`` in tests/user_code.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from transformers import DeepseekV4Config

from benchmarks import deepseek_model
from mhc_inductor.routing import Edit, Match, Miss, Value, View, algebra
from tests.gated_norm import aten

__all__ = [
    "Edit",
    "Iterable",
    "Match",
    "Miss",
    "Value",
    "View",
    "algebra",
    "aten",
    "config",
    "fx",
    "input_ids",
    "model",
    "x",
]

size = deepseek_model.TINY
config: DeepseekV4Config = deepseek_model.config(size)
input_ids = torch.randint(size.vocab, (size.batch, size.seq))
x = torch.randn(4, 16)


def model(x: Tensor) -> Tensor:
    return x
