"""Draw the pictures of docs/start: `make docs` runs this."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent / "start"
STYLE = {"svg.hashsalt": "mismatchctl", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}


def draw_estimators() -> None:
    """K1, K2 and K3 of one token against its log ratio."""
    x = np.linspace(-2, 2, 200)
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for label, y in (("K1 = -x", -x), ("K2 = x² / 2", x**2 / 2), ("K3 = exp(x) - 1 - x", np.exp(x) - 1 - x)):
        axes.plot(x, y, label=label)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(xlabel="log ratio x = train - rollout (nats)", ylabel="value of the token (nats)", ylim=(-2, 4.5))
    axes.legend(frameon=False)
    _save(figure, "estimators.svg")


def draw_corrections() -> None:
    """The weight of a token under truncation, and under rejection, against its ratio."""
    ratio = np.linspace(0, 4, 400)
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(ratio, ratio, color="0.6", linestyle=":", label="importance weight")
    axes.plot(ratio, np.minimum(ratio, 2), label="truncated at 2")
    axes.plot(ratio, np.where((ratio >= 0.5) & (ratio <= 2), ratio, np.nan), linewidth=4, alpha=0.5,
              label="rejected outside [0.5, 2]")  # fmt: skip
    axes.axvspan(0, 0.5, color="0.92", zorder=0)
    axes.axvspan(2, 4, color="0.92", zorder=0)
    axes.set(xlabel="importance ratio", ylabel="weight in the loss", xlim=(0, 4), ylim=(0, 4))
    axes.legend(frameon=False)
    _save(figure, "corrections.svg")


def _save(figure: plt.Figure, name: str) -> None:
    figure.savefig(FOLDER / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        draw_estimators()
        draw_corrections()
