# SPDX-License-Identifier: Apache-2.0
"""Masks in normal form, and the operands and layouts of products: what several operators read. It knows none of them."""
