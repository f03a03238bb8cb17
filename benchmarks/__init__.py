# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ``python -m benchmarks mhc`` measures; ``python -m benchmarks table FILE.json`` prints a stored run."""
