# SPDX-License-Identifier: Apache-2.0
"""Entry points in terms of other libraries, which are imported by the functions that need them."""
