# SPDX-License-Identifier: Apache-2.0
"""Index top-k: the lightning indexer of sparse attention as an operator of the routing pass."""
