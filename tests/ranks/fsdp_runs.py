# SPDX-License-Identifier: Apache-2.0
"""Runs ``examples/train_fsdp.py`` with its own options, and graphs as Dynamo and the pass leave them.

Inductor's C++ would take minutes to compile. Hyper-connections have 3 Sinkhorn iterations in place of 20, half of the
nodes of a layer's graph.
"""

from __future__ import annotations

from typing import Any

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
        whole = models["deepseek_v4"]

        def smaller(size: Any) -> Any:
            model = whole(size)
            for module in model.modules():
                if hasattr(module, "hc_sinkhorn_iters"):
                    module.hc_sinkhorn_iters = 3
            return model

        models["deepseek_v4"] = smaller
        typer.run(example.main)


if __name__ == "__main__":
    main()
