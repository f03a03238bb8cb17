"""Triton kernels of selection attention (the selected branch of native sparse attention)."""
