# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments, which the public functions, the ops and their fakes share.

What an op takes follows from its schema, the table of dimensions (:mod:`mhc_inductor.ops.dims`) and the rules here, by the
name of the argument. Since the fakes validate too, errors appear while tracing. Every message names the op, the argument,
what was expected and what came. Values of ranges, indices, boundaries, masks and segment ids are never read.

Sizes are compared with ``torch._check_value``, which records for symbolic sizes that the comparison must hold and adds no
other guard.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mhc_inductor.ops.dims import LEAD, TABLE, Family, first_of

FORMS = ("softmax", "exp", "exp_eps")
NORM_FORMS = ("inside", "outside")
MIN_STREAMS, MAX_STREAMS, MIN_WIDTH = 2, 8, 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def text(sizes: Sequence[Any]) -> str:
    """Returns sizes, or names of dimensions, as messages show them."""
    return "[" + ", ".join(map(str, sizes)) + "]"


def strided(op: str, name: str, t: Any) -> None:
    """Raises TypeError unless ``t`` is a tensor in dense memory: not nested, sparse or of another library's layout."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.is_nested:
        kind, instead = "nested", f"{name}.to_padded_tensor(0.0), or its values"
    elif t.layout is not torch.strided:
        kind, instead = str(t.layout), f"{name}.to_dense()"
    else:
        return
    raise TypeError(f"{op}: {name} must be a strided tensor, got a {kind} one; pass {instead}")


def integers(op: str, name: str, t: Tensor, like: Tensor | None = None, like_name: str = "q") -> None:
    """Raises TypeError or ValueError unless ``t`` is an int32 or int64 tensor on the device of ``like``."""
    strided(op, name, t)
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {t.dtype}")
    if like is not None:
        _same_device(op, name, t, like, like_name)


def _same_device(op: str, name: str, t: Tensor, like: Tensor, like_name: str) -> None:
    if t.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like_name}'s device {like.device}, got {t.device}")


def _floating(op: str, name: str, t: Any, like: Tensor, like_name: str) -> None:
    """Checks that ``t`` is a floating-point tensor on the device of ``like``, and fp64 only where that is fp64."""
    strided(op, name, t)
    if t.dtype not in _FLOATS:
        raise TypeError(f"{op}: {name} must be bfloat16, float16, float32 or float64, got {t.dtype}")
    if t.dtype is torch.float64 and like.dtype is not torch.float64:
        raise TypeError(f"{op}: {name} may be float64 only where {like_name} is; {like_name} is {like.dtype}")
    _same_device(op, name, t, like, like_name)


def _equal(got: Any, want: Any, message: Callable[[], str]) -> None:
    if not (isinstance(got, int) and isinstance(want, int) and got == want):
        torch._check_value(got == want, message)


def _is_number(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def number(op: str, name: str, value: float, least: float = -math.inf, hint: str = "", *, read: bool = True) -> None:
    """Raises TypeError or ValueError unless ``value`` is a finite number of at least ``least``.

    Args:
        op: Name of the op for messages.
        name: Name of the argument.
        value: The number. A symbol is guarded to have its value.
        least: Its lower bound.
        hint: What the message says after the bound.
        read: Whether symbols are read; False lets them pass, so that no guard is added, and all that Dynamo traces,
            which cannot ask whether a symbol is finite: there the op's fake asks.
    """
    _is_number(op, name, value)
    if not read and (isinstance(value, (torch.SymInt, torch.SymFloat)) or torch.compiler.is_dynamo_compiling()):
        return
    got = float(value)
    if not (math.isfinite(got) and got >= least):
        bound = "" if least == -math.inf else f" and at least {least:g}"
        raise ValueError(f"{op}: {name} must be finite{bound}{hint}, got {got}")


def _eps(op: str, name: str, value: Any, below: float = math.inf) -> None:
    _is_number(op, name, value)
    got = float(value)
    if not (math.isfinite(got) and 0 <= got < below):
        bound = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{op}: {name} must be finite, not negative{bound}, got {got}")


def integer(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is an int; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")


def _iterations(op: str, name: str, value: Any) -> None:
    integer(op, name, value)
    if value < 0:
        raise ValueError(f"{op}: {name} must be 0 (raw logits) or more, got {value}")


def _form(op: str, name: str, value: Any) -> None:
    allowed, hint = (NORM_FORMS, " (where norm_eps is added)") if name == "norm_form" else (FORMS, "")
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {allowed}{hint}, got {value!r}")


def _bool(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def _segment(op: str, name: str, value: Any) -> None:
    integer(op, name, value)
    backward = op.endswith("_backward")
    meaning = "at least 1 (0 leaves no checkpoints to start from)" if backward else "0 (no checkpoints) or more"
    torch._check_value(value >= int(backward), lambda: f"{op}: {name} must be {meaning}, got {value}")


def _scale(op: str, name: str, value: Any) -> None:
    if op.startswith(("index_scores", "index_topk")):
        number(op, name, value, 0.0, " (put a negative scale into w)")
    elif op != "selection_blocks":
        number(op, name, value, read=not op.startswith("selection"))


_SCALARS: Mapping[str, Callable[[str, str, Any], None]] = {
    **dict.fromkeys(("norm_eps", "hc_eps", "post_mult", "post_eps"), _eps),
    **dict.fromkeys(("sinkhorn_eps", "eps"), lambda op, name, value: _eps(op, name, value, 1.0)),
    **dict.fromkeys(("sinkhorn_iters", "iters"), _iterations),
    **dict.fromkeys(("sinkhorn_form", "form", "norm_form"), _form),
    "transpose_res": _bool,
    "segment": _segment,
    "topk": integer,
    **dict.fromkeys(("scale", "attention_scale"), _scale),
}
"""The rule of each argument that is no tensor; the schema alone says what the others are."""

_INTEGRAL = frozenset({"ranges", "indices", "cu_seqlens_q", "cu_seqlens_k", "limit", "segments_q", "segments_k"})
"""The tensors of integers. The others are floating, but for masks."""

# --- the arguments of a call --------------------------------------------------------------------------------


class Call:
    """The arguments of one call while they are checked.

    Attributes:
        op: Name of the op for messages.
        given: The arguments by name; None for those that were left out.
        sizes: The sizes of the named dimensions seen so far; those of "..." as "...0", "...1", ....
        lead: How many of these there are, None before one was seen.
        family: The table of the op's dimensions.
        first: Name of the tensor that the others are compared with.
    """

    def __init__(self, op: str, given: dict[str, Any], family: Family, first: str) -> None:
        self.op, self.given, self.family, self.first = op, given, family, first
        self.sizes: dict[str, Any] = {"2": 2, "7": 7}  # the table names these sizes themselves
        self.lead: int | None = None

    def said(self, words: Sequence[str]) -> str:
        """Returns names of dimensions as messages show them."""
        return text([self.family.texts.get(w, w) for w in words])

    def shape(self, name: str, words: Sequence[str], said: str = "") -> None:
        """Raises ValueError unless a tensor has the named dimensions; sizes of new names are learnt from it.

        Args:
            name: The tensor.
            words: Names of its dimensions, the first of which may be "...".
            said: What the message calls the shape; empty for what the table says.
        """
        t, sizes = self.given[name], self.sizes
        names = said or self.family.texts.get(name) or self.said(words)
        if words[0] == LEAD:
            self.lead = max(0, t.dim() - len(words) + 1) if self.lead is None else self.lead
            words = [*(f"{LEAD}{i}" for i in range(self.lead)), *words[1:]]
        known, rank = [w in sizes for w in words], t.dim() == len(words)

        def message() -> str:
            wants = [sizes.get(w, size) for w, size in zip(words, t.shape if rank else words, strict=True)]
            want = f" = {text(wants)}" if all(known) or (rank and any(known)) else ""
            return f"{self.op}: {name} must have shape {names}{want}, got {text(t.shape)}"

        if not rank:
            raise ValueError(message())
        for word, got in zip(words, t.shape, strict=True):
            if (want := sizes.setdefault(word, got)) is not got:
                _equal(got, want, message)

    def least(self, name: str, words: Sequence[str]) -> None:
        """Raises ValueError if a tensor has no entries along a dimension that needs one."""
        for word in self.family.least[name].split():

            def message(word: str = word) -> str:
                what = "one time step" if word == "T" else "1"
                of = "at least" if word == "T" else f"{self.family.texts.get(word, word)} of at least"
                return f"{self.op}: {name}{self.said(words)} must have {of} {what}, got {text(self.given[name].shape)}"

            torch._check_value(self.sizes[word] >= 1, message)


def _streams(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks the tensor that brings the streams."""
    call.shape(name, words)
    n, t = call.sizes["n"], call.given[name]
    if not MIN_STREAMS <= n <= MAX_STREAMS:
        least, most = MIN_STREAMS, MAX_STREAMS
        raise ValueError(f"{call.op}: {name}{call.said(words)} must hold {least} to {most} streams (n), got {n}")
    if words[-1] == "D" and t.shape[-1] < MIN_WIDTH:
        raise ValueError(f"{call.op}: {name} must have a width D of at least {MIN_WIDTH}, got shape {text(t.shape)}")


def _phi(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks phi, whose rows say which coefficients there are."""
    phi, n, d = call.given[name], call.sizes["n"], call.sizes["D"]
    kinds = {"n": n} if "head" in call.op else {"n*n+2n": n * n + 2 * n, "2n": 2 * n}
    if phi.dim() != 2 or phi.shape[0] not in kinds.values() or phi.shape[1] != n * d:
        allowed = " or ".join(f"[{kind}, n*D] = [{rows}, {n * d}]" for kind, rows in kinds.items())
        raise ValueError(f"{call.op}: phi must have shape {allowed}, got {text(phi.shape)} (n = {n}, D = {d})")
    m = phi.shape[0]
    call.sizes |= {"m": m, "k": m // n if m <= 2 * n else 3}


def _residual(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks the gradient of H_res, which is empty without residual coefficients."""
    n = call.sizes["n"]
    before, call.sizes["n"] = n, 0 if call.sizes["m"] == 2 * n else n
    call.shape(name, words)
    call.sizes["n"] = before


def _kvqm(call: Call, name: str, words: Sequence[str]) -> None:
    t = call.given[name]
    if t.dim() != 3 or t.shape[2] % 4 or t.shape[2] < 4:
        raise ValueError(f"{call.op}: kvqm must have shape [T, B, 4n] with n of at least 1, got {text(t.shape)}")
    steps, batch, width = t.shape
    call.sizes |= {"T": steps, "B": batch, "n": width // 4}
    if "checkpoints" in call.given:
        segment = call.given["segment"]
        call.sizes["C"] = 2 * ((steps + segment - 1) // segment)


def _bias(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks a bias of E79, of all steps or of each."""
    t = call.given[name]
    if t.dim() not in (1, 3):
        wants = (text([call.sizes[w] for w in some]) for some in (words[-1:], words))
        raise ValueError(
            f"{call.op}: {name} must have shape [n] = {next(wants)} or [T, B, n] = {next(wants)}, got {text(t.shape)}"
        )
    call.shape(name, words[3 - t.dim() :])


def _boundaries(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks the boundaries of packed sequences, those of the keys after those of the queries."""
    op, t, q, k = call.op, call.given[name], call.given["q"], call.given["k"]
    other = call.given["cu_seqlens_q"]
    if other is None:
        raise ValueError(f"{op}: cu_seqlens_k must be None where cu_seqlens_q is, got {text(t.shape)}")
    if t.dim() != 1:
        raise ValueError(f"{op}: {name} must have shape [N+1], got {text(t.shape)}")
    torch._check_value(t.shape[0] >= 1, lambda: f"{op}: {name} must have shape [N+1], got {text(t.shape)}")
    if name == "cu_seqlens_k":
        call.sizes["N"] = other.shape[0]
        call.shape(name, words, "cu_seqlens_q's")
        return
    torch._check_value(
        q.shape[0] == 1, lambda: f"{op}: q must have a batch of 1 with cu_seqlens_q (packed), got {text(q.shape)}"
    )
    if call.given["cu_seqlens_k"] is None:
        torch._check_value(
            k.shape[2] == q.shape[1],
            lambda: (
                f"{op}: cu_seqlens_k may be None only where k has as many rows as q has queries, "
                f"got q {text(q.shape)} and k {text(k.shape)}"
            ),
        )


def _ids(call: Call, name: str, words: Sequence[str]) -> None:
    other = "segments_k" if name == "segments_q" else "segments_q"
    if call.given[other] is None:
        raise ValueError(f"{call.op}: {other} must be given where {name} is, got None")
    call.shape(name, words)


def _is_one(size: Any) -> bool:
    """Returns whether ``size`` is known to be 1, without a guard on a symbol."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(size == 1)


def _mask(call: Call, name: str, words: Sequence[str]) -> None:
    """Checks a mask, which is bool, or floating in attention; it broadcasts along all dimensions, or along B and G."""
    op, t, like = call.op, call.given[name], call.given[call.first]
    index = op.startswith("index")
    if t.dtype is not torch.bool:
        if index:
            raise TypeError(f"{op}: mask must be bool, got {t.dtype}")
        if not t.is_floating_point():
            raise TypeError(f"{op}: mask must be bool or floating, got {t.dtype}; pass mask.bool()")
        _floating(op, name, t, like, call.first)
    _same_device(op, name, t, like, call.first)
    full = [call.sizes[w] for w in words]
    meaning = f"broadcast to [B, S, T] = {text(full)}"
    if not index:
        meaning = f"have shape [B or 1, S, G or 1, S_kv], with [B, S, G, S_kv] = {text(full)}"

    def message() -> str:
        return f"{op}: mask must {meaning}, got {text(t.shape)}"

    if t.dim() != len(full):
        raise ValueError(message())
    for word, got, want in zip(words, t.shape, full, strict=True):
        if (word not in "BG" and not index) or not _is_one(got):
            _equal(got, want, message)


_SHAPES: dict[str, Callable[[Call, str, Sequence[str]], None]] = {
    "x": _streams,
    "phi": _phi,
    "dh_res": _residual,
    "dnext_res": _residual,
    "kvqm": _kvqm,
    "b_s": _bias,
    "b_m": _bias,
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _boundaries),
    **dict.fromkeys(("segments_q", "segments_k"), _ids),
    "mask": _mask,
}
"""The tensors whose shape is more than the names of their dimensions."""


def _coefficients(call: Call) -> None:
    op, given, m, n = call.op, call.given, call.sizes["m"], call.sizes["n"]
    if given["post_mult"] == 0:
        raise ValueError(f"{op}: post_mult must be above 0, got {given['post_mult']}")
    if given["sinkhorn_iters"] > 0 and m == 2 * n:
        raise ValueError(
            f"{op}: sinkhorn_iters must be 0 when phi has 2n = {m} rows (no residual matrix), got {given['sinkhorn_iters']}"
        )


def _values(call: Call) -> None:
    """Checks the width of values that are columns of the keys."""
    width, d = call.given["v_width"], call.sizes["D"]
    if call.given["v"] is None:
        torch._check_value(width <= d, lambda: f"{call.op}: v_width must be at most Dk = {d}, got {width}")
    torch._check_value(width >= 1, lambda: f"{call.op}: v must have Dv of at least 1, got {width}")


def _topk(call: Call) -> None:
    op, topk, keys = call.op, call.given["topk"], call.sizes["T"]
    torch._check_value(topk >= 0, lambda: f"{op}: topk must be at least 0, got {topk}")
    torch._check_value(topk <= keys, lambda: f"{op}: topk must be at most T = {keys}, the number of keys, got {topk}")


def _blocks(call: Call) -> None:
    op, count = call.op, call.given["count"]
    length, stride, block = (call.given[name] for name in ("length", "stride", "block"))
    if count < 3:
        raise ValueError(f"{op}: count must be at least 3 (the first, the own and the previous block), got {count}")
    if stride < 1 or length < stride or length % stride or block < stride or block % stride:
        raise ValueError(
            f"{op}: length and block must be multiples of stride, got length {length}, block {block}, stride {stride}"
        )


_TOGETHER = {"post_mult": _coefficients, "v_width": _values, "topk": _topk, "count": _blocks}
"""The rules of several arguments, by one that only ops with the rule have."""


# --- one op -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
    """What the arguments of one op are: names in the schema's order, tensors in the order of their checks."""

    op: str
    names: tuple[str, ...]
    first: str
    tensors: tuple[tuple[str, bool], ...]
    shapes: tuple[tuple[str, tuple[str, ...], Callable[[Call, str, Sequence[str]], None]], ...]
    scalars: tuple[tuple[int, str], ...]
    together: tuple[Callable[[Call], None], ...]


_RULES: dict[str, _Rules] = {}


def public(name: str) -> str:
    """Returns the name of the public function that messages about op ``name`` show."""
    return re.sub("_(list|entry|mask)_attention", "_attention", name)


def prepare(name: str, types: Sequence[tuple[str, str, bool]]) -> None:
    """Makes the rules of op ``name`` of its schema's arguments: the name, type and whether None is accepted of each."""
    family, names = TABLE[name], tuple(argument for argument, _, _ in types)
    tensors = [(argument, optional) for argument, kind, optional in types if kind == "Tensor"]
    # A backward op begins with gradients. The forward's arguments are checked before what is compared with them.
    first = first_of(names)
    at = [argument for argument, _ in tensors].index(first)
    tensors = tensors[at:] + tensors[:at]
    words = {a: (family.dims.get(a) or family.dims[a.removeprefix("d")]).split() for a, _ in tensors}
    if name.startswith("mhc"):  # H_res has as many outputs as inputs
        words = {a: ["n" if w == "o" else w for w in some] for a, some in words.items()}
    rules = _SHAPES | ({first: _streams} if name.startswith("mhc") else {})
    shapes = tuple((a, tuple(some), rules.get(a, Call.shape)) for a, some in words.items())
    together = tuple(rule for argument, rule in _TOGETHER.items() if argument in names)
    scalars = tuple((at, argument) for at, argument in enumerate(names) if argument in _SCALARS)
    _RULES[name] = _Rules(public(name), names, first, tuple(tensors), shapes, scalars, together)


def check(name: str, *args: Any, op: str | None = None) -> None:
    """Raises ValueError or TypeError unless the arguments of op ``name`` are what it takes, and fit together.

    Args:
        name: Name of the op.
        args: Its arguments by position; trailing ones may be left out.
        op: The name that messages show; None for that of the op's public function.
    """
    rules, family = _RULES[name], TABLE[name]
    given = dict.fromkeys(rules.names) | dict(zip(rules.names, args, strict=False))
    call = Call(op or rules.op, given, family, rules.first)
    _types(call, rules)
    for at, argument in rules.scalars:
        if at < len(args):
            _SCALARS[argument](call.op, argument, args[at])
    if "v_width" in given:
        call.sizes["V"] = given["v_width"]
    for argument, words, rule in rules.shapes:
        if given[argument] is not None:
            rule(call, argument, words)
            if argument in family.least:
                call.least(argument, words)
    for together in rules.together:
        together(call)


def _types(call: Call, rules: _Rules) -> None:
    """Checks the kinds, dtypes and devices of the tensors."""
    op, given, same, like_name = call.op, call.given, call.family.same, rules.first
    like = given[like_name]
    for name, optional in rules.tensors:
        if (t := given[name]) is None and optional:
            continue
        if name in _INTEGRAL:
            integers(op, name, t, like, like_name)
        elif name == "mask":
            strided(op, name, t)
        else:
            _floating(op, name, t, like, like_name)
        if (other := same.get(name)) in given and t.dtype is not given[other].dtype:
            raise TypeError(f"{op}: {name} must have {other}'s dtype {given[other].dtype}, got {t.dtype}")


def mask_of_lists(op: str, q: Tensor, k: Tensor, mask: Tensor) -> None:
    """Raises ValueError or TypeError unless a mask that is given with lists fits to queries and keys."""
    strided(op, "mask", mask)
    call = Call(op, {"q": q, "k": k, "mask": mask}, TABLE["selection_mask_attention"], "q")
    for name in call.given:
        _SHAPES.get(name, Call.shape)(call, name, call.family.dims[name].split())
