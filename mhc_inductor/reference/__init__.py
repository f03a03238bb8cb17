"""Reference implementations of the ops in plain PyTorch."""
