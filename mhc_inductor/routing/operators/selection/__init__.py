"""Attention under a mask of selected keys."""
