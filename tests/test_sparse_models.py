# SPDX-License-Identifier: Apache-2.0
"""Unmodified sparse models of transformers: what is routed in each mode, and whether values and gradients stay.

The suite takes every mode of every family; each commit those of ``sparse_families.EACH_COMMIT``.
``python -m tests.sparse_models`` prints the whole table, with the reasons for what is not routed.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from mhc_inductor import compat
from mhc_inductor.routing.operators.index.operator import IndexOperator
from mhc_inductor.routing.operators.selection.operator import SelectionOperator
from tests.formulas import sparse_families, sparse_runs
from tests.formulas.sparse_families import EACH_COMMIT, FAMILIES, LATENT
from tests.formulas.sparse_runs import MODES
from tests.tools import capture, each_commit

if not all(importlib.util.find_spec(f"transformers.models.{name}") for name in FAMILIES):
    pytest.skip("this transformers lacks some of the models", allow_module_level=True)

CASES = [
    pytest.param(family, attention, name, marks=[pytest.mark.every_case] * ((attention, name) in EACH_COMMIT[family]))
    for family, one in FAMILIES.items()
    for attention in one.implementations
    for name in sparse_families.modes(attention)
]
KINDS = ("training", "prefill", "decode", "padded", "packed", "checkpointed", "dynamic", "bf16")
GRAPHS = {"glm5_next": 13, "mistral_large4": 7}
"""Families whose forward breaks Dynamo's graph, and into how many parts at most.

GLM-5-Next keeps the pools that exist (``pool_keys[:, keep]``), whose number depends on data. Mistral-Large-4's
checkpointed layers write a dictionary of shared keys.
"""


def test_every_family_has_what_it_is_here_for():
    layers = {f: sparse_families.build(f).config.get_text_config() for f in FAMILIES}
    assert layers["deepseek_v4"].layer_types == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ]
    for family in ("glm_moe_dsa", "hy_v4", "glm5_next", "mistral_large4"):
        assert "shared" in layers[family].indexer_types, family
    for family, config in layers.items():
        topk = getattr(config, "index_topk", None) or config.index_topk_blocks * config.index_block_size
        assert topk < sparse_runs.LENGTH, f"{family}: every key would be chosen"


@pytest.mark.every_case
def test_each_commit_has_every_family_and_every_kind_of_mode():
    taken = {(family, *case) for family, cases in EACH_COMMIT.items() for case in cases}
    assert taken <= {case.values for case in CASES}, "each is a case"
    assert all(EACH_COMMIT[family] for family in FAMILIES) and set(EACH_COMMIT) == set(FAMILIES)
    kinds = {attention for _, attention, _ in taken}
    kinds |= {kind for _, _, name in taken for kind in KINDS if kind in name}
    assert kinds == {"eager", "sdpa", *KINDS}
    test = f"tests/test_sparse_models.py::{test_routed_of_all_and_the_same_results.__name__}"
    ids = {f"{test}[{'-'.join(case)}]" for case in taken}
    assert ids <= each_commit.selected("tests/test_sparse_models.py"), "each is run"


def test_the_suite_has_every_mode_of_every_family():
    every = [(f, a, m) for f, one in FAMILIES.items() for a in one.implementations for m in sparse_families.modes(a)]
    assert [case.values for case in CASES] == every and len(every) == each_commit.FAMILY_CASES


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_packing_reach_the_model(family):
    """Shows that the inputs of a mode change the result, so that a mask that is ignored cannot pass."""
    model = sparse_runs.prepare(family, MODES["prefill"], "eager")
    plain, left, packed = (
        sparse_runs.evaluate(model, model, MODES[name]).outputs[0]
        for name in ("prefill, no cache", "prefill, left padded", "prefill, packed")
    )
    length, pads = sparse_runs.LENGTH, sparse_runs.LENGTH - 7
    assert (left[:pads] - plain[length - pads : length]).abs().max() > 1e-3
    # GLM-5-Next has no positions and reads no position ids: to it, packed sequences are one.
    assert ((plain - packed).abs().max() > 1e-3) == (family != "glm5_next")


def _not_worse(got: capture.Captured, want: capture.Captured, exact: capture.Captured) -> None:
    """Asserts that bf16 logits are as near to fp32 as the eager model's.

    A rounding can change which keys or experts a token of a later layer reads. Few tokens differ that way: the median
    over tokens is compared strictly, the whole loosely.
    """
    ours, eager = ((of.outputs[0].float() - exact.outputs[0]).norm(dim=-1) for of in (got, want))
    size = exact.outputs[0].norm(dim=-1)
    assert (ours / size).median() <= 1.5 * (eager / size).median() + 0.01
    assert ours.norm() <= 2 * eager.norm() + 0.1 * size.norm()


def _scores_of_all_heads(graphs: list[torch.fx.GraphModule], family: str) -> list[torch.fx.Node]:
    """Returns the nodes with an element for each head of an indexer, query and key; some families pool their keys."""
    heads, keys = LATENT["index_n_heads"], sparse_runs.LENGTH // {"deepseek_v4": 2, "glm5_next": 4}.get(family, 1)
    found = []
    for node in (node for gm in graphs for node in gm.graph.nodes):
        shape = [s for s in getattr(node.meta.get("example_value"), "shape", ()) if isinstance(s, int)]
        found += [node] * (len(shape) == 4 and heads in shape[1:3] and shape[-1] == keys)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "attention", "name"), CASES)
def test_routed_of_all_and_the_same_results(family, attention, name):
    mode, one = MODES[name], FAMILIES[family]
    model = sparse_runs.prepare(family, mode, attention)
    want = sparse_runs.evaluate(model, model, mode)
    got, found = sparse_runs.routed(model, mode, check=capture.VERIFY)
    assert not found.report.problems
    if mode.dtype == torch.bfloat16:
        _not_worse(got, want, sparse_runs.evaluate(model.float(), model, mode))
    else:
        apart = capture.difference(got, want)
        assert apart <= sparse_runs.bound(mode), f"{apart:.3g} from eager"
    assert all(t.isfinite().all() for t in capture.named_tensors(got).values())
    indexers, attentions = sparse_families.expected(family, attention, name)
    text = (
        f"{found.indexers}/{one.indexers} indexers, {found.attentions}/{one.attentions} attentions: {found.reasons()}"
    )
    if mode.decode:  # Dynamo compiles again as the cache grows
        assert (found.indexers > 0, found.attentions > 0) == (indexers > 0, attentions > 0), text
    else:
        assert (found.indexers, found.attentions) == (indexers, attentions), text
    if name.startswith("prefill") and indexers == one.indexers > 0:
        assert not _scores_of_all_heads(found.graphs, family), "an indexer's products are still in the graph"
    assert len(found.graphs) <= GRAPHS.get(family, 1) * (sparse_runs.STEPS if mode.decode else 1), found.breaks


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_indexers_that_are_prefixes_become_limits(family, padded):
    """DeepSeek-V4's mask counts compressed keys, whatever is padded."""
    mode = MODES["prefill, left padded" if padded else "prefill, no cache"]
    _, found = sparse_runs.routed(sparse_runs.prepare(family, mode, "eager"), mode)
    details = [r.detail for r in found.report.routed if r.op == "index_topk"]
    assert len(details) == FAMILIES[family].indexers and not found.report.problems
    assert not [m for m in found.report.near_misses if m.op == "index_topk"]
    assert {"first keys of each query" in detail for detail in details} == {family == "deepseek_v4" or not padded}


@pytest.mark.parametrize("family", [family for family, one in FAMILIES.items() if one.indexers])
def test_indexers_under_autocast(family):
    mode = MODES["prefill, no cache"]
    model = sparse_runs.prepare(family, mode, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        want = sparse_runs.evaluate(model, model, mode)
        got, found = sparse_runs.routed(model, mode)
    assert found.indexers == FAMILIES[family].indexers and not found.report.problems
    _not_worse(got, want, sparse_runs.evaluate(model, model, mode))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ops"), [("training", False), ("prefill, left padded", False), ("training", True)])
def test_generated_code_gives_the_same_results(name, ops, monkeypatch):
    """Runs what a CPU runs, which at this size keeps the formulas, and what it would run if it did not."""
    model = sparse_runs.prepare("deepseek_v32", MODES[name], "sdpa")
    want = sparse_runs.evaluate(model, model, MODES[name])
    if ops:
        for operator in (SelectionOperator, IndexOperator):
            monkeypatch.setattr(operator, "faster_as_written", lambda *_: False)
    compat.counters().clear()
    got, codes = run_and_get_code(sparse_runs.compiled, model, MODES[name])
    assert capture.difference(got, want) <= sparse_runs.bound(MODES[name])
    assert compat.counters()["routed index_topk"] == compat.counters()["routed selection_attention"] == 2
    # Inductor fuses the formula of the attention: only the choice is a call.
    assert ("mhc_inductor.index_topk" in "".join(codes)) is ops
