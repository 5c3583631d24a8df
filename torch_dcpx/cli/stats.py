"""`dcpx stats`: prints what the numbers of tensors are."""

from __future__ import annotations

from torch_dcpx.cli.output import FINE, put_json, put_result
from torch_dcpx.storage.object_url import Location
from torch_dcpx.views.stats import stats


def run_stats(
    path: Location, keys: tuple[str, ...], *, rank: int | None, limit: int, as_json: bool
) -> int:
    """Prints minimum, maximum, mean, norm, NaN and infinities. Returns the exit code."""
    report = stats(path, keys or None, rank=rank)
    if as_json:
        put_json(report)
    else:
        put_result(report, limit)
    return FINE
