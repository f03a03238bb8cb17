# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of selection attention (the selected branch of native sparse attention)."""
