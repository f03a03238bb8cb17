# SPDX-License-Identifier: Apache-2.0
"""The public functions that call the ops."""
