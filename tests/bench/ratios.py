"""What the rounds of a comparison say: spreads, and ratios within each round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def speed_ratio(times: Mapping[str, Sequence[float]], side: str, base: str) -> dict[str, float]:
    """Returns how many times as fast `side` is as `base`: the spread of the rounds' ratios.

    Rounds in which only one of both ran are left out.
    """
    return spread([b / a for a, b in zip(times[side], times[base], strict=False)])
