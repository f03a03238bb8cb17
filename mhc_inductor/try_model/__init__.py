# SPDX-License-Identifier: Apache-2.0
"""``python -m mhc_inductor try``: one model, small, eager, with torch.compile and with this package."""

INSTALL = "pip install 'mhc_inductor[try]', or in a checkout: pip install '.[try]'"
"""How to install what the command needs beyond torch."""
