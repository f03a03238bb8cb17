# SPDX-License-Identifier: Apache-2.0
"""The picture of the training examples: two loss curves, their difference, and two speeds."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"eager": "#e08a2e", "compiled": "#2a6fb0"}
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10}


class Curve(Protocol):
    """The data of a run that is drawn: nats per byte by step, tokens per second, seconds."""

    name: str
    loss: list[float]
    valid: list[tuple[int, float]]
    compile_s: float
    tokens_per_s: float


def draw(runs: Sequence[Curve], out: pathlib.Path, title: str, subtitle: str) -> None:
    """Draws the runs to ``out``, as PNG or in the format of its suffix. The first run is the baseline."""
    figure, panels = plt.subplot_mosaic(
        [["loss", "speed"], ["gap", "speed"]],
        figsize=(11, 5.5),
        width_ratios=[2.2, 1],
        height_ratios=[3, 1],
        layout="constrained",
    )
    loss, gap, speed = panels["loss"], panels["gap"], panels["speed"]
    for run, width, alpha, style in zip(runs, (3.5, 1.1), (0.55, 1.0), ("s", "x"), strict=True):
        color = COLORS[run.name]
        loss.plot(run.loss, color=color, linewidth=width, alpha=alpha, label=f"{run.name}, training")
        loss.plot(
            *zip(*run.valid, strict=True),
            style,
            color=color,
            markersize=8,
            label=f"{run.name}, validation {run.valid[-1][1]:.3f}",
        )
    loss.set_ylabel("nats a byte")
    loss.set_title("loss: same seed, same batches", **TITLE)
    loss.legend(frameon=False, fontsize=9)
    loss.grid(alpha=0.25)
    loss.tick_params(labelbottom=False)
    gap.sharex(loss)
    difference = [abs(a - b) or math.nan for a, b in zip(runs[0].loss, runs[1].loss, strict=True)]
    gap.semilogy(difference, ".", color="#555555", markersize=3)
    equal = sum(math.isnan(d) for d in difference)
    gap.set_title(f"difference of the two training losses ({equal} of {len(difference)} are equal)", **TITLE)
    gap.set_ylabel("|difference|")
    gap.set_xlabel("step")
    gap.grid(alpha=0.25)

    names = [run.name for run in runs]
    bars = speed.bar(names, [run.tokens_per_s for run in runs], color=[COLORS[name] for name in names], width=0.6)
    labels = [f"{run.tokens_per_s:,.0f}\n{run.tokens_per_s / runs[0].tokens_per_s:.2f} x" for run in runs]
    speed.bar_label(bars, labels, padding=3)
    speed.margins(y=0.15)
    speed.set_title("tokens a second (median step)", **TITLE)
    speed.set_xlabel(f"compile time, not counted: {max(0.0, runs[-1].compile_s):.1f} s")
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right"):
        speed.spines[side].set_visible(False)
    figure.suptitle(f"{title} on Python's standard library ({subtitle})", fontsize=11)
    figure.savefig(out, dpi=130)
    plt.close(figure)
