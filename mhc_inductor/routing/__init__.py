"""Formulas of the operators found in plain PyTorch graphs, before autograd, and rewritten to the ops."""
