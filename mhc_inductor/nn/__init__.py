"""Modules on the ops: mHC residuals (:class:`HyperConnection`, :class:`HyperHead`), E79 (:class:`E79Layer`)."""

from mhc_inductor.nn.e79 import E79Cell, E79Layer, E79State
from mhc_inductor.nn.mhc import CONVENTIONS, HyperConnection, HyperHead, expand

__all__ = ["CONVENTIONS", "E79Cell", "E79Layer", "E79State", "HyperConnection", "HyperHead", "expand"]
