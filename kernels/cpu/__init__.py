# SPDX-License-Identifier: Apache-2.0
"""Implementations of ops on a CPU, and the formulas that Inductor compiles in their place there."""
