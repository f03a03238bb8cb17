# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the index ops: scores of keys, and the keys of the largest scores."""
