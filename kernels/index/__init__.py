# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the index ops: scores of keys, the keys of the largest scores, and the loss of an index."""
