# SPDX-License-Identifier: Apache-2.0
"""The kernels that read parts of blocks of columns, under the interpreter or on a GPU: as those that read slices."""

from __future__ import annotations

import pytest
import torch

from mhc_inductor.kernels.mhc.blocks import mhc_blocks_coefficients, mhc_blocks_collapse
from mhc_inductor.kernels.mhc.single_pass import mhc_coefficients
from mhc_inductor.kernels.mhc.slices import mhc_slices_collapse

BLOCKS, F32 = 8, torch.float32
FLOATS = (1e-6, 1e-6, 2.0, 0.0, 1e-6)


def made_parts(tokens, width, m, mp, device):
    """Returns parts of blocks, and those of slices that the kernel for many tokens makes of the same sums."""
    count = width // 32
    blocks = torch.randn(count, tokens, mp)
    blocks[..., m : m + 4] = torch.rand(count, tokens, 4) * 32
    slices = torch.full((-(-count // BLOCKS), tokens, mp), float("nan"))
    for s in range(slices.shape[0]):
        total = torch.zeros(tokens, m + 4)
        for block in blocks[s * BLOCKS : (s + 1) * BLOCKS]:
            total = total + block[:, : m + 4]
        q = total[:, m:]
        slices[s, :, :m], slices[s, :, m] = total[:, :m], (q[:, 0] + q[:, 2]) + (q[:, 1] + q[:, 3])
    return blocks.to(device), slices.to(device)


def outputs(tokens, width, m, device):
    shapes = {"h_in": (tokens, width), "h_pre": (tokens, 4), "h_post": (tokens, 4), "h_res": (tokens, 4, 4)}
    shapes |= {"h_mix": (tokens, m), "inv": (tokens,)}
    nan = float("nan")
    return {
        k: torch.full(s, nan, dtype=torch.bfloat16 if k == "h_in" else F32, device=device) for k, s in shapes.items()
    }


def check(got, want):
    for k, t in want.items():
        assert torch.equal(got[k].nan_to_num(7), t.nan_to_num(7)), k
    assert not got["h_mix"].isnan().any() and not got["inv"].isnan().any()


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "m", "iters"), [(3, 2560, 24, 3), (1, 2624, 8, 0), (9, 1088, 4, 0), (2, 1024, 24, 0)]
)
def test_coefficients_and_collapse(device, tokens, width, m, iters, outside):
    torch.manual_seed(0)
    mp = 1 << max(4, m.bit_length())
    slices = -(-width // (32 * BLOCKS))
    x = torch.randn(tokens, 4, width, device=device).bfloat16()
    alpha, bias = torch.rand(3, device=device), torch.randn(m, device=device)
    results = []
    parts = made_parts(tokens, width, m, mp, device)
    for kernel, part, per, more in (
        (mhc_slices_collapse, parts[1], 8, {}),
        (mhc_blocks_collapse, parts[0], 1, {"NB": BLOCKS}),
    ):
        o = outputs(tokens, width, m, device)
        programs = -(-tokens // per)
        kernel[(programs + tokens * -(-width // 512),)](
            x, part, alpha, bias, o["h_in"], o["h_pre"], o["h_post"], o["h_res"] if m == 24 else None, o["h_mix"],
            o["inv"], tokens, programs, *FLOATS,
            D=width, M=m, MP=mp, S=slices, SP=1 << (slices - 1).bit_length(), BC=8, BD=512, HAS_POST=m > 4,
            HAS_RES=m == 24, ITERS=iters, FORM=0, OUTSIDE=outside, num_warps=1, **more,
        )  # fmt: skip
        results.append(o)
    check(results[1], results[0])
    assert not results[1]["h_in"].isnan().any()


@pytest.mark.parametrize(("tokens", "width", "form", "outside"), [(9, 2560, 0, False), (1, 1088, 1, True)])
def test_coefficients(device, tokens, width, form, outside):
    torch.manual_seed(1)
    parts = made_parts(tokens, width, 24, 32, device)
    slices = parts[1].shape[0]
    alpha, bias = torch.rand(3, device=device), torch.randn(24, device=device)
    want, got = (outputs(tokens, width, 24, device) for _ in range(2))
    names = ("h_pre", "h_post", "h_res", "h_mix", "inv")
    common = dict(M=24, MP=32, BC=8, HAS_RES=True, ITERS=3, FORM=form, OUTSIDE=outside, num_warps=1)
    mhc_coefficients[(-(-tokens // 8),)](
        parts[1], alpha, bias, *(want[k] for k in names), tokens, slices, *FLOATS,
        K=4 * width, N=4, NP=4, GROUPS=slices, GROUP=slices, **common,
    )  # fmt: skip
    mhc_blocks_coefficients[(tokens,)](
        parts[0], alpha, bias, *(got[k] for k in names), tokens, *FLOATS,
        D=width, NB=BLOCKS, S=slices, SP=1 << (slices - 1).bit_length(), **common,
    )  # fmt: skip
    del want["h_in"]
    check(got, want)
