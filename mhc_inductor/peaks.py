# SPDX-License-Identifier: Apache-2.0
"""Peaks of the device that estimates are for: one H200."""

MEMORY = 4.8e12
"""Bytes a second of its memory, by its data sheet: a bound, not a measurement."""
PRODUCT_FLOPS = 600e12
"""Operations a second of a large bf16 product, measured."""
