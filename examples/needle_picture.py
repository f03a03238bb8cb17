# SPDX-License-Identifier: Apache-2.0
"""The picture of the needle example: accuracy by depth and length, speed by length, losses, selected blocks."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "dense, eager": "#bdbdbd",
    "dense, compiled": "#7a7a7a",
    "selected, eager": "#e08a2e",
    "selected, compiled": "#2a6fb0",
}
TOKENS = "tokens, eager"
TOKENS_COLOR = "#3f9b57"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10}


@dataclasses.dataclass
class Picture:
    """The data of the picture.

    ``accuracy[kind][length]``: the share of right answers for each depth. ``seconds[variant][length]``: the time of a
    forward. ``losses[variant]``: nats per answer by step. ``blocks``: for each question, which blocks it selected.
    ``holds``: the block that holds its answer. ``chosen``: for each question, the tokens that its index chose, if there
    was such a run.
    """

    accuracy: dict[str, dict[int, list[float]]]
    seconds: dict[str, dict[int, float]]
    losses: dict[str, list[float]]
    blocks: list[list[bool]]
    holds: list[int]
    block: int
    chosen: list[list[int]] | None = None


def tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def color(name: str) -> str:
    return TOKENS_COLOR if name == TOKENS else COLORS[name]


def draw(p: Picture, out: pathlib.Path, subtitle: str) -> None:
    """Writes the picture to ``out``, as PNG or in the format of its suffix."""
    count = len(p.accuracy)  # panels in the first row, above two
    layout: list[Any] = [
        [kind for kind in p.accuracy for _ in "12"],
        ["speed"] * count + ["loss"] * count,
        ["blocks"] * 2 * count,
    ]
    size = (5.5 * count if count == 2 else 13.5, 9.5)
    figure, panels = plt.subplot_mosaic(layout, figsize=size, height_ratios=[3, 3, 1.6], layout="constrained")
    for kind, by_length in p.accuracy.items():
        _accuracy(panels[kind], kind, by_length)
    speed = panels["speed"]
    for name, seconds in p.seconds.items():
        lengths = sorted(seconds)
        rate = [length / seconds[length] for length in lengths]
        speed.plot(lengths, rate, "o-", color=color(name), markersize=4, label=name)
    speed.set_xscale("log", base=2)
    speed.set_yscale("log")
    lengths = sorted({length for seconds in p.seconds.values() for length in seconds})
    speed.set_xticks(lengths, [tokens(n) for n in lengths])
    speed.minorticks_off()
    speed.set_title("bytes a second, one sequence forward", **TITLE)
    speed.set_xlabel("bytes")
    loss = panels["loss"]
    for (name, values), width in zip(p.losses.items(), (2.0, 3.5, 1.1, 2.0), strict=False):
        loss.semilogy(_smooth(values), color=color(name), linewidth=width, label=name)
    loss.set_title("nats an answer, training on long texts, mean of 10 steps", **TITLE)
    loss.set_xlabel("step")
    for axis in (speed, loss):
        axis.legend(frameon=False, fontsize=9)
        axis.grid(alpha=0.25)
    _blocks(panels["blocks"], p)
    figure.suptitle(f"Needles in Python's standard library ({subtitle})", fontsize=11)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _smooth(values: list[float], window: int = 10) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _accuracy(axis: Any, kind: str, by_length: dict[int, list[float]]) -> None:
    lengths = sorted(by_length)
    grid = [list(column) for column in zip(*(by_length[n] for n in lengths), strict=True)]
    axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, row in enumerate(grid):
        for x, share in enumerate(row):
            axis.text(x, y, f"{share:.2f}", ha="center", va="center", fontsize=8)
    count = len(grid)
    axis.set_xticks(range(len(lengths)), [tokens(n) for n in lengths])
    axis.set_yticks(range(count), [f"{100 * (i + 0.5) / count:.0f} %" for i in range(count)])
    axis.set_xlabel("bytes")
    axis.set_ylabel("depth of the needle")
    name = "attention to tokens" if kind == "tokens" else f"{kind} attention"
    axis.set_title(f"{name}: share of right answers", **TITLE)


def _blocks(axis: Any, p: Picture) -> None:
    axis.imshow([[float(b) for b in row] for row in p.blocks], cmap="Blues", aspect="auto", interpolation="nearest")
    axis.plot(p.holds, range(len(p.holds)), "x", color="#d62728", markersize=7, label="block of the answer")
    if p.chosen is not None:
        marks = [(at / p.block - 0.5, y) for y, row in enumerate(p.chosen) for at in row]
        axis.plot(*zip(*marks, strict=True), "|", color=TOKENS_COLOR, alpha=0.6, label="token that the index chose")
    chosen = sum(map(sum, p.blocks)) / max(1, sum(map(len, p.blocks)))
    axis.set_title(f"blocks of {p.block} bytes that each question selected ({100 * chosen:.1f} % of them)", **TITLE)
    axis.set_xlabel("block")
    axis.set_ylabel("question")
    axis.set_yticks(range(len(p.holds)))
    axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.9, 1.25 if p.chosen is None else 1.36))
