"""Draws a result of a bench as bars, one group a case: docs/develop/performance-save.svg.

python tests/bench/plot.py build/bench/save.json --svg docs/develop/performance-save.svg
python tests/bench/plot.py build/bench/load.json --svg docs/develop/performance-load.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
# Text as text, and nothing random: the same result gives the same file.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "torch-dcpx", "font.size": 9})

from cases import ALL_CASES  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from tables import title  # noqa: E402

COLORS = {
    "raw": "#9a9a9a", "engine": "#7fb2e5", "ours": "#1f6fb4", "dcpx": "#123f66",
    "ours_unverified": "#4a90d0", "stock_files": "#9b7fc4",
    "stock": "#d98b3a", "stock2": "#edc08e", "safetensors": "#6aa66a",
}  # fmt: skip
LABELS = {
    "raw": "the limit", "engine": "ours, in C++", "ours": "ours",
    "dcpx": "torch_dcpx.save and load",
    "ours_unverified": "ours, unverified", "stock_files": "ours, of stock's files",
    "stock": "stock", "stock2": "stock, 2 threads", "safetensors": "safetensors",
}  # fmt: skip


def value_of(result: dict[str, Any], seconds: float, *, is_rate: bool) -> float:
    return result["bytes"] / seconds / 1e9 if is_rate else seconds


def draw_group(ax: Axes, results: list[dict[str, Any]], *, is_rate: bool) -> None:
    """Draws the medians as bars, and from least to most as whiskers."""
    sides = [side for side in COLORS if any(side in r["seconds"] for r in results)]
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        shown = [(i, r) for i, r in enumerate(results) if side in r["seconds"]]
        spreads = [r["seconds"][side] for _, r in shown]
        heights, ends = [], []
        for (_, result), seconds in zip(shown, spreads, strict=True):
            height = value_of(result, seconds["median"], is_rate=is_rate)
            end = [value_of(result, seconds[k], is_rate=is_rate) for k in ("min", "max")]
            heights.append(height)
            ends.append((height - min(end), max(end) - height))
        where = [i + (number - (len(sides) - 1) / 2) * width for i, _ in shown]
        ax.bar(where, heights, width, color=COLORS[side], label=LABELS[side])
        ax.errorbar(where, heights, list(zip(*ends, strict=True)), fmt="none", ecolor="#333333",
                    elinewidth=0.8, capsize=2)  # fmt: skip
    ax.set_xticks(range(len(results)), [title(r).replace(", ", "\n") for r in results])
    ax.set_ylabel("GB/s" if is_rate else "seconds")
    ax.spines[["top", "right"]].set_visible(False)


def draw(report: dict[str, Any], svg: Path, ranks: int = 1) -> None:
    """Writes the plot: rates where bytes dominate, seconds (logarithmic) where items do."""
    timed = [r for r in report["results"] if r["ranks"] == ranks and r.get("seconds")]
    big = [r for r in timed if ALL_CASES[r["case"]].full.item_bytes >= 1 << 16]
    small = [r for r in timed if r not in big]
    groups = [(group, is_rate) for group, is_rate in ((big, True), (small, False)) if group]
    width = max(8, *(1.4 * len(group) for group, _ in groups))
    fig, axes = plt.subplots(len(groups), 1, figsize=(width, 3 * len(groups)), squeeze=False)
    for ax, (group, is_rate) in zip(axes[:, 0], groups, strict=True):
        draw_group(ax, group, is_rate=is_rate)
        if not is_rate:
            ax.set_yscale("log")
    what = "A load" if report["bench"] == "load" else "A durable save"
    axes[0, 0].set_title(f"{what}: higher is better", loc="left")
    if len(groups) > 1:
        axes[1, 0].set_title("Many small items: lower is better", loc="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, 0.05, 1, 1))
    fig.savefig(svg, metadata={"Date": None})
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    draw(json.loads(args.report.read_text()), args.svg, args.ranks)


if __name__ == "__main__":
    main()
