# SPDX-License-Identifier: Apache-2.0
"""A run on several GPUs: what makes a job pass, and the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..processes import Row, figure
from ..report import document, markdown, section, yes
from .failures import DEAD
from .jobs import Job, Outcome
from .rank import worst
from .training import BAR, BAR_RANKS, POLICIES

CONTEXT_ERROR, ONE_PROCESS_ERROR = 2e-2, 1e-2
"""Largest relative errors: of bf16 gradients summed over ranks, and of gradients on two devices of one process."""

# --- verdicts -----------------------------------------------------------------------------------------------


def passed(job: Job, outcomes: list[Outcome]) -> tuple[bool, str]:
    """Returns whether a job passed, and if not, why."""
    if not outcomes:
        why = "did not begin within the run's budget of seconds"
    elif job.target.endswith("_dies"):
        why = _death(outcomes)
    else:
        why = _ended(outcomes) or _FOUND[job.target]([o.row or {} for o in outcomes])
    return not why, why


def _ended(outcomes: list[Outcome]) -> str:
    """Returns what is wrong with the processes: each must end by itself, without an error, with a row."""
    said = []
    for o in outcomes:
        if o.row is not None and "error" in o.row:
            said.append(f"rank {o.rank}: {o.row['error']}")
        elif o.code is None:
            said.append(f"rank {o.rank}: ended by the time limit after {o.seconds} s")
        elif o.code or o.row is None:
            said.append(f"rank {o.rank}: exit code {o.code}")
    return "; ".join(said)[:600]


def _death(outcomes: list[Outcome]) -> str:
    """Returns what is wrong where one rank dies: the others must raise, or be ended by NCCL, and none may hang."""
    *others, dead = outcomes
    if dead.code != DEAD:
        return f"the last rank ended with {dead.code}, not by its own death"
    for o in others:
        row = o.row or {}
        by_nccl = o.code not in (None, 0) and "waits" in row and ("NCCL" in o.log or "Watchdog" in o.log)
        if o.code is None:
            return f"rank {o.rank} hung for {o.seconds} s"
        if not row.get("raised") and not by_nccl:
            return f"rank {o.rank} ended with {o.code} and no error: {row.get('error', '')}"
        if row.get("op", "") not in row.get("raised", ""):
            return f"rank {o.rank}: the error does not name {row['op']}: {row['raised']}"
    return ""


def _failed(rows: list[Row]) -> str:
    """Returns the failed checks of the ranks, and ops whose results for a token have other bits."""
    failed = {f"{name}: {text.strip().splitlines()[-1]}" for row in rows for name, text in row["failed"].items()}
    bits = {f"other bits: {case}" for row in rows for case in row.get("other_bits", ())}
    return "; ".join(sorted(failed) + sorted(bits))[:1500]


def _wrong_losses(rows: list[Row]) -> str:
    of = rows[0]["variants"].items()
    said = [f"{n}: losses differ by {r['difference']:.2g}" for n, r in of if not r["difference"] <= r["allowed"]]
    return "; ".join(said + [f"{name}: not routed" for name, row in of if not row["routed"]])


def _wrong_example(rows: list[Row]) -> str:
    (row,) = rows
    if row["first"]["code"] == 0:
        return "the first run was not killed"
    if row["again"]["code"] != 0:
        errors = [line for line in row["again"]["output"].splitlines() if "Error" in line]
        return f"the second run ended with {row['again']['code']}: {' '.join(errors[:3])}"
    if not row["picture"]:
        return "there is no picture"
    if differ := row["first_difference"]:
        return f"the resumed losses differ from step {differ[0]} on, by at most {differ[1]:.2g}"
    return "" if row["nothing_lost"] else "losses of a rank are missing, or differ between the ranks"


def _wrong_context(rows: list[Row]) -> str:
    kinds = ("output_error", "gradient_error")
    errors = {row["variant"]: worst(row["results"][kind] for kind in kinds) for row in rows[0]["rows"][1:]}
    return "; ".join(f"{name}: error {error:.2g}" for name, error in errors.items() if not error <= CONTEXT_ERROR)


def _wrong_devices(rows: list[Row]) -> str:
    (row,) = rows
    if row["threads_failed"]:
        return "; ".join(row["threads_failed"])
    if bad := [name for name, same in row["ops"].items() if not same]:
        return f"other bits on another device: {', '.join(bad)}"
    apart = row["gradient_difference"]
    return "" if apart <= ONE_PROCESS_ERROR else f"gradients differ: {apart:.2g}"


_FOUND = {
    **dict.fromkeys(("checks:sharded_ops", "checks:trained", "checks:context"), _failed),
    "training:losses": _wrong_losses,
    "training:scaling": lambda rows: "",
    "resume:run": _wrong_example,
    "context:run": _wrong_context,
    "failures:one_process": _wrong_devices,
}

# --- the table ----------------------------------------------------------------------------------------------

Part = tuple[str, str, Iterable[list[str]]]


def table(result: Row) -> str:
    """Returns the result as Markdown."""
    v, jobs = result["versions"], result["jobs"]
    nccl = f" {v['nccl']}" if v.get("nccl") else ""
    lines = [
        f"{result['ranks']} x {result['device']['name']}, {result['backend']}{nccl}, torch {v['torch']}, "
        f"triton {v['triton']}, Python {v['python']}, driver {v['driver']}",
        f"commit {(result['commit'] or 'unknown')[:7]}, sources {result['kernel_sources_sha256'][:12]}, {result['date']}",
        f"{result.get('seconds', 0)} s in all; jobs that only check ran side by side, measured ones alone",
    ]
    lines += [result["notice"]] if result["notice"] else []
    tables = [("Jobs", "job|result|seconds", map(_ended_how, jobs)), *_parts(jobs), *_failures(jobs)]
    made = [(title, headings.split("|"), list(rows)) for title, headings, rows in tables]
    return document("Several GPUs", lines, *(section(title, markdown(*of)) for title, *of in made if of[1]))


def _ended_how(job: Row) -> list[str]:
    how = "passed" if job["passed"] else "**failed**: " + job["why"][:300].replace("|", "/")
    return [job["job"], how, f"{max((p['seconds'] for p in job['processes']), default=0):.0f}"]


def _found(jobs: list[Row], part: str, has: str) -> list[tuple[Row, Row]]:
    """Returns the jobs of a part, each with its first rank's row, where that has a field."""
    found = [(j, j["found"]) for j in jobs if j["part"] == part and j["found"]]
    firsts = [(j, f[0] if isinstance(f, list) else f) for j, f in found]
    return [(j, row) for j, row in firsts if row and has in row]


def _parts(jobs: list[Row]) -> Iterator[Part]:
    headings = "job|done|failed|messages of inputs without a kernel"
    yield "Checks on every rank", headings, (_checked(job, row) for job, row in _found(jobs, "checks", "failed"))
    variants = [pair for _, row in _found(jobs, "fsdp", "variants") for pair in row["variants"].items()]
    headings = "variant|loss|largest relative difference|equal bits|routed|graphs"
    rows = (_losses(name, row) for name, row in variants if "difference" in row)
    yield "Losses against one rank that trains on all batches", headings, rows
    rows = (_resumed(row) for _, row in _found(jobs, "fsdp", "nothing_lost"))
    yield "examples/train_fsdp.py, killed and resumed", "trained|losses equal in bits|checkpoints", rows
    yield from (_scaling(row, len(job["processes"])) for job, row in _found(jobs, "scaling", "rows"))
    context = [row for _, row in _found(jobs, "context", "rows")]
    title = f"Context parallelism at {', '.join(sorted({str(row['tokens']) for row in context}))} tokens"
    headings = "operator||ms|against one rank|MB sent a rank|peak MB|bits of outputs|error of gradients"
    yield title, headings, (cells for row in context for r in row["rows"] for cells in _context(row["operator"], r))


def _failures(jobs: list[Row]) -> Iterator[Part]:
    deaths = [j for j in jobs if j["found"] and j["part"] == "failures" and j["job"].startswith("a rank dies")]
    yield "A rank that dies", "job|rank|error|seconds", (cells for job in deaths for cells in _dead(job))
    rows = (_devices(row) for _, row in _found(jobs, "failures", "devices"))
    yield "Several devices in one process", "devices|losses|gradients differ by|bits of ops", rows


def _resumed(row: Row) -> list[str]:
    equal = "yes" if row["nothing_lost"] else "**no**"
    return [f"{len(row['losses'] or ())} steps", equal, ", ".join(row["checkpoints"])]


def _checked(job: Row, row: Row) -> list[str]:
    left = f", not {', '.join(row['left_out'])}: no time" if row.get("left_out") else ""
    done = f"{len(row.get('checks', ()))} checks{left}"
    if "samples" in row:
        done = f"{row['samples']} of {row['planned']} samples, {row['ways']} shardings"
    return [job["job"], done, str(len(row["failed"])), str(len(row.get("fallbacks", ())))]


def _losses(name: str, row: Row) -> list[str]:
    first, last, apart = (float(x) for x in (row["losses"][0], row["losses"][-1], row["difference"]))
    routed = {k.removeprefix("routed "): n for k, n in row["counters"].items() if k.startswith("routed")}
    cells = [name, f"{first:.5f} to {last:.5f}", f"{apart:.1e}", f"{row['equal_bits']} of {len(row['losses'])}"]
    return [*cells, ", ".join(f"{op} {n}" for op, n in routed.items()), str(row.get("graphs", ""))]


def _scaling(row: Row, ranks: int) -> Part:
    rows = []
    for r in row["rows"]:
        judged = r["variant"] in (*POLICIES, "DDP") and ranks == BAR_RANKS
        verdict = yes(r["ratio"] >= BAR) if judged else ""
        speed = f"{r['tokens_a_second_a_rank']:,.0f}"
        rows.append([r["variant"], f"{r['median_ms']:.2f}", speed, f"{r['ratio']:.3f}", verdict])
    size = row["size"]
    title = (
        f"Weak scaling on {ranks} ranks: D = {size['dim']}, {size['layers']} layers, {row['parameters'] / 1e6:.0f} M "
        f"parameters, {size['batch']} x {size['seq']} tokens a rank"
    )
    return title, f"variant|ms a step|tokens a second a rank|of one rank alone|bar {BAR} on {BAR_RANKS}", rows


def _context(operator: str, r: Row) -> Iterator[list[str]]:
    results = ["", ""]
    if found := r.get("results"):
        bits = "equal" if found["equal_bits"] else f"{float(found['output_error']):.1e}"
        results = [bits, f"{float(found['gradient_error']):.1e}"]
    for what, ms in r["ms"].items():
        faster = f"{r['speedup'][what]:.2f} x" if "speedup" in r else ""
        cells = [f"{operator}, {r['variant']}", what, f"{ms:.3f}", faster, f"{r['sent_bytes'][what] / 1e6:.2f}"]
        yield [*cells, figure(r["peak_mb"], what, ",.0f"), *results]


def _dead(job: Row) -> Iterator[list[str]]:
    for end, row in zip(job["processes"][:-1], job["found"][:-1], strict=True):
        how = (row or {}).get("raised") or f"ended by the backend, exit code {end['code']}"
        yield [job["job"], str(end["rank"]), how[:200].replace("|", "/").replace("\n", " "), f"{end['seconds']:.0f}"]


def _devices(row: Row) -> list[str]:
    losses, ops = ("equal" if same else "**different**" for same in (row["equal_losses"], all(row["ops"].values())))
    return [", ".join(row["devices"]), losses, f"{float(row['gradient_difference']):.1e}", ops]
