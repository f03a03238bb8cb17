# SPDX-License-Identifier: Apache-2.0
"""Arguments, parameters, buffers and constants of exported programs keep names that FX gives to no node of its own."""

from __future__ import annotations

import builtins
import keyword
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_export import Iterations, Site, randn, through_a_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import graph as fx_graph

from mhc_inductor import explain, route_exported
from tests.tools.capture import ops_of

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("one_thread")]

BUILTINS = [n for n in dir(builtins) if n.isidentifier() and not keyword.iskeyword(n) and not n.startswith("__")]
CUSTOM = [n for n in fx_graph._custom_builtins if n not in ("torch", "device", "pytree", "fx_pytree")]
"""What FX imports into the code of each graph. torch itself cannot run a program with an argument called as one of the
four that are left out."""
NUMBERED = [
    "x_1",
    "x",
    "input_1",
    "id_7",
    "add",
    "add_1",
    "mul",
    "linear_1",
    "mhc_pre",
    "mhc_post",
    "getitem",
    "c_lifted",
]
REPORTED = ("input", "id", "type", "max", "sum", "range", "hash", "filter", "float", "list", "vars", "inf", "nan")
SETS = {
    "the report's": REPORTED,
    "builtins": BUILTINS[::4],
    "imported": CUSTOM,
    "numbered": NUMBERED,
    "numbered first": ["input_1", "input", "id_1", "id"],
}


def named(names: Sequence[str], keywords: bool, body: str = "result = self.site(streams)") -> nn.Module:
    """Returns a module with an mHC site whose other arguments, added with different weights, have ``names``."""
    total = " + ".join(f"{i + 2} * {name}" for i, name in enumerate(names))
    lines = [f"def forward(self, streams, {'*, ' * keywords}{', '.join(names)}):", *body.splitlines()]
    lines += [f"total = {total}", f"return result + total, {names[0]}, {names[-1]}"]
    space: dict[str, Any] = {"torch": torch}
    exec("\n    ".join(lines), space)

    class Named(nn.Module):
        forward = space["forward"]

        def __init__(self) -> None:
            super().__init__()
            self.site, self.inner = Site(), Iterations()

    return Named()


def given(
    names: Sequence[str], keywords: bool, shape: tuple[int, ...] = ()
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    values = [torch.full(shape, 1.0 + i * i) for i in range(len(names))]
    x = randn(2, 3, 4, 32)
    return ((x,), dict(zip(names, values, strict=True))) if keywords else ((x, *values), {})


def arguments(program: ExportedProgram) -> list[str]:
    specs = program.graph_signature.input_specs
    found = [node.name for node in program.graph.find_nodes(op="placeholder")]
    assert found == [spec.arg.name for spec in specs]
    return found


WAYS: dict[str, Callable[[ExportedProgram], nn.Module]] = {
    "module": lambda p: p.module(),
    "file": lambda p: through_a_file(p).module(),
    "unflatten": torch.export.unflatten,
    "file, unflatten": lambda p: torch.export.unflatten(through_a_file(p)),
    "decomposed": lambda p: p.run_decompositions().module(),
    "again": lambda p: route_exported(through_a_file(route_exported(p))).module(),
}


@pytest.mark.parametrize("keywords", [False, True], ids=["positions", "keywords"])
@pytest.mark.parametrize("which", SETS)
def test_arguments_keep_their_names(which: str, keywords: bool) -> None:
    """Compares names and values in each way to use a program, whose original torch takes in all of them."""
    names = SETS[which]
    model, (args, kwargs) = named(names, keywords), given(names, keywords)
    program = torch.export.export(model, args, kwargs)
    assert explain(program).routed
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(mhc_pre=1, mhc_post=1)
    assert arguments(routed) == arguments(program)
    want = model(*args, **kwargs)
    for way in WAYS.values():
        got = way(routed)(*args, **kwargs)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True))


IN_REGIONS = """with torch.no_grad():
    frozen = self.site(streams) + id
with torch.autocast("cpu", dtype=torch.bfloat16):
    mixed = self.site(streams) * input
{}.mul_(2)
result = frozen + mixed"""


def test_arguments_of_regions_and_of_writes() -> None:
    """Checks regions of other modes, which are split into graphs and put together again, and an input that is written."""
    names = ["input", "id", "x_1", "sum"]
    # torch itself cannot run a decomposed program that writes to an input called as a builtin is.
    for decomposed, written in ((False, "input"), (True, "x_1")):
        model, at = named(names, False, IN_REGIONS.format(written)), 1 + names.index(written)
        args, _ = given(names, False, (1,))
        program = torch.export.export(model, args)
        program = program.run_decompositions() if decomposed else program
        routed = route_exported(program)
        assert decomposed or ops_of(routed.graph_module).total() >= 2
        assert arguments(routed) == arguments(program)
        for one in (routed, through_a_file(routed)):
            (mine, _), (theirs, _) = given(names, False, (1,)), given(names, False, (1,))
            got, want = one.module()(*mine), program.module()(*theirs)
            assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(got, want, strict=True))
            assert float(mine[at]) == float(theirs[at]) == 2 * float(args[at])


class Held(nn.Module):
    """Parameters, buffers and constants under names of builtins, and a submodule whose signature is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.input = Site(), Iterations()
        self.register_parameter("id", nn.Parameter(torch.tensor(3.0)))
        self.register_buffer("max", torch.tensor(5.0))
        self.register_buffer("range", torch.tensor(7.0), persistent=False)
        self.hash = torch.tensor(11.0)

    def forward(self, input: Tensor, *list: Tensor, float: dict[str, Tensor], **vars: Tensor) -> tuple[Tensor, ...]:
        self.max.add_(1)
        held = self.id * self.max - self.range * self.hash + torch.tensor(0.5)
        return self.sum(input) + held + float["type"], self.input(list[0]), list[1] * vars["vars"], input


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_buffers_and_constants_keep_their_names(strict: bool) -> None:
    args, kwargs = (randn(2, 3, 4, 32), randn(2, 4, 4), randn(2)), {"float": {"type": randn(1)}, "vars": randn(2)}
    program = torch.export.export(Held(), args, kwargs, strict=strict, preserve_module_call_signature=("input",))
    routed = route_exported(program)
    assert ops_of(routed.graph_module) == Counter(mhc_pre=1, mhc_post=1, mhc_sinkhorn=1)
    assert arguments(routed) == arguments(program)
    want = None
    for one in (program, routed, through_a_file(routed)):
        program.state_dict["max"].fill_(5.0)
        for module in (one.module(), torch.export.unflatten(one)):
            got = module(*args, **kwargs)
            module.get_buffer("max").fill_(5.0)
            want = got if want is None else want
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_a_program_with_nothing_to_route() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (randn(2, 3),))
    routed = route_exported(program)
    assert not explain(program).routed
    assert arguments(routed) == arguments(program) and "input" in arguments(routed)
    assert torch.equal(routed.module()(randn(2, 3)), program.module()(randn(2, 3)))
