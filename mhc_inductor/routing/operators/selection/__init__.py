"""Routing of attention under masks of selected keys to the ``selection_attention`` op."""
