# SPDX-License-Identifier: Apache-2.0
"""A script that warms a model up in two processes and checks that it then finds what they compiled.

The second graph is of any size: the first process makes it, of the first entry and the third.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mhc_inductor

D = 16


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class Two(nn.Module):
    """Two layers, of which one may be compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(D, D), Half(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def main() -> None:
    """Warms the model up. Raises AssertionError if it compiles anything itself, or is changed."""
    model = Two()
    model.second.compile(backend="mhc_inductor")
    xs = [torch.randn(n, D) for n in (4, 7, 9)]
    wanted = [model.second.forward(model.first(x)) for x in xs]
    before = [(t.data_ptr(), t.clone()) for t in (*xs, *model.parameters())]
    options = {"fx_graph_cache": True, "cpp_cache_precompile_headers": False}
    off = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(options), off, torch.no_grad():
        found = mhc_inductor.warmup(model, [(xs[0],), {"x": xs[1]}, lambda: (xs[2],)], parallel=2)
        cached = {k: n for k, n in counters["inductor"].items() if "graph_cache" in k}
        assert cached == {"fxgraph_cache_hit": 2}, cached
        assert [one.graphs for one in found.shapes] == [1, 1, 0], found
        assert found.seconds > found.ahead > 0 and "side by side" in str(found)
        with torch.compiler.set_stance("fail_on_recompile"):
            for x, y in zip(xs, wanted, strict=True):
                torch.testing.assert_close(model(x), y)
    for t, (pointer, value) in zip((*xs, *model.parameters()), before, strict=True):
        assert t.data_ptr() == pointer and torch.equal(t, value)


if __name__ == "__main__":
    main()
