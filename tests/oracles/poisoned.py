# SPDX-License-Identifier: Apache-2.0
"""A builder of launch plans whose fresh memory is poisoned: what a kernel forgets to write shows in the results."""

from __future__ import annotations

from mhc_inductor.kernels.launch import EagerBuilder


class Poisoned(EagerBuilder):
    """Fills every output and workspace first: floats with NaN, integers with ``integers``.

    ``names`` lists the kernels that it has launched.
    """

    def __init__(self, *args, integers=-7):
        super().__init__(*args)
        self.integers = integers
        self.names = []

    def empty(self, shape, dtype):
        return super().empty(shape, dtype).fill_(float("nan") if dtype.is_floating_point else self.integers)

    def launch(self, kernel, *args):
        self.names.append(getattr(kernel, "fn", kernel).__name__)
        super().launch(kernel, *args)
