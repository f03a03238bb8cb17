# SPDX-License-Identifier: Apache-2.0
"""Copies of graph modules."""

from __future__ import annotations

import copy

from torch import fx

from mhc_inductor import compat


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of ``gm`` and of the bodies of its higher-order ops; names, tensors and modules are the same."""
    graph = copy.deepcopy(gm.graph)
    compat.give_names(zip(graph.nodes, (node.name for node in gm.graph.nodes), strict=True))
    result = fx.GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    for node in result.graph.find_nodes(op="get_attr"):
        body = getattr(gm, node.target, None)
        if isinstance(body, fx.GraphModule):
            setattr(result, node.target, copied(body))
    return result
