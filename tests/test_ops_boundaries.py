# SPDX-License-Identifier: Apache-2.0
"""Edge cases of every op and public function: wrong Python types, forward mode, shared memory, huge blocks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import mhc_inductor
from mhc_inductor.ops import registry
from tests.oracles.op_contract import op
from tests.oracles.samples import MADE, OP_SAMPLES, sample

N, D, T = 4, 16, 3


_ATTENTION = {"B": 1, "S": T, "S_kv": T, "G": 1, "Dk": D, "sink": True, "lengths": (T,), "key_lengths": (T,)}
_MHC = {"lead": (T,), "width": D, "iters": 2}
_BLOCKS = torch.zeros(1, T, 1, 2, dtype=torch.int64)
_CU = torch.tensor([0, T], dtype=torch.int32)
VALID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"mhc_{name}": (_MHC, {"norm_form": "outside"}) for name in ("pre", "head", "coefficients")},
    **{f"mhc_{name}": (_MHC, {}) for name in ("post", "collapse", "sinkhorn")},
    "e79_scan": ({"T": T, "B": 1, "n": N}, {}),
    "selection_attention": ({**_ATTENTION, "segments": "mixed"}, {"v_width": D, "return_lse": True}),
    **{f"index_{name}": ({"B": 1, "S": T, "T": T, "topk": 2, "kind": "everything"}, {}) for name in ("scores", "topk")},
    "index_loss": ({"B": 1, "S": T, "T": T, "n": 2, "with_lse": True}, {"reduction": "sum"}),
}
"""Of each public function of an op a variant of its samples, and what the op does not take."""


def _good() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Returns each public function with a valid value for every argument."""
    blocks = {"block_indices": _BLOCKS, "block_size": 2, "S_kv": T, "causal": True}
    found = {"blocks_to_ranges": {**blocks, "cu_seqlens_q": _CU, "cu_seqlens_k": _CU}}
    found |= {name: {**MADE[name](**variant), **more} for name, (variant, more) in VALID.items()}
    taken = {name: inspect.signature(getattr(mhc_inductor, name)).parameters for name in found}
    return {
        name: (getattr(mhc_inductor, name), {k: v for k, v in made.items() if k in taken[name]})
        for name, made in found.items()
    }


GOOD = _good()
# Arguments that another one excludes, and what is given with them.
ALONE = dict.fromkeys(("ranges", "cu_seqlens_q", "cu_seqlens_k", "segments_q", "segments_k"))
LISTED = {"ranges": None, "indices": torch.tensor([0, 2]).expand(1, T, 1, 2)}
BIASED = {**ALONE, **LISTED, "bias": torch.zeros(1, T, 1, 2), "repeats": True}
INSTEAD = {
    ("selection_attention", "indices"): LISTED,
    ("selection_attention", "mask"): {**ALONE, "mask": torch.ones(1, T, 1, T, dtype=torch.bool)},
    **{("selection_attention", name): BIASED for name in ("bias", "repeats")},
}
# Another kind of tensor that an argument may be.
EITHER = {("selection_attention", "mask", "another dtype")}


def _given(name: str, argument: str) -> dict[str, Any]:
    """Returns valid arguments of a public function, ``argument`` among them."""
    return {**GOOD[name][1], **INSTEAD.get((name, argument), {})}


# Their outputs are integers, so that tangents may be ignored.
INTEGERS = {"index_topk", "selection_blocks"}
# The loss's target, a constant by definition: detached, with its tangents.
TARGET = {("index_loss", name) for name in ("attention_q", "attention_k", "lse")}


def _bad(value: Any, optional: bool) -> dict[str, Any]:
    """Returns values of other kinds than ``value``."""
    wrong: dict[str, Any] = {} if optional else {"None": None}
    if isinstance(value, Tensor):
        other = torch.int64 if value.is_floating_point() else torch.float32
        wrong |= {
            "a list": value.tolist(),
            "an array": value.numpy(),
            "a float": 1.0,
            "a string": "x",
            "a tuple": (value,),
        }
        wrong |= {"another dtype": value.to(other), "complex": value.to(torch.complex64)}
        wrong |= {"bools": value > 0} if value.dtype is not torch.bool else {}
    elif isinstance(value, bool):
        wrong |= {"an int": 1, "a string": "yes", "a tensor": torch.tensor(True), "an array": np.bool_(True)}
    elif isinstance(value, str):
        wrong |= {"another": "x", "an int": 3, "a list": [value]}
    else:
        wrong |= {"a string": "1", "a list": [value], "a tensor": torch.tensor(value), "a bool": True, "complex": 1j}
        wrong |= {"a float": 1.5} if isinstance(value, int) else {"nan": float("nan")}
        wrong |= {"an array": np.array([value])}
    return wrong


def _cases() -> list[Any]:
    cases = []
    for name, (fn, given) in GOOD.items():
        defaults = {k: p.default for k, p in inspect.signature(fn).parameters.items()}
        instead = {argument for other, argument in INSTEAD if other == name}
        assert given.keys() | instead == defaults.keys(), "every argument is given"
        for argument in defaults:
            value = _given(name, argument)[argument]
            for kind, wrong in _bad(
                value, defaults[argument] is None or (argument == "h_res" and name == "mhc_post")
            ).items():
                if (name, argument, kind) in EITHER:
                    continue
                cases.append(pytest.param(name, argument, wrong, id=f"{name}-{argument}-{kind}"))
    return cases


def test_valid_arguments_are_accepted():
    for fn, given in GOOD.values():
        fn(**given)
    for name, argument in INSTEAD:
        GOOD[name][0](**_given(name, argument))
    # ops_to_save takes no arguments.
    of = {name: getattr(getattr(mhc_inductor, name), "__module__", "") for name in mhc_inductor.__all__}
    assert GOOD.keys() == {name for name in of if of[name].startswith("mhc_inductor.api.")} - {"ops_to_save"}


@pytest.mark.parametrize(("name", "argument", "wrong"), _cases())
def test_a_wrong_type_is_named(name, argument, wrong):
    fn, given = GOOD[name][0], _given(name, argument)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: {argument}\b") as refused:
        fn(**{**given, argument: wrong})
    words = {Tensor: "a tensor", bool: "a bool", int: "an int", float: "a number", str: "'x'"}
    kind = type(given[argument])
    if type(wrong) is not kind:
        if kind is not str:
            assert refused.type is TypeError
            assert f"{argument} must be {words[kind]}, got {type(wrong).__name__}" in str(refused.value)
    elif kind is str:
        assert str(refused.value).endswith("got 'x'")


# A list and a string are refused in one place: an argument has the one or the other.
KINDS = ({"None", "an array", "another dtype", "a list"}, {"None", "an array", "another dtype", "a string"})
COMPILED = [c for c in _cases() if c.id.rpartition("-")[2] in KINDS[len(c.values[1]) % 2]]


@pytest.mark.parametrize("name", GOOD)
def test_a_wrong_type_is_named_compiled(name):
    fn = GOOD[name][0]
    silent = []
    for case in (c.values for c in COMPILED if c.values[0] == name):
        _, argument, wrong = case
        torch._dynamo.reset()
        valid = _given(name, argument)
        compiled = torch.compile(lambda *, changed: fn(**{**valid, **changed}), backend="eager")  # noqa: B023
        try:
            compiled(changed={argument: wrong})
        except Exception as error:
            if f"{name}: {argument} must" not in str(error):
                silent.append((argument, repr(wrong)[:20], type(error).__name__, str(error)[:80]))
        else:
            silent.append((argument, repr(wrong)[:20], "nothing", ""))
    torch._dynamo.reset()
    assert silent == []


# --- forward mode -------------------------------------------------------------------------------------------


def _differentiable() -> list[Any]:
    return [
        pytest.param(name, argument, id=f"{name}-{argument}")
        for name, (_, given) in GOOD.items()
        for argument, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
        if name not in INTEGERS and (name, argument) not in TARGET
    ]


def _refused(name: str) -> Any:
    return pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative")


@pytest.mark.parametrize(("name", "argument"), _differentiable())
@pytest.mark.parametrize("mode", ["plain", "no_grad", "requires_grad", "jvp", "jacfwd"])
def test_forward_mode_is_refused_never_dropped(name, argument, mode):
    fn, given = GOOD[name]
    value = given[argument]

    def call(t: Tensor) -> Any:
        return fn(**{**given, argument: t})

    with _refused(name):
        if mode == "jvp":
            torch.func.jvp(call, (value,), (torch.ones_like(value),))
        elif mode == "jacfwd":
            torch.func.jacfwd(call)(value)
        else:
            leaf = value.clone().requires_grad_(mode == "requires_grad")
            context = torch.no_grad() if mode == "no_grad" else contextlib.nullcontext()
            with forward_ad.dual_level(), context:
                call(forward_ad.make_dual(leaf, torch.ones_like(leaf)))


@pytest.mark.parametrize("name", [name for name in OP_SAMPLES if name not in INTEGERS])
@pytest.mark.parametrize("functional", [False, True])
def test_forward_mode_of_an_op_is_refused(name, functional):
    sample = list(OP_SAMPLES[name])
    k = next(i for i, a in enumerate(sample) if isinstance(a, Tensor) and a.is_floating_point())
    value = sample[k].detach()

    def call(t: Tensor) -> Any:
        return op(name)(*sample[:k], t, *sample[k + 1 :])

    with _refused(name):
        if functional:
            torch.func.jvp(call, (value,), (torch.ones_like(value),))
        else:
            with forward_ad.dual_level():
                call(forward_ad.make_dual(value, torch.ones_like(value)))
    with forward_ad.dual_level():  # a dual level without tangents on the inputs is accepted
        call(value)


# --- memory -------------------------------------------------------------------------------------------------


def _storages(*values: Any) -> list[int]:
    tensors = [t for t in values if isinstance(t, Tensor) and t.numel()]
    return [t.untyped_storage().data_ptr() for t in tensors]


def _apart(out: Any, args: Any) -> None:
    out = out if isinstance(out, tuple) else (out,)
    storages = _storages(*out)
    assert len(set(storages)) == len(storages), "outputs share memory with each other"
    assert set(storages).isdisjoint(_storages(*args)), "outputs share memory with inputs"


@pytest.mark.parametrize("name", GOOD)
def test_outputs_of_a_public_function_share_no_memory(name):
    fn, given = GOOD[name]
    _apart(fn(**given), given.values())


@pytest.mark.parametrize(("steps", "n"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_the_reference_of_a_scan_and_its_gradients_share_no_memory(steps, n):
    args = (
        torch.randn(steps, 1, 4 * n),
        torch.randn(n),
        torch.randn(steps, 1, n),
        *torch.randn(2, 1, n, n).unbind(),
        1,
    )
    out = registry.REFERENCE["e79_scan"](*args)
    _apart(out, args)
    given = (*(torch.randn_like(t) for t in out[:3]), *args[:5], *out[3:], 1)
    _apart(op("e79_scan_backward")(*given), given)


_KEY = {"B": 1, "G": 1, "h": 1, "Dk": 1, "S_kv": 1, "kind": "all", "sink": True}
OF_ONE: list[tuple[str, dict[str, Any]]] = [
    *[
        ("e79_scan", {"T": steps, "B": batch, "n": n, "state": state, "segment": segment})
        for steps, batch, n in ((1, 1, 4), (3, 1, 4), (2, 1, 1), (2, 2, 1), (1, 1, 1))
        for state in (False, True)
        for segment in (0, 1, 2)
    ],
    *[("selection_attention", {**_KEY, "S": queries, "r": 1}) for queries in (1, 3)],
    *[
        (f"selection_{kind}_attention", {**_KEY, "S": queries, "n": 1, "shared": shared})
        for kind in ("list", "entry")
        for shared in (False, True)
        for queries in (1, 3)
    ],
    *[
        (f"mhc_{name}", {"lead": lead, "n": 2, "iters": iters})
        for name in ("pre", "post")
        for lead in ((), (1,), (1, 1))
        for iters in (0, 1)
    ],
    *[
        ("mhc_sinkhorn", {"lead": (2,), "iters": iters, "form": form})
        for iters in (0, 1)
        for form in ("softmax", "exp", "exp_eps")
    ],
]


@pytest.mark.parametrize(("name", "variant"), OF_ONE, ids=str)
def test_ops_of_one_token_query_key_or_step_share_no_memory(name, variant):
    names = [name, f"{name}_backward"] if variant.get("segment") != 0 else [name]
    for one in names:
        args = sample(one, **variant)
        _apart(op(one)(*args), args)


# --- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1, 2**63, 2**64, 10**30])
@pytest.mark.parametrize("s_kv", [0, 1, 10, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_of_any_size(size, s_kv, dtype):
    info = torch.iinfo(dtype)
    index = [0, 1, 2, -1, info.min, info.max, info.max - 1, info.max // 2 + 1]
    blocks = torch.tensor(index, dtype=dtype).view(1, 1, 1, -1)
    ranges = mhc_inductor.blocks_to_ranges(blocks, size, s_kv, causal=False).flatten(0, 3).tolist()
    for i, (start, end) in zip(index, ranges, strict=True):
        wanted = (min(i * size, s_kv), min((i + 1) * size, s_kv)) if i >= 0 else (0, 0)
        assert (start, end) == wanted or (start == end and wanted[0] == wanted[1])
