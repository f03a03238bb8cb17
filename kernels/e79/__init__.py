"""Triton kernels of the E79 scan."""
