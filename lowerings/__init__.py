"""Inductor lowerings, one file an operator. Imported when a graph is compiled, never by ``import mhc_inductor``."""
