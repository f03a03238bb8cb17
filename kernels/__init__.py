# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and their launch plans, one package per operator, and what runs on a CPU in their place."""

from mhc_inductor.compat import COMPILED as COMPILED
