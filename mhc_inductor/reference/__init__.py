# SPDX-License-Identifier: Apache-2.0
"""Reference implementations of the ops in plain PyTorch."""
