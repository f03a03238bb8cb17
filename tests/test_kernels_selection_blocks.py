# SPDX-License-Identifier: Apache-2.0
"""The kernel that chooses blocks, through its launch plan, with poisoned buffers, against the definition.

It runs compiled on a GPU, elsewhere in the interpreter.
"""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import some
from test_nn_selection import chosen_blocks

from mhc_inductor.kernels.launch import DeviceProps, EagerBuilder
from mhc_inductor.kernels.selection import blocks_plan
from tests.oracles.poisoned import Poisoned
from tests.oracles.selection import choice

H200 = DeviceProps(132, "cuda", 90)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def check(device, q, k, lse, scale, length, stride, block, count, s_kv):
    """Checks the chosen blocks against the definition in fp64 on the same inputs."""
    builder = Poisoned(torch.device(device), H200)
    args = (scale, length, stride, block, count, s_kv)
    got = blocks_plan.plan_selection_blocks(builder, *(t.to(device) for t in (q, k, lse.float())), *args).cpu()
    want, margin = chosen_blocks(q.double(), k.double(), lse.double(), *args)
    assert got.shape == (*q.shape[:3], count) and got.dtype is torch.int32
    assert margin > 1e-5  # larger than the error of fp32 scores
    for at, blocks in want.items():
        named = [j for j in got[at].tolist() if j >= 0]
        assert len(named) == len(set(named)) and set(named) == blocks, at
        assert got[at].tolist().count(-1) == count - len(named)


small = functools.partial(choice, dtype=F32, B=1)


@pytest.mark.parametrize(("S", "S_kv", "N"), [(50, 50, 11), (3, 47, 10), (1, 64, 15), (5, 5, 0)])
def test_blocks_are_chosen_by_the_definition(device, S, S_kv, N):
    check(device, *choice(S, S_kv, N, F32))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("h", "D"), some([(1, 16), (4, 128), (16, 80), (64, 40), (33, 256)], [(1, 16), (33, 24)]))
def test_heads_and_widths(device, h, D, dtype):
    check(device, *small(40, 40, h=h, D=D, G=1, dtype=dtype))


@pytest.mark.parametrize(
    ("length", "stride", "block", "count"),
    [(8, 4, 16, 4), (4, 4, 4, 3), (24, 4, 8, 6), (6, 3, 9, 5), (2, 1, 100, 3), (8, 2, 10, 16)],
)
def test_sizes_of_blocks(device, length, stride, block, count):
    """Tests compressed keys that span blocks, blocks that are no power of two of strides, and large counts."""
    S, S_kv = some((70, 230), (30, 130))
    check(device, *small(S, S_kv, length=length, stride=stride, block=block, count=count, G=1, seed=4))


def test_a_long_row_of_blocks(device, monkeypatch):
    """Tests several steps of the search, most of which find nothing better."""
    monkeypatch.setattr(blocks_plan, "TOP_BLOCKS", 16)
    check(device, *small(9, 700, G=1, length=4, stride=2, block=4, count=7, B=2))


def test_queries_in_pieces_give_the_same(device, monkeypatch):
    monkeypatch.setattr(blocks_plan, "SCORES", 1)
    args = small(75, 80, h=2, G=2, B=2)
    builder = EagerBuilder(torch.device(device), H200)
    tensors = [t.to(device) for t in (*args[:2], args[2].float())]
    pieces = blocks_plan.plan_selection_blocks(builder, *tensors, *args[3:])
    monkeypatch.undo()
    assert torch.equal(pieces, blocks_plan.plan_selection_blocks(builder, *tensors, *args[3:]))


def test_any_strides(device):
    q, k, lse, *sizes = small(40, 40)
    check(device, q.transpose(1, 3).contiguous().transpose(1, 3), k.mT.contiguous().mT, lse.mT.contiguous().mT, *sizes)


def test_ties_go_to_the_first_block(device):
    """Checks ties: with zero queries, every complete compressed key has the same weight."""
    q, k, _, *sizes = small(64, 64, h=2, count=4)
    builder = EagerBuilder(torch.device(device), H200)
    seen = ((torch.arange(64) + 1 - 8) // 4 + 1).clamp(min=1).log().view(1, 64, 1, 1).expand(1, 64, 2, 2)
    got = blocks_plan.plan_selection_blocks(builder, *(t.to(device) for t in (q * 0, k, seen.float())), *sizes)
    assert sorted(got[0, 63, 0].tolist()) == [0, 1, 6, 7]


def test_nothing_to_choose_from(device):
    """Tests inputs without compressed keys, and without queries."""
    check(device, *small(3, 3))
    q, k, lse, *sizes = small(4, 40)
    got = blocks_plan.plan_selection_blocks(EagerBuilder(torch.device(device), H200), q[:, :0], k, lse[:, :0], *sizes)
    assert got.shape == (1, 0, 2, 5)


def test_unsupported_inputs_have_a_reason():
    builder = EagerBuilder(torch.device("meta"), H200)
    q, k, lse, *sizes = small(4, 40)
    assert blocks_plan.unsupported(builder, q, k, lse.float()) is None
    assert (
        "fp64" in (reason := blocks_plan.unsupported(builder, q.double(), k.double(), lse) or "") or "float64" in reason
    )
    assert "D = 300" in blocks_plan.unsupported(
        builder, torch.zeros(1, 2, 1, 2, 300), torch.zeros(1, 1, 2, 300), lse.float()
    )
    assert "h = 65" in blocks_plan.unsupported(builder, torch.zeros(1, 2, 1, 65, 8), k, lse.float())
    assert blocks_plan.unsupported_sizes(builder, q, k, lse, *sizes) is None
    wide = torch.zeros(1, 2, 1, 2, 256)
    assert "1000 strides at D = 256" in blocks_plan.unsupported_sizes(builder, wide, k, lse, 1.0, 4, 1, 1000, 3, 10)
