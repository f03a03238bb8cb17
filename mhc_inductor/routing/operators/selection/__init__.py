# SPDX-License-Identifier: Apache-2.0
"""Routing of attention under masks of selected keys to the ``selection_attention`` op."""
