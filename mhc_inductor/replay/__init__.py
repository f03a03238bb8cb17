# SPDX-License-Identifier: Apache-2.0
"""Records the keys that indexers choose, and replays given ones: contexts, their store, ops, and the pass over graphs."""
