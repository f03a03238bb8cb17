# SPDX-License-Identifier: Apache-2.0
"""Compiles a model ahead of its traffic, in several processes at once, and puts its state back."""
