# SPDX-License-Identifier: Apache-2.0
"""The names that the code of a page takes as given (``GIVEN`` in tests/user_code.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DeepseekV4Config

from benchmarks import deepseek_model
from mhc_inductor.routing import Graph, Proposal
from tests.gated_norm import aten, norm_formula

__all__ = ["Graph", "Iterator", "Proposal", "aten", "config", "gate", "input_ids", "model", "w", "x"]

size = deepseek_model.TINY
config: DeepseekV4Config = deepseek_model.config(size)
input_ids = torch.randint(size.vocab, (size.batch, size.seq))
x, w, gate = torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)


def model(x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    return norm_formula(x, w, gate, 1e-5)
