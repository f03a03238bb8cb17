# SPDX-License-Identifier: Apache-2.0
"""Random inputs of every op and public function, against fp64; bad ones against the op's fake function and by name.

``python -m tests.properties`` draws 2,000 cases of each and writes the counts to ``benchmarks/results/properties.json``.
What the public functions do beyond the op of their name is in ``tests/properties_public.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pathlib
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import hypothesis
import torch
import typer
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn
from torch.export import ExportedProgram

import mhc_inductor
from benchmarks import running
from benchmarks.source_hash import ROOT, source_hash
from mhc_inductor.ops.registry import argument_names

sys.path.insert(0, str(ROOT / "tests"))  # the helpers import each other by name, as under pytest

import test_nn_selection

from tests.oracles import e79 as helpers_e79
from tests.oracles import index as helpers_index
from tests.oracles import index_loss
from tests.oracles import lists as helpers_lists
from tests.oracles import masks as helpers_masks
from tests.oracles import mhc as helpers_mhc
from tests.oracles import selection as helpers_selection
from tests.oracles import single_pass as helpers_single_pass
from tests.oracles.op_contract import op, strided

RESULT = ROOT / "benchmarks" / "results" / "properties.json"
FOLDERS = ("kernels/cpu", "mhc_inductor/ops", "mhc_inductor/reference")
"""What the ops compute with on a CPU."""
PUBLIC_FOLDERS = (*FOLDERS, "mhc_inductor/api", "mhc_inductor/nn")
"""What the public functions and modules do."""
Named = Mapping[str, Any]

Strategies = dict[str, st.SearchStrategy[Any]]
DTYPE = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
LEAD = st.lists(st.integers(0, 3), max_size=3).map(tuple)
SEED = st.integers(0, 2**20)


def drawn(**kinds: Any) -> Strategies:
    """Returns strategies: integers of a range (least, most), one of a sequence of other values, bools, or what is given."""

    def of(kind: Any) -> st.SearchStrategy[Any]:
        if kind is bool:
            return st.booleans()
        if isinstance(kind, tuple) and len(kind) == 2 and all(type(k) is int for k in kind):
            return st.integers(*kind)
        return kind if isinstance(kind, st.SearchStrategy) else st.sampled_from(kind)

    return {name: of(kind) for name, kind in kinds.items()}


MHC = drawn(lead=LEAD, n=(2, 8), width=(16, 40), dtype=DTYPE)
ITERATIONS = drawn(sinkhorn_iters=(0, 4), sinkhorn_form=["softmax", "exp", "exp_eps"])


def laid_out(t: Any, rng: random.Random) -> Any:
    """Returns the same values with other strides: contiguous, transposed, or each second element of a larger tensor."""
    kind = rng.choice(["as it is", "transposed", "every second"])
    if not isinstance(t, Tensor) or t.dim() == 0 or kind == "as it is":
        return t
    if kind == "transposed":
        return strided(t)
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    return wide[..., ::2]


def any_strides(made: Named, seed: int) -> dict[str, Any]:
    """Returns inputs with strides drawn by a seed."""
    rng = random.Random(seed)
    return {name: laid_out(t, rng) for name, t in made.items()}


def close(got: Named, want: Named, dtype: torch.dtype) -> None:
    """Asserts that results have no NaN that fp64 has not, and are close to it by what their dtype can hold.

    Gradients, states and logarithms of sums may cancel, so that they are held to the size of what they sum only; the layers'
    outputs are sums of products, too, of a hundredth and more.
    """
    assert got.keys() <= want.keys(), f"{sorted(got)}, of which fp64 has {sorted(want)}"
    for name in got:
        a, b = got[name].detach().double(), want[name].detach().double()
        assert a.shape == b.shape, name
        odd = ~b.isfinite()
        assert torch.equal(~a.isfinite(), odd) and torch.equal(a[odd].nan_to_num(0.5), b[odd].nan_to_num(0.5)), name
        error, size = float((a - b)[~odd].norm()), float(b[~odd].norm())
        eps = torch.finfo(torch.promote_types(dtype, got[name].dtype) if dtype.itemsize > 2 else dtype).eps
        slack = 1.0 if name[0] in "dSM" or name == "lse" else 1e-2
        bound = (200 if name[0] == "d" else 60) * eps * (size + slack)
        assert error <= bound, f"{name}: {error:.3g} above {bound:.3g}"


def with_gradients(
    run: Callable[[Any], Named], oracle: Callable[[Any, Named], Named], outputs: Sequence[str], dtype: torch.dtype
) -> None:
    """Compares an op's results and gradients, of normal ones for ``outputs``, with fp64 for the same rounded results."""
    plain = run(None)
    up = helpers_mhc.upstream({name: plain[name] for name in outputs})
    got = run(up)
    close(got, oracle(up, got), dtype)


def layer(name: str, seed: int, transpose_res: bool = True, options: Sequence[str] = (), **sizes: Any) -> Sequence[Any]:
    """Checks an op of mHC; ``options`` are those of ``sizes`` that the op takes."""
    make, run, oracle, outputs = helpers_single_pass.FORMULAS[name]
    given = {k: sizes.pop(k) for k in options}
    if "sinkhorn_iters" in given:  # without a residual matrix there is nothing to balance
        given["sinkhorn_iters"] *= sizes["full"]
    made = any_strides(make(**sizes, seed=seed), seed)
    with_gradients(
        lambda up: run(made, transpose_res, up, given),
        lambda up, got: oracle(made, transpose_res, got.get("x_out"), up, given),
        outputs,
        sizes["dtype"],
    )
    known = {**made, **helpers_mhc.PRE_OPTIONS, **given, "transpose_res": transpose_res}
    return [known[a] for a in argument_names(f"mhc_{name}") if a in known]


def sinkhorn(seed: int, lead: tuple[int, ...], n: int, dtype: torch.dtype, iters: int, form: str) -> Sequence[Any]:
    g = torch.Generator().manual_seed(seed)
    h_res = laid_out(torch.randn(*lead, n, n, generator=g, dtype=torch.float64).to(dtype), random.Random(seed))
    up = torch.randn(*lead, n, n, generator=g, dtype=torch.float64).to(dtype)
    args = (h_res, iters, 1e-6, form)
    out = op("mhc_sinkhorn")(*args)
    got = {"out": out, "dh_res": op("mhc_sinkhorn_backward")(up.to(out.dtype), *args)}
    want = helpers_mhc.oracle_sinkhorn(*args, up)
    close(got, dict(zip(got, want.values(), strict=True)), dtype)
    return args


def scan(seed: int, segment: int, **sizes: Any) -> Sequence[Any]:
    made = any_strides(helpers_e79.make_inputs(**sizes, seed=seed), seed)
    up = helpers_e79.upstream(made)
    # A state of few elements is a sum over steps whose terms may nearly cancel, which leaves it few digits.
    tolerance = 2e-5 if sizes["n"] > 3 else 2e-4
    helpers_e79.check(helpers_e79.run_scan(made, up, segment), made, up, tolerance)
    return [*made.values(), segment]


def in_documents(S: int, S_kv: int) -> dict[str, Any]:
    """Returns what makes of the queries and keys two packed sequences."""
    lengths = {"lengths": (S // 2, S - S // 2), "key_lengths": (S_kv // 3, S_kv - S_kv // 3)}
    return {"B": 1, **lengths, "segments": None}


def without_cancellation(lse: Tensor, want: Tensor, made: Named, scale: float) -> Tensor:
    """Returns lse with fp64's value wherever it is as close as a dot product can be whose terms nearly cancel."""
    q, k = (made[name].double().norm(dim=-1) for name in "qk")
    slack = 2 * torch.finfo(lse.dtype).eps * scale * float(q.max() * k.max()) if q.numel() and k.numel() else 0.0
    return torch.where((lse - want).abs() <= slack, want.to(lse.dtype), lse)


def attention(make: Callable[..., Any], seed: int, documents: bool = False, **sizes: Any) -> Sequence[Any]:
    """Checks attention over ranges, lists or a mask, of which ``make`` makes the inputs."""
    ranges = make is helpers_selection.make_inputs
    if documents:
        sizes |= in_documents(sizes["S"], sizes["S_kv"])
    if sizes.get("shared"):
        sizes["Dv"] = min(sizes["Dv"], sizes["Dk"])
    made = any_strides(make(**sizes, seed=seed), seed)
    name = "selection_attention" if ranges else helpers_lists.name_of(made)
    up = helpers_selection.upstream(made)
    got = helpers_mhc.run_op(name, made, up, {"scale": 0.3})
    exact = helpers_selection.oracle(made, up, scale=0.3)
    results = {"o": got["o"], "lse": without_cancellation(got["lse"], exact["lse"], made, 0.3)}
    (helpers_selection if ranges else helpers_lists).check(results, made, scale=0.3)
    close({k: t for k, t in got.items() if ranges or k[0] == "d"}, exact, sizes["dtype"])
    return helpers_selection.positional(made, 0.3) if ranges else helpers_lists.arguments(made, 0.3)


def _index(seed: int, kind: str, **sizes: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    rng = random.Random(seed)
    made = tuple(laid_out(t, rng) for t in helpers_index.make_inputs(**sizes, seed=seed))
    return made, helpers_index.visibility(kind, made[0], made[1], seed)


def scores(seed: int, kind: str, **sizes: Any) -> Sequence[Any]:
    made, visible = _index(seed, kind, **sizes)
    got = op("index_scores")(*made, 0.3, *visible)
    want = helpers_index.oracle(*made, 0.3, visible)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen, dscores = (
        helpers_index.seen(*made[:2], visible),
        torch.randn(got.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    )
    leaves = [t.double().requires_grad_() for t in made]
    grads = torch.autograd.grad((helpers_index.oracle(*leaves, 0.3, visible)[seen] * dscores[seen]).sum(), leaves)
    back = op("index_scores_backward")(dscores.to(got.dtype), *made, 0.3, *visible)
    close(*({f"d{i}": t for i, t in enumerate(of)} for of in (back, grads)), sizes["dtype"])
    slack = 2 * helpers_index.formula_error(*made, 0.3) + 1e-6
    assert bool((got.double() - want).nan_to_num(0.0).abs().le(slack + 1e-6 * want.abs().nan_to_num(0, 0, 0)).all())
    return (*made, 0.3, *visible)


def topk(seed: int, kind: str, topk: int, name: str = "index_topk", **sizes: Any) -> Sequence[Any]:
    made, visible = _index(seed, kind, **sizes)
    topk = min(topk, sizes["T"])
    found = op(name)(*made, topk, 0.3, *visible)
    got = found if isinstance(found, Tensor) else found[0]
    helpers_index.check_topk(got, made, topk, 0.3, visible)
    return (*made, topk, 0.3, *visible)


def loss(seed: int, **sizes: Any) -> Sequence[Any]:
    args = [laid_out(a, random.Random(seed)) for a in index_loss.make(**sizes, seed=seed)]
    leaves = [a.double().requires_grad_() if i < 3 else a for i, a in enumerate(args)]
    got, dscores = op("index_loss")(*args)
    up = torch.rand(got.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = index_loss.dense(*leaves)
    wants = torch.autograd.grad((want * up).sum(), leaves[:3])
    # Lists and k, without what only the attention's side reads.
    grads = op("index_loss_backward")(up.to(got.dtype), *args[:4], dscores, args[7])
    # The attention's weights are fp32 at most, also in fp64: an lse is.
    dtype = torch.float32 if sizes["with_lse"] and sizes["dtype"] is torch.float64 else sizes["dtype"]
    error = float((got.double() - want.detach()).abs().max()) if got.numel() else 0.0
    assert error <= (1e-10 if dtype is torch.float64 else 1e-5), error
    close(*({f"d{i}": t for i, t in enumerate(of)} for of in (grads, wants)), dtype)
    return args


def blocks(seed: int, S: int, more: int, N: int, dtype: torch.dtype) -> Sequence[Any]:
    q, k, *rest = helpers_selection.choice(S, S + more, N, dtype)
    rng = random.Random(seed)
    args = (laid_out(q, rng), laid_out(k, rng), *rest)
    got = op("selection_blocks")(*args)
    exact = [a.double() if isinstance(a, Tensor) else a for a in args]
    want, margin = test_nn_selection.chosen_blocks(*exact)
    for at, chosen in want.items() if margin > 1e-4 else ():
        named = [j for j in got[at].tolist() if j >= 0]
        assert len(named) == len(set(named)) and set(named) == chosen, at
    return args


_FORM = drawn(norm_form=["inside", "outside"], gamma=bool)
_SITE = drawn(transpose_res=bool, residual=bool)
INTEGERS = st.sampled_from([torch.int32, torch.int64])
_KEYS = drawn(
    documents=bool, dtype=DTYPE, B=(0, 2), S=(0, 9), S_kv=(1, 17), G=(1, 2), h=(1, 3), Dk=(1, 9), Dv=(1, 9)
) | drawn(sink=bool, strided=bool)  # fmt: skip
_LISTS = _KEYS | drawn(
    kind=["random", "sorted", "odd", "empty", "all", "none"], n=(0, 9), shared=bool, segments=bool, index_dtype=INTEGERS
)
_OF_LISTS = functools.partial(attention, helpers_lists.make_inputs)
_INDEX = drawn(kind=helpers_index.KINDS, B=(0, 2), S=(0, 6), T=(1, 19), H=(1, 4), D=(1, 9), dtype=DTYPE, whole=bool)


def _layer(name: str, *options: str, **more: Any) -> tuple[Callable[..., Sequence[Any]], Strategies]:
    return functools.partial(layer, name, options=options), MHC | drawn(**more)


PROPERTIES: dict[str, tuple[Callable[..., Sequence[Any]], Strategies]] = {
    "mhc_pre": _layer("pre", "norm_form", *ITERATIONS, **_FORM, **ITERATIONS, full=bool),
    "mhc_head": _layer("head", "norm_form", **_FORM),
    "mhc_post": _layer("post", **_SITE),
    **{f"mhc_{name}": _layer(name, **_SITE) for name in ("post_pre", "post_head", "single_pass")},
    **{f"mhc_{name}": _layer(name) for name in ("coefficients", "collapse")},
    "mhc_sinkhorn": (sinkhorn, drawn(lead=LEAD, n=(2, 8), dtype=DTYPE, iters=(1, 4), form=ITERATIONS["sinkhorn_form"])),
    "e79_scan": (
        scan,
        drawn(T=(1, 12), B=(0, 2), n=(1, 9), dtype=DTYPE, bias=["none", "fixed", "input"], state=bool, segment=(1, 9)),
    ),
    "selection_attention": (
        functools.partial(attention, helpers_selection.make_inputs),
        _KEYS
        | drawn(kind=["corr", "rand", "odd", "token", "twice", "empty", "all", "none"], r=(0, 4))
        | drawn(range_dtype=INTEGERS, segments=[None, "mixed", "documents"]),
    ),
    "selection_list_attention": (_OF_LISTS, _LISTS),
    "selection_entry_attention": (
        _OF_LISTS,
        _LISTS | drawn(documents=[False], segments=[False], bias=["normal", "rows"], repeats=bool),
    ),
    "selection_mask_attention": (
        functools.partial(attention, helpers_masks.make_inputs),
        {k: v for k, v in _KEYS.items() if k != "documents"}
        | drawn(kind=helpers_masks.KINDS, shared=bool, shared_mask=["", "B", "G", "BG", "S", "BGS"]),
    ),
    "index_scores": (scores, _INDEX),
    "index_topk": (topk, _INDEX | drawn(topk=(0, 21))),
    "index_topk_scores": (topk, _INDEX | drawn(topk=(0, 21), name=["index_topk_scores"])),
    "index_loss": (
        loss,
        {k: v for k, v in _INDEX.items() if k not in ("kind", "whole")}
        | drawn(S=(1, 6), G=(1, 2), heads=(1, 3), Dk=(1, 9), n=(1, 11), with_lse=bool),
    ),
    "selection_blocks": (blocks, drawn(S=(0, 9), more=(0, 30), N=(0, 9), dtype=DTYPE)),
}
"""Of each op what checks a case and returns the op's arguments, and what is drawn for it."""


# ---- bad arguments


def spoiled(args: Sequence[Any], rng: random.Random) -> list[Any]:
    """Returns the arguments with one tensor of another rank, size or dtype."""
    args = list(args)
    at = rng.choice([i for i, a in enumerate(args) if isinstance(a, Tensor)])
    t, kind = args[at], rng.choice(["a dim less", "a dim more", "longer", "dtype"])
    if kind == "a dim less" and t.dim():
        args[at] = t.sum(-1)
    elif kind == "longer" and t.dim():
        d = rng.randrange(t.dim())
        args[at] = torch.cat([t, t.narrow(d, 0, min(1, t.shape[d]))], d) if t.shape[d] else t.new_zeros(3)
    elif kind == "dtype":
        args[at] = t.to(torch.complex64) if t.is_floating_point() else t.to(torch.float32)
    else:
        args[at] = t[None]
    return args


def outcome(name: str, args: Sequence[Any]) -> Any:
    """Returns the shapes of an op's results, or the error that its boundary raises. Any other error comes through."""
    try:
        out = op(name)(*args)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return [tuple(t.shape) for t in ((out,) if isinstance(out, Tensor) else out)]


def alike_when_spoiled(name: str, args: Sequence[Any], seed: int) -> str:
    """Asserts that op and fake function take or refuse the same arguments, in the same words; returns what came."""
    bad = spoiled(args, random.Random(seed))
    real, fake = outcome(name, bad), outcome(name, [a.to("meta") if isinstance(a, Tensor) else a for a in bad])
    assert real == fake, f"{name}: {real} of the op, {fake} of its fake function"
    return "refused" if isinstance(real, str) else "taken"


@dataclasses.dataclass
class Call:
    """A call of a public function that works.

    ``untyped``: tensors of other dtypes reach torch's own functions. ``inner``: what the function that is called inside
    calls an argument.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    untyped: bool = False
    inner: Sequence[str] = ()


def by_name(name: str, args: Sequence[Any]) -> Call | None:
    """Asserts that the public function of an op's name, if there is one, gives its bits for its arguments by name."""
    function = getattr(mhc_inductor, name, None)
    if function is None:
        return None
    schema = getattr(torch.ops.mhc_inductor, name).default._schema.arguments
    taken = inspect.signature(function).parameters
    arguments = {a.name: value for a, value in zip(schema, args, strict=False) if a.name in taken}
    if "reduction" in taken:  # the op leaves that to the function
        arguments["reduction"] = "none"
    got, want = function(**arguments), op(name)(*args)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=False):
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num()), name
    return Call(function, arguments)


WRONG: Mapping[type, Sequence[Any]] = {
    bool: ("yes", None, 3),
    int: ("two", 1.5, -7, True),
    float: ("two", float("nan"), float("inf")),
    str: ("another", 3),
    list: ("text", 3, [3]),
    nn.Module: ("text", 3, None),
    ExportedProgram: ("text", 3, None),
}
"""Values in place of an argument of a type. Some may be right: what counts is how the others are refused."""


def refused_by_name(call: Call, seed: int) -> str:
    """Asserts that a wrong argument is refused with TypeError or ValueError that names it; returns what came."""
    rng = random.Random(seed)
    name = rng.choice([k for k, v in call.arguments.items() if isinstance(v, (Tensor, *WRONG))])
    value = call.arguments[name]
    if not isinstance(value, Tensor):
        named, wrong = {name}, rng.choice(next(w for kind, w in WRONG.items() if isinstance(value, kind)))
    elif rng.random() < 0.2:
        named, wrong = {name}, rng.choice(["text", 3, [value]])
    else:  # either of two that do not fit each other may be named
        named, (wrong,) = {*call.arguments, *call.inner}, spoiled([value], rng)
        if call.untyped and wrong.dtype is not value.dtype:
            return "taken"
    try:
        call.function(**{**call.arguments, name: wrong})
    except (TypeError, ValueError) as error:
        words = {*re.findall(r"\w+", str(error))}
        assert words & named, f"{name} = {wrong!r}: {type(error).__name__}: {error}"
        return "refused"
    return "taken"


# ---- runs


@dataclasses.dataclass
class Count:
    """What was drawn of one op or public function: cases, and what became of those with a wrong argument."""

    cases: int = 0
    spoiled: Counter[str] = dataclasses.field(default_factory=Counter)
    public: Counter[str] = dataclasses.field(default_factory=Counter)


Property = tuple[Callable[..., Any], Strategies]


def run(
    name: str,
    cases: int,
    derandomize: bool = False,
    properties: Mapping[str, Property] = PROPERTIES,
    smallest: bool = True,
) -> Count:
    """Draws cases of one op or, with the properties of ``tests/properties_public.py``, of a public function.

    Raises what a case fails with: the smallest that does, or any.
    """
    check, strategies = properties[name]
    count = Count()

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=derandomize,
        report_multiple_bugs=False,
        phases=[p for p in hypothesis.Phase if smallest or p is hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(st.fixed_dictionaries({**strategies, "seed": SEED}))
    def drawn(case: dict[str, Any]) -> None:
        found = check(**case)
        count.cases += 1
        if properties is PROPERTIES:
            count.spoiled[alike_when_spoiled(name, found, case["seed"])] += 1
            found = by_name(name, found)
        if found is not None:
            count.public[refused_by_name(found, case["seed"])] += 1

    drawn()
    return count


def main(
    cases: Annotated[int, typer.Option(help="Cases of each.")] = 2000,
    only: Annotated[str, typer.Option(help="Ops and public functions, by comma; all if left out.")] = "",
    out: Annotated[pathlib.Path, typer.Option(help="Where the counts go.")] = RESULT,
) -> None:
    """Check random inputs of every op and public function; exit with an error at the first that fails."""
    from tests import properties_public

    torch.set_num_threads(1)
    wanted = {*filter(None, only.split(","))}
    counts: dict[str, Any] = {"ops": {}, "public": {}}
    for kind, properties in (("ops", PROPERTIES), ("public", properties_public.PROPERTIES)):
        for name in [n for n in properties if not wanted or n in wanted]:
            start = time.perf_counter()
            count = run(name, cases, properties=properties)
            by_hand = {f"public, {k}": v for k, v in count.public.items()}
            counts[kind][name] = {"cases": count.cases, **count.spoiled, **by_hand}
            Console().print(f"{name}: {counts[kind][name]}, {time.perf_counter() - start:.0f} s")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "hypothesis": hypothesis.__version__}
    hashes = {"sources_sha256": source_hash(folders=FOLDERS), "public_sha256": source_hash(folders=PUBLIC_FOLDERS)}
    running.save({**hashes, "versions": versions, **counts}, out)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests import properties

    typer.run(properties.main)  # not this module's: tests/properties_public.py is made of that one's properties
