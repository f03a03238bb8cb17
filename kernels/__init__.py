# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their launch plans, one package per operator."""

COMPILED = {"enable_fp_fusion": True}
"""Options of every compilation of a kernel: Triton 3.10 fuses products and sums only if asked, which changes bits."""
