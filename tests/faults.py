# SPDX-License-Identifier: Apache-2.0
"""Breaks the package on purpose, one fault at a time, and looks which of the tests that each commit runs see it.

``python -m tests.faults`` copies the tree for each fault, plants it there, runs the tests named with it as ``./dev test``
chooses their cases, and writes which failed first to ``benchmarks/results/faults.json``. It exits with 1 if a fault is
not seen. A change that makes the tests fewer, shorter or other ones, such as of :data:`tests.each_commit.SECONDS`, is followed
by such a run: what was seen before must be seen after it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from benchmarks import running
from benchmarks.source_hash import ROOT
from tests.each_commit import SECONDS, environment

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
_PASS = "mhc_inductor/routing"


class Fault(NamedTuple):
    """A piece of ``file`` that is replaced, and the tests, mostly by their file, of which one must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "a tensor is written in place within a formula",
        f"{_PASS}/placement.py",
        "if any(self.view.written_between(n, last + 1, left=True, after=at) for n, at in since):",
        "if not since:",
        "test_laws_writes",
    ),
    Fault(
        "an op reads its input after a later write",
        f"{_PASS}/placement.py",
        "overwritten = [n for n, look in looks.items() if view.written_between(n, at, after=look)]",
        "overwritten: list[fx.Node] = []",
        "test_laws_writes",
    ),
    Fault(
        "a value with a hook goes away",
        f"{_PASS}/placement.py",
        "if user not in region and (effect.watches or not effect.known):",
        "if user not in region and not effect.known:",
        "test_laws_autograd test_routing_e79_laws",
    ),
    Fault(
        "gradients are switched off in the middle of a formula",
        f"{_PASS}/placement.py",
        "if len(grads) > 1:",
        "if not grads and flowing:",
        "test_laws_modes",
    ),
    Fault(
        "a parameter gets a gradient of zeros in place of none",
        f"{_PASS}/edit.py",
        "if roots & ~view.reached_anyway(old):",
        "if not view.roots:",
        "test_laws_autograd",
    ),
    Fault(
        "a result requires a gradient where the formula's does not",
        f"{_PASS}/edit.py",
        'new = self.emit("detach", new)',
        "pass",
        "test_laws_autograd test_laws_modes",
    ),
    Fault(
        "two results share memory",
        f"{_PASS}/edit.py",
        "return claimed.setdefault(mine, theirs) != theirs or self._repeats()",
        "return False",
        "test_laws_autograd test_routing_e79_laws",
    ),
    Fault(
        "an edit that failed is undone in part",
        f"{_PASS}/edit.py",
        "user.args, user.kwargs = args, kwargs",
        "pass",
        "test_laws_process test_routing_plugin",
    ),
    Fault(
        "a rounding of the model's is dropped",
        f"{_PASS}/placement.py",
        "if not narrow or all(",
        "if narrow or all(",
        "test_laws_values",
    ),
    Fault(
        "what the op saves for its backward is written",
        f"{_PASS}/placement.py",
        "found.append(node)",
        "pass",
        "test_laws_autograd test_laws_writes",
    ),
    Fault(
        "the comparison of an op with its formula finds nothing",
        f"{_PASS}/comparison.py",
        "if not error <= bar:",
        "if not off:",
        "test_routing_verify test_routing_few_tokens",
    ),
    Fault(
        "a size that was taken as fixed has no guard",
        f"{_PASS}/edit.py",
        "int(size)",
        "pass",
        "test_routing_compiles test_routing_sparse_forms test_routing_masks test_routing_index",
    ),
    Fault(
        "a call that writes its argument counts as one that does not",
        f"{_PASS}/effects.py",
        "compat.storage_key(t) in writes.storages or t.requires_grad",
        "t.requires_grad",
        "test_routing_effects",
    ),
    Fault(
        "autocast goes on after its end",
        f"{_PASS}/effects.py",
        "autocast=before.get(value, outer).autocast",
        "autocast=now.autocast",
        "test_routing_effects test_laws_modes",
    ),
    Fault(
        "a quantised weight is taken for a plain one",
        f"{_PASS}/graph/values.py",
        "return (type(t), shape, stride, t.dtype, t.device)",
        "return (shape, stride, t.dtype, t.device)",
        "test_routing_known_calls",
    ),
    Fault(
        "a bias is read from its first row on",
        f"{_PASS}/operators/mhc/formula.py",
        "return Piece(ref.value, start.factor, rows)",
        "return Piece(ref.value, 0, rows)",
        "test_routing_spellings",
    ),
    Fault(
        "streams are mixed by the transposed matrix",
        f"{_PASS}/operators/mhc/mixing.py",
        "bool(mix.place)",
        "not mix.place",
        "test_routing_spellings",
    ),
    Fault(
        "gradients of a loop's inputs are cut where they are asked for",
        f"{_PASS}/operators/e79/outputs.py",
        "for role, reached in wanted.items() if not reached)",
        "for role, reached in wanted.items() if reached)",
        "test_laws_autograd test_routing_e79_laws",
    ),
    Fault(
        "any index counts as one within its tensor",
        f"{_PASS}/masks/index_checks.py",
        "return picked_size(a) == size",
        "return picked_size(a) is not None",
        "test_laws_values test_routing_lists test_routing_index",
    ),
    Fault(
        "rows without a key are 0",
        f"{_PASS}/operators/selection/empty_rows.py",
        "if rows in (Rows.SEEN, Rows.ZERO) or",
        "if rows in (Rows.SEEN, Rows.ZERO, Rows.NAN, Rows.MEAN) or",
        "test_laws_values test_routing_selection",
    ),
    Fault(
        "a window has one key too many",
        f"{_PASS}/operators/selection/intervals.py",
        "at = rest.times(-c)",
        "at = rest.times(-c).shifted(1)",
        "test_routing_selection test_routing_masks",
    ),
    Fault(
        "an indexer picks -1 where topk picks a hidden key",
        f"{_PASS}/operators/index/emit.py",
        "if mask is not None:\n            chosen",
        "if not self.device:\n            chosen",
        "test_routing_index",
    ),
    Fault(
        "generated code of an older version is taken from the cache",
        "mhc_inductor/fingerprint.py",
        "digest.update(path.read_bytes())",
        "pass",
        "test_cache test_cacheable",
    ),
    Fault(
        "a second derivative is none",
        "mhc_inductor/ops/registry.py",
        "def _double_grad(name: str, ctx: Any, *grads: Any) -> None:\n",
        "def _double_grad(name: str, ctx: Any, *grads: Any) -> None:\n    return None\n",
        "test_ops_mhc test_ops_e79 test_ops_index",
    ),
    Fault(
        "an argument of a wrong shape reaches a kernel",
        "mhc_inductor/ops/checks.py",
        "torch._check_value(got == want, message)",
        "pass",
        "test_ops_mhc test_ops_boundaries",
    ),
    Fault(
        "a gradient is added that is computed only later",
        "mhc_inductor/passes.py",
        "or other is dx or order[other] > order[node]:",
        "or other is dx:",
        "test_codegen test_backend test_fused",
    ),
    Fault(
        "disable() leaves routing on",
        "mhc_inductor/backend.py",
        "            _enabled = None\n            _entry.__exit__()",
        "            _enabled = None",
        "test_laws_process test_process_state",
    ),
    Fault(
        "a kernel adds another gate's bias",
        "kernels/e79/forward.py",
        "h += bmr",
        "h += bsr",
        "test_interpreter.py::test_kernels_under_the_interpreter[e79-40]",
    ),
)


def planted(fault: Fault, text: str) -> str:
    """Returns the text of a fault's file with the fault. Raises ValueError unless its old text stands there once."""
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}; expected once")
    return text.replace(fault.old, fault.new)


def _copied(to: Path) -> None:
    """Copies the files that git knows, and makes the copy what ``import mhc_inductor`` finds there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    for folder in ("kernels", "lowerings"):
        (to / "mhc_inductor" / folder).symlink_to(Path("..") / folder)


def seen(fault: Fault | None, tests: str) -> tuple[str, float]:
    """Returns the first of ``tests`` that fails with a fault, "" where none does, and how many seconds that took."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        _copied(tree)
        if fault is not None:
            (tree / fault.file).write_text(planted(fault, (tree / fault.file).read_text()))
        env = environment() | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
        files = [f"tests/{name}" if "::" in name else f"tests/{name}.py" for name in tests.split()]
        done = subprocess.run([*command, *files], cwd=tree, env=env, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and failed is None:
        raise RuntimeError(f"the tests of {tests} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else "", round(time.perf_counter() - start, 1)


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULT,
    only: Annotated[str, typer.Option(help="A part of the names of the faults that are planted.")] = "",
) -> None:
    """Plant each fault and run its tests; exit with 1 if one is not seen."""
    console = Console()
    faults = [fault for fault in FAULTS if only in fault.name]
    found: dict[str, dict[str, object]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda fault: seen(fault, fault.tests), faults)
        for fault, (test, took) in zip(faults, track(runs, "planting", len(faults), console=console), strict=True):
            found[fault.name] = {"file": fault.file, "seen_by": test, "seconds": took}
            console.print(f"{took:6.1f} s  {fault.name}: {test or 'NOT SEEN'}", markup=False, soft_wrap=True)
            running.save({"seconds_of_a_test_function": SECONDS, "faults": found}, out)
    unseen = [name for name, result in found.items() if not result["seen_by"]]
    console.print(f"{len(found) - len(unseen)} of {len(found)} faults seen")
    if unseen:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
