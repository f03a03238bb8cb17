# SPDX-License-Identifier: Apache-2.0
"""Imports the package before anything imports DTensor, as a user's script does: the ops become known to DTensor later."""

import mhc_inductor  # noqa: F401
