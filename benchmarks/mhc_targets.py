# SPDX-License-Identifier: Apache-2.0
"""Targets of the mHC rows: floors, bars, goals, and times of others of other implementations.

Source: the project's survey of other implementations on one NVIDIA H200 (torch 2.11, triton 3.6):
CUDA-graph replay with the L2 cache flushed, medians, random data, 8192 tokens, n = 4, bf16 x, fp32 phi.
TransformerEngine and TileKernels multiply in tf32, Liger keeps phi in bf16, torch.compile and eager
multiply in fp32. Absolute times count only on such a GPU; on another device compare ratios within one run.
"""

from __future__ import annotations

from .running import Target

TOKENS = 8192
N = 4
FLOOR_BYTES_PER_US = 4.3e6
"""The bandwidth that floors assume: 4.3 TB/s, which a large copy reaches on an H200."""
PEAK_BAR_MB = 500.0

TE, TK, LIGER, COMPILE, EAGER = "TransformerEngine", "TileKernels", "Liger", "torch.compile", "eager"


def _row(bar: float, goal: float, te: float, tk: float, *rest: float | None) -> Target:
    names = (LIGER, COMPILE, EAGER)
    peers = {TE: te, TK: tk}
    peers.update({name: us for name, us in zip(names, rest, strict=False) if us is not None})
    return Target(bar, goal, peers)


TARGETS: dict[tuple[str, int], Target] = {
    ("pre", 2560): _row(105, 75, 138, 140, 291, 421),
    ("post", 2560): _row(95, 93, 97, 96, 512, 830),
    ("fb", 2560): _row(635, 540, 1207, 1422, 5161, 3867),
    ("pre", 4096): _row(150, 105, 190, 215, 435, 622, 2333),
    ("post", 4096): _row(149, 146, 149, 150, 600, 1322, 2340),
    ("fb", 4096): _row(970, 850, 1855, 1747, 7403, 5910, 13261),
    ("pre", 7168): _row(255, 180, 308, 365, 768, 1023),
    ("post", 7168): _row(256, 252, 254, 258, 1044, 2306),
    ("fb", 7168): _row(1670, 1450, 3172, 2477, 12873, 9967),
    ("post_pre", 4096): Target(230, 190, {}),
    ("post_pre_fb", 4096): Target(850, 650, {}),
    ("single_pass", 4096): Target(205, 180, {}),
    ("single_pass_fb", 4096): Target(790, 600, {}),
    ("npu_pre", 4096): _row(150, 100, 200, 223, None, 563, 2088),
    ("npu_fb", 4096): _row(560, 400, 882, 1677, None, 1584, 6908),
}
"""Targets by row and D.

``pre``: coefficients, 20 Sinkhorn iterations, collapse. ``post``: expand and mix. ``fb``: forward and all gradients of
both. ``post_pre``: post of one sublayer with the pre of the next; no other implementation is known. ``single_pass``:
everything between two sublayers of DeepSeek-V4.1; no other implementation for this GPU is known.
``npu_*``: with gamma and raw h_res, as the operator ``npu_mhc_pre``. ``*_fb``: forward and all gradients.
"""

DECODE_PEERS = "one boundary by their authors: sglang #38475 12.4 us (40 tokens, sm_120), mirage #677 15.7 us"

# Bar of ||a - b|| / ||b|| against fp64 for gradients and fp32 intermediates (bf16 x, fp32 phi, "highest").
RELATIVE_BAR = 2e-5
# Outputs are allowed the error norm of one correct rounding to their dtype, times this factor.
ROUNDING_MARGIN = 1.05
# Bars of the largest absolute error at the shape (2, 64, 4, 128).
RECORD_SHAPE = (2, 64, 4, 128)
RECORD_BARS = {"dphi": 8e-6, "dalpha": 1.2e-4, "dbias": 4e-6, "dgamma": 6.9e-5}

# Passes over one stream's elements (tokens * D * element size): the forward of pre reads n and writes 1.
_UNITS = {
    "pre": lambda n: n + 1,
    "post": lambda n: 2 * n + 1,
    # The backward of post reads g, x, f and writes dx, df; that of pre reads x, dh_in, dx of post and writes dx.
    "fb": lambda n: (n + 1) + (2 * n + 1) + (3 * n + 2) + (3 * n + 1),
    # Reads x, f and writes x_out, h_in; its backward reads dx_out, dh_in, x, f, x_out and writes dx, df.
    "post_pre": lambda n: 2 * n + 2,
    "post_pre_fb": lambda n: (2 * n + 2) + (4 * n + 3),
    # As post_pre; its backward makes x_out again.
    "single_pass": lambda n: 2 * n + 2,
    "single_pass_fb": lambda n: (2 * n + 2) + (3 * n + 3),
    "npu_pre": lambda n: n + 1,
    "npu_fb": lambda n: (n + 1) + (2 * n + 1),
}


def floor_bytes(what: str, tokens: int, dim: int, phi: bool = False) -> int:
    """Returns the fewest bytes through device memory. ``phi=True`` adds fp32 phi, which dominates at a few tokens."""
    total = _UNITS[what](N) * tokens * dim * 2
    return total + (N * N + 2 * N) * N * dim * 4 if phi and what != "post" else total


def floor_us(what: str, tokens: int, dim: int, phi: bool = False) -> float:
    """Returns the time of ``floor_bytes`` at 4.3 TB/s, in microseconds."""
    return floor_bytes(what, tokens, dim, phi) / FLOOR_BYTES_PER_US
