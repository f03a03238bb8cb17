"""Triton kernels and their launch plans, one package per operator."""
