# SPDX-License-Identifier: Apache-2.0
"""Checks of groups and meshes, of the bytes that are sent, and of torch.compile around the functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh

import mhc_inductor as mi
from tests.oracles import e79 as helpers_e79
from tests.oracles import selection as helpers
from tests.ranks import distributed_tools as tools
from tests.ranks.distributed_e79 import check_scan, scanned
from tests.ranks.distributed_selection import attended, check_ranges
from tests.ranks.distributed_tools import check, counted_bytes, leaf, me, message, ranks, shares


@check
def groups_and_meshes() -> None:
    """A group of ranks with gaps, whose numbers are not the default group's; then a mesh of all."""
    some = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        tools.GROUP = some
        try:
            check_ranges(torch.float32, "gather", ["odd"])
            check_ranges(torch.float32, "ring", ["odd"])
            check_scan(helpers_e79.make_inputs(6, 2, dtype=torch.float32), shares(6), 2)
        finally:
            tools.GROUP = None
    else:
        text = message(lambda: _scan_of(some))
        assert text == "ValueError: e79_scan: this process (rank 1) is not in the group", text
    mesh = init_device_mesh("cpu", (ranks(),))
    out = _scan_of(mesh)
    assert out.shape == (2, 1, 1)
    text = message(lambda: _scan_of("all"))
    assert text == "TypeError: e79_scan: group must be a process group, a device mesh or None, got str", text


def _scan_of(group: Any) -> Tensor:
    return mi.distributed.e79_scan(torch.ones(2, 1, 4), group=group)[0]


@check
def bytes_are_those_of_the_docstrings() -> None:
    made = helpers.make_inputs("odd", torch.bfloat16, S=12, S_kv=24, Dk=16, Dv=8)
    up, others = helpers.upstream(made), ranks() - 1
    part = 2 * 2 * 24 // ranks() * (16 + 8) * 2
    row = 20 * 8 * others
    measured = []
    with counted_bytes() as sent:
        for run in (
            lambda: attended(made, None, "gather", shares(12), shares(24)),
            lambda: attended(made, up, "gather", shares(12), shares(24)),
            lambda: attended(made, None, "ring", shares(12), shares(24)),
            lambda: attended(made, up, "ring", shares(12), shares(24)),
            lambda: scanned(helpers_e79.make_inputs(9, 4, dtype=torch.float32), ["out"], shares(9), 2, False),
        ):
            sent[0] = 0
            run()
            measured.append(sent[0] - row)
    states = 2 * 4 * 5 * 5 * 4
    both = states * ((me() > 0) + (me() < others))
    assert measured == [others * part, 2 * others * part, others * part, 3 * others * part, both], measured


@check
def under_torch_compile() -> None:
    """The function breaks the graph: what is around it is compiled, and the gradients are right."""
    attention, scan = mi.distributed.selection_attention, mi.distributed.e79_scan
    made = helpers.make_inputs("odd", torch.float32)
    s, t = shares(7)[me()], shares(12)[me()]

    def program(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
        return torch.sin(attention(q * 2, k, v, ranges, method="ring").float()) + 1

    def run(fn: Any) -> list[Tensor]:
        inputs = [
            leaf(made["q"], (tools.ALL, s)),
            leaf(made["k"], (tools.ALL, tools.ALL, t)),
            leaf(made["v"], (tools.ALL, tools.ALL, t)),
        ]
        out = fn(*inputs, made["ranges"][:, s])
        out.sum().backward()
        return [out.detach(), *(i.grad for i in inputs)]

    counter = CompileCounter()
    got, want = run(torch.compile(program, backend=counter)), run(program)
    assert counter.frame_count == 2, counter.frame_count
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for fn in (program, lambda x, *_: scan(x.flatten(2)[..., :4])[0]):
        torch._dynamo.reset()
        text = message(lambda fn=fn: run(torch.compile(fn, backend="eager", fullgraph=True)))
        assert text.startswith("Unsupported:"), text
