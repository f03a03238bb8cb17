# SPDX-License-Identifier: Apache-2.0
"""The table of a run on several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..report import markdown
from .training import BAR, BAR_RANKS, POLICIES

Job = dict[str, Any]


def table(result: dict[str, Any]) -> str:
    """Returns the result as Markdown."""
    v, jobs = result["versions"], result["jobs"]
    lines = [
        "# Several GPUs",
        "",
        f"- {result['ranks']} x {result['device']['name']}, {result['backend']}"
        + (f" {v['nccl']}" if v.get("nccl") else "")
        + f", torch {v['torch']}, triton {v['triton']}, Python {v['python']}, driver {v['driver']}",
        f"- commit {(result['commit'] or 'unknown')[:7]}, sources {result['kernel_sources_sha256'][:12]}, {result['date']}",
        f"- {result.get('seconds', 0)} s in all; jobs that only check ran side by side, measured ones alone",
    ]
    if result["notice"]:
        lines.append(f"- {result['notice']}")
    rows = [
        [j["job"], "passed" if j["passed"] else "**failed**: " + j["why"][:300].replace("|", "/"), _seconds(j)]
        for j in jobs
    ]
    lines += ["", *_part("Jobs", ("job", "result", "seconds"), rows)]
    for part in (_checks, _losses, _example, _scaling, _context, _failures):
        lines += part([j for j in jobs if j["found"]])
    return "\n".join(lines).rstrip() + "\n"


def _seconds(job: Job) -> str:
    return f"{max((p['seconds'] for p in job['processes']), default=0):.0f}"


def _part(title: str, headings: Sequence[str], rows: list[list[str]]) -> list[str]:
    return [f"## {title}", "", markdown(list(headings), rows), ""] if rows else []


def _of(jobs: list[Job], part: str, has: str) -> list[tuple[Job, dict[str, Any]]]:
    """Returns the jobs of a part, each with its first rank's row, where that has a field."""
    firsts = [(j, j["found"][0] if isinstance(j["found"], list) else j["found"]) for j in jobs if j["part"] == part]
    return [(j, row) for j, row in firsts if row and has in row]


def _checks(jobs: list[Job]) -> list[str]:
    rows = []
    for job, row in _of(jobs, "checks", "failed"):
        count = f"{row['samples']} of {row['planned']} samples, {row['ways']} shardings" if "samples" in row else ""
        left = f", not {', '.join(row['left_out'])}: no time" if row.get("left_out") else ""
        done = count or f"{len(row.get('checks', ()))} checks{left}"
        rows.append([job["job"], done, str(len(row["failed"])), str(len(row.get("fallbacks", ())))])
    return _part("Checks on every rank", ("job", "done", "failed", "messages of inputs without a kernel"), rows)


def _losses(jobs: list[Job]) -> list[str]:
    rows = [
        [
            name,
            f"{float(of['losses'][0]):.5f} to {float(of['losses'][-1]):.5f}",
            f"{float(of['difference']):.1e}",
            f"{of['equal_bits']} of {len(of['losses'])}",
            ", ".join(f"{k.removeprefix('routed ')} {n}" for k, n in of["counters"].items() if k.startswith("routed")),
            str(of.get("graphs", "")),
        ]
        for _, row in _of(jobs, "fsdp", "variants")
        for name, of in row["variants"].items()
        if "difference" in of
    ]
    headings = ("variant", "loss", "largest relative difference", "equal bits", "routed", "graphs")
    return _part("Losses against one rank that trains on all batches", headings, rows)


def _example(jobs: list[Job]) -> list[str]:
    rows = [
        [f"{len(row['losses'] or ())} steps", "yes" if row["nothing_lost"] else "**no**", ", ".join(row["checkpoints"])]
        for _, row in _of(jobs, "fsdp", "nothing_lost")
    ]
    return _part("examples/train_fsdp.py, killed and resumed", ("trained", "losses equal in bits", "checkpoints"), rows)


def _scaling(jobs: list[Job]) -> list[str]:
    lines = []
    for job, row in _of(jobs, "scaling", "rows"):
        ranks = len(job["processes"])
        rows = []
        for r in row["rows"]:
            judged = r["variant"] in (*POLICIES, "DDP") and ranks == BAR_RANKS
            verdict = ("met" if r["ratio"] >= BAR else "**not met**") if judged else ""
            speed = f"{r['tokens_a_second_a_rank']:,.0f}"
            rows.append([r["variant"], f"{r['median_ms']:.2f}", speed, f"{r['ratio']:.3f}", verdict])
        size = row["size"]
        title = (
            f"Weak scaling on {ranks} ranks: D = {size['dim']}, {size['layers']} layers, {row['parameters'] / 1e6:.0f} M "
            f"parameters, {size['batch']} x {size['seq']} tokens a rank"
        )
        bar = f"bar {BAR} on {BAR_RANKS}"
        lines += _part(title, ("variant", "ms a step", "tokens a second a rank", "of one rank alone", bar), rows)
    return lines


def _context(jobs: list[Job]) -> list[str]:
    rows = []
    for _, row in _of(jobs, "context", "rows"):
        for r in row["rows"]:
            rows += [[f"{row['operator']}, {r['variant']}", what, *_cells(r, what)] for what in r["ms"]]
    headings = (
        "operator",
        "",
        "ms",
        "against one rank",
        "MB sent a rank",
        "peak MB",
        "bits of outputs",
        "error of gradients",
    )
    tokens = {str(row["tokens"]) for _, row in _of(jobs, "context", "rows")}
    return _part(f"Context parallelism at {', '.join(sorted(tokens))} tokens", headings, rows)


def _cells(r: dict[str, Any], what: str) -> list[str]:
    faster = f"{r['speedup'][what]:.2f} x" if "speedup" in r else ""
    peak = "" if r["peak_mb"][what] is None else f"{r['peak_mb'][what]:,.0f}"
    cells = [f"{r['ms'][what]:.3f}", faster, f"{r['sent_bytes'][what] / 1e6:.2f}", peak]
    if "results" not in r:
        return [*cells, "", ""]
    results = r["results"]
    return [
        *cells,
        "equal" if results["equal_bits"] else f"{float(results['output_error']):.1e}",
        f"{float(results['gradient_error']):.1e}",
    ]


def _failures(jobs: list[Job]) -> list[str]:
    rows = []
    for job in jobs:
        if job["part"] == "failures" and job["job"].startswith("a rank dies"):
            for end, row in zip(job["processes"][:-1], job["found"][:-1], strict=True):
                how = (row or {}).get("raised") or f"ended by the backend, exit code {end['code']}"
                rows.append(
                    [
                        job["job"],
                        str(end["rank"]),
                        how[:200].replace("|", "/").replace("\n", " "),
                        f"{end['seconds']:.0f}",
                    ]
                )
    return _part("A rank that dies", ("job", "rank", "error", "seconds"), rows) + _one_process(jobs)


def _one_process(jobs: list[Job]) -> list[str]:
    words: Callable[[bool], str] = lambda same: "equal" if same else "**different**"  # noqa: E731
    rows = [
        [
            ", ".join(row["devices"]),
            words(row["equal_losses"]),
            f"{float(row['gradient_difference']):.1e}",
            words(all(row["ops"].values())),
        ]
        for _, row in _of(jobs, "failures", "devices")
    ]
    return _part("Several devices in one process", ("devices", "losses", "gradients differ by", "bits of ops"), rows)
