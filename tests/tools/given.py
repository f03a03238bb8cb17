# SPDX-License-Identifier: Apache-2.0
"""The names that the code of a page takes as given (``GIVEN`` in tests/user_code.py)."""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config

from benchmarks import deepseek_model

__all__ = ["config", "input_ids"]

size = deepseek_model.TINY
config: DeepseekV4Config = deepseek_model.config(size)
input_ids = torch.randint(size.vocab, (size.batch, size.seq))
