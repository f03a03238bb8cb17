# SPDX-License-Identifier: Apache-2.0
"""Runs ``examples/train_fsdp.py`` with its own options, and graphs as Dynamo and the pass leave them.

Inductor's C++ would take minutes to compile.
"""

from __future__ import annotations

import torch
import torch._inductor.compile_fx as compile_fx_module
import typer

from tests import example_modules
from tests.trainer_runs import without_inductor

if __name__ == "__main__":
    torch.set_num_threads(1)
    without_inductor()
    compile_fx_module.compile_fx = lambda gm, *_, **__: gm
    with example_modules.imported("train_fsdp") as example:
        typer.run(example.main)
