# SPDX-License-Identifier: Apache-2.0
"""Saves programs whose ops later versions must still run: ``python -m tests.saved_programs`` with the oldest torch.

A program that is committed in ``tests/data`` is never made again: a new one gets a new name.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from torch import Tensor, nn

import mhc_inductor
from mhc_inductor.nn import HyperConnection, HyperHead

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # the helpers import each other by name, as under pytest

from tests.tools import packaged

DATA = pathlib.Path(__file__).parent / "data"
WIDTH = 16


class SinglePass(nn.Module):
    """Sites of DeepSeek-V4.1, then attention to keys that an index chose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [HyperConnection(WIDTH, 4, nn.Linear(WIDTH, WIDTH), sinkhorn_iters=2, single_pass=True) for _ in "ab"]
        self.sites, self.head = nn.ModuleList(made), HyperHead(WIDTH, 4)

    def forward(self, x: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Takes x [B, S, 4, WIDTH] and starts [B, S, G, 1], whose first group bounds the chosen keys."""
        h_pre = None
        for site in self.sites:
            x, h_pre = site((x, h_pre))
        h = self.head(x) + mhc_inductor.mhc_collapse(x, h_pre)
        q, limit = h.unflatten(-1, (2, 8)), starts[..., 0, 0].clamp(min=1) + 1
        chosen = mhc_inductor.index_topk(q, h[..., :8], h[..., :2], 3, limit=limit)
        k = h[:, None, :, :8]
        return h, mhc_inductor.selection_attention(q[:, :, None], k, k, indices=chosen[:, :, None])


MODELS = {"everything": lambda: packaged.Everything(WIDTH, 8, picks=True, recurrent=True), "single_pass": SinglePass}


def save(name: str, folder: pathlib.Path = DATA) -> None:
    """Writes a routed program, and its inputs and outputs for each case."""
    model = MODELS[name]()
    routed = packaged.exported(model, WIDTH)
    for node in routed.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            node.meta.pop(key, None)  # paths of the machine that saves
    torch.export.save(routed, folder / f"{name}.pt2")
    inputs = [packaged.inputs(*sizes, WIDTH) for sizes in packaged.CASES]
    with torch.no_grad():
        torch.save([(given, model(*given)) for given in inputs], folder / f"{name}.pt")


if __name__ == "__main__":
    for name in MODELS:
        save(name)
