"""Triton kernels and their launch plans, one folder an operator."""
