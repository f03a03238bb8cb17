# SPDX-License-Identifier: Apache-2.0
"""Runs ``examples/train_fsdp.py`` with its own options, and graphs as Dynamo and the pass leave them.

Inductor's C++ would take minutes to compile.
"""

from __future__ import annotations

import torch
import torch._inductor.compile_fx as compile_fx_module
import typer

from tests.tools import example_modules
from tests.tools.trainer_runs import without_inductor


def main() -> None:
    torch.set_num_threads(1)
    without_inductor()
    compile_fx_module.compile_fx = lambda gm, *_, **__: gm
    with example_modules.imported("train_fsdp") as example:
        models = example.fsdp_v4.MODELS
        models["deepseek_v4"] = example_modules.with_fewer_iterations(models["deepseek_v4"])
        typer.run(example.main)


if __name__ == "__main__":
    main()
