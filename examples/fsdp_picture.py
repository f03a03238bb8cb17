# SPDX-License-Identifier: Apache-2.0
"""The picture of ``train_fsdp.py``: the loss, and the tokens a second, by step."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(
    losses: Sequence[float], rates: Sequence[float], resumed: Sequence[int], out: pathlib.Path, title: str
) -> None:
    """Draws to ``out``; ``resumed`` are the steps at which a run went on from a checkpoint."""
    figure, (loss, rate) = plt.subplots(2, 1, sharex=True, figsize=(9, 5.5), height_ratios=[3, 2], layout="constrained")
    loss.plot(losses, color="#2a6fb0", linewidth=1.5)
    loss.set_ylabel("nats a byte")
    loss.set_title(title, loc="left", fontsize=10)
    rate.plot(rates, ".", color="#e08a2e", markersize=4)
    typical = statistics.median(rates)
    rate.axhline(typical, color="#e08a2e", linewidth=1, label=f"median {typical:,.0f}")
    rate.set_ylabel("tokens a second")
    rate.set_xlabel("step")
    rate.set_ylim(bottom=0)
    for panel in (loss, rate):
        panel.grid(alpha=0.25)
        for step in resumed:
            panel.axvline(step, color="#555555", linestyle=":", linewidth=1)
    if resumed:
        loss.plot([], [], ":", color="#555555", label="resumed from a checkpoint")
        loss.legend(frameon=False, fontsize=9)
    rate.legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=110)
    plt.close(figure)
