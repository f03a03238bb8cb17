# SPDX-License-Identifier: Apache-2.0
"""Compiles a model ahead of its traffic."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mhc_inductor import compat
from mhc_inductor.kernels import background
from mhc_inductor.progress import bars, shown
from mhc_inductor.warming import side_by_side
from mhc_inductor.warming.kept_state import KeptState

Backward = bool | Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Warmed:
    """What compiling for one entry of ``shapes`` took.

    ``graphs`` counts the graphs that Dynamo captured; it is 0 where earlier ones serve this entry too.
    """

    arguments: str
    seconds: float
    graphs: int


@dataclasses.dataclass(frozen=True)
class Warmup:
    """The result of :func:`warmup`, one entry per entry of ``shapes``, in order.

    ``ahead`` is the seconds that ``parallel`` processes took before; entries find in the caches what those compiled.
    """

    shapes: list[Warmed]
    ahead: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the seconds of all entries and of what was compiled ahead of them."""
        return self.ahead + sum(one.seconds for one in self.shapes)

    @property
    def graphs(self) -> int:
        """Returns the number of graphs of all entries."""
        return sum(one.graphs for one in self.shapes)

    def __str__(self) -> str:
        lines = [f"{one.seconds:7.1f} s  {one.graphs:3} graphs  {one.arguments}" for one in self.shapes]
        if self.ahead:
            lines.insert(0, f"{self.ahead:7.1f} s              side by side, ahead of the others")
        return "\n".join([*lines, f"{self.seconds:7.1f} s  {self.graphs:3} graphs  in all"])


def warmup(
    model: Callable[..., Any],
    shapes: Sequence[Any],
    *,
    backward: Backward = False,
    progress: bool | None = None,
    parallel: int | None = None,
) -> Warmup:
    """Compiles a model for given arguments, by one call for each, and returns how long that took.

    A later call in the same modes with arguments like these compiles nothing. Call it as the traffic will call the
    model: under ``torch.no_grad()`` or ``torch.inference_mode()`` for inference, under ``torch.autocast`` where that is
    used, after ``model.train()`` or ``model.eval()``. Kernels are compiled in parallel, by Inductor's workers and on
    threads.

    The calls leave no trace: parameters, gradients, buffers, attributes of modules, training mode, the tensors among
    the arguments and torch's random state are put back. Their copies take as much CPU memory as they have. Hooks run,
    optimizers in them too, and with several processes each must call this alike.

    Args:
        model: a module that ``torch.compile`` returned, or one that is compiled in place or has compiled layers.
        shapes: example arguments. Each entry is a tuple of positional arguments, a mapping of keyword arguments, or a
            function without arguments that makes one of these.
        backward: compile the backward too. True sums all outputs; a function gets the outputs and returns the loss.
        progress: show a bar on stderr. By default, if rich is installed and stderr is a terminal or a notebook.
        parallel: a number of processes that first compile the graphs of all entries side by side, into Inductor's
            caches on disk. They pay where cores are free and compiling takes far longer than one more start of Python
            and trace of all entries. Python starts them as ``multiprocessing`` does with "spawn": a script needs
            ``if __name__ == "__main__":``. ``model`` and ``backward`` must be such as pickle takes, else a warning is
            logged and nothing runs ahead. Each process copies what the model keeps on a CPU; memory of a GPU is shared.
            Functions among ``shapes`` are called once more.

    Returns:
        Seconds and graphs of each entry.

    Raises:
        TypeError: if ``model`` is no module, an entry of ``shapes`` is none of the above, ``backward`` is neither a bool
            nor a function, or ``parallel`` is no int.
        ValueError: if nothing is compiled, ``backward`` is asked for where no output has a gradient, a lazy module has
            not made its parameters, or ``parallel`` is less than 1.
        RuntimeError: if a call fails. It names the entry and its arguments.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"warmup: model must be an nn.Module that is compiled, got {type(model).__name__}")
    if isinstance(shapes, (str, Tensor, Mapping)) or not isinstance(shapes, Sequence):
        raise TypeError(f"warmup: shapes must be a list of argument tuples, got {type(shapes).__name__}")
    if not (isinstance(backward, bool) or callable(backward)):
        raise TypeError(f"warmup: backward must be a bool or a function of the outputs, got {type(backward).__name__}")
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(f"warmup: parameter {lazy[0]} is not initialised: call the lazy module once first")
    if parallel is not None and (not isinstance(parallel, int) or isinstance(parallel, bool)):
        raise TypeError(f"warmup: parallel must be an int, got {type(parallel).__name__}")
    if parallel is not None and parallel < 1:
        raise ValueError(f"warmup: parallel must be at least 1, got {parallel}")
    compat.start_compile_workers()
    state, ahead = KeptState(compat.uncompiled(model)), 0.0
    try:
        if shapes and (parallel or 1) > 1:
            ahead = _ahead(model, state, shapes, backward, parallel or 1)
        with _bar(len(shapes), progress) as advance:
            done = []
            for at, entry in enumerate(shapes):
                done.append(_warm(model, state, at, entry, backward))
                advance()
    finally:
        state.finish()
    if shapes and not compat.has_compiled(model) and not any(one.graphs for one in done):
        raise ValueError("warmup: nothing is compiled: call torch.compile(model), or model.compile(), first")
    return Warmup(done, ahead)


def _ahead(model: nn.Module, state: KeptState, shapes: Sequence[Any], backward: Backward, processes: int) -> float:
    """Compiles what all entries need in several processes, and returns the seconds that took."""
    start = time.perf_counter()
    with state.one_call(()):
        calls = [_arguments(at, entry) for at, entry in enumerate(shapes)]
    with state.one_call(calls):
        side_by_side.fill_caches(model, [kwargs or args for args, kwargs in calls], backward, processes)
    return time.perf_counter() - start


def _warm(model: nn.Module, state: KeptState, at: int, entry: Any, backward: Backward) -> Warmed:
    """Runs the model on one entry of ``shapes`` and returns what that took."""
    args, kwargs = _arguments(at, entry)
    words = _words([*args, kwargs] if kwargs else args)
    start, graphs = time.perf_counter(), compat.captured_graphs()
    with state.one_call((args, kwargs)):
        try:
            out = model(*args, **kwargs)
            if backward:
                _differentiate(out, backward, f"warmup: shapes[{at}] {words}")
            for kernel in list(background.pending):
                background.finish(kernel)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except _NoGradient:
            raise
        except Exception as error:
            raise RuntimeError(f"warmup: shapes[{at}] {words}: {type(error).__name__}: {error}") from error
    return Warmed(words, time.perf_counter() - start, compat.captured_graphs() - graphs)


class _NoGradient(ValueError):
    """A backward was asked for, but no output has a gradient."""


def _differentiate(out: Any, backward: Backward, where: str) -> None:
    """Runs the backward of a call's outputs. Raises ValueError, beginning with ``where``, if none has a gradient."""
    given = out if backward is True else backward(out)  # type: ignore[operator]
    ends = [t for t in compat.tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
    if not ends:
        raise _NoGradient(f"{where}: backward was asked for, but no output requires a gradient")
    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


def _arguments(at: int, entry: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments that an entry of ``shapes`` stands for."""
    if callable(entry):
        try:
            entry = entry()
        except Exception as error:
            raise RuntimeError(f"warmup: shapes[{at}], a function: {type(error).__name__}: {error}") from error
    if isinstance(entry, Mapping):
        return (), dict(entry)
    if isinstance(entry, (tuple, list)):
        return tuple(entry), {}
    raise TypeError(
        f"warmup: shapes[{at}] must be a tuple of arguments, a mapping of keyword arguments, or a function that makes "
        f"one, got {type(entry).__name__}"
    )


def _words(values: Any) -> str:
    """Returns arguments as text: dtypes and shapes of tensors, types of anything else but numbers and strings."""

    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    return f"({', '.join(map(word, compat.tree_leaves(values)))})"


@contextlib.contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Callable[[], None]]:
    """Shows a bar on stderr, if rich is installed, and yields the function that advances it by one."""
    if not (progress if progress is not None else shown()):
        yield lambda: None
        return
    try:
        made = bars(transient=True)
    except ImportError:
        yield lambda: None
        return
    with made as bar:
        task = bar.add_task("compiling", total=total)
        yield lambda: bar.advance(task)
