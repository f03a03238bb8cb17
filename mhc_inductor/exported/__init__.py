# SPDX-License-Identifier: Apache-2.0
"""Routing of exported programs (torch.export): the pass of ``torch.compile`` on a program's graph.

An exported graph differs from Dynamo's in its form, not in its meaning. So it is brought into Dynamo's form
(:mod:`.inlining`, :mod:`.spelling`, :mod:`.examples`), routed, and brought back (:mod:`.lowering`, :mod:`.program`).
"""
