# SPDX-License-Identifier: Apache-2.0
"""Inductor lowerings, one module per operator.

Imported when a graph is compiled, never by ``import mhc_inductor``.
"""
