"""What a reader asks of a result: speeds, ratios, and whether each figure is reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ratios import speed_ratio, spread

MIB = 1 << 20


class Target(NamedTuple):
    """A figure to reach. `bound` is the least, or with `is_most` the most it may be.

    `what` is "speed" (side over base, by rounds), "time" (its inverse), a meter of `side`, or a
    ratio of what it read. `cache` is the state of the page cache, where there are several; `ranks`
    the number of processes.
    """

    title: str
    cases: tuple[str, ...]
    what: str
    side: str
    base: str
    bound: float
    is_most: bool = False
    cache: str = ""
    ranks: int = 1


ALL = ("64mib", "4gib", "64kib", "4kib", "scalars", "tiny")
SAVE_TARGETS = (
    Target("speed of the raw limit", ("64mib", "4gib"), "speed", "ours", "raw", 0.90),
    Target("speed of stock", ("64mib", "4gib"), "speed", "ours", "stock", 2.4),
    Target("speed of stock", ("64kib",), "speed", "ours", "stock", 6.0),
    Target("speed of safetensors", ("64kib",), "speed", "ours", "safetensors", 1.0),
    Target("speed of stock", ("64kib",), "speed", "dcpx", "stock", 10.0),
    Target("speed of safetensors", ("64kib",), "speed", "dcpx", "safetensors", 1.0),
    Target("the C++ call: speed of the raw limit", ("64kib",), "speed", "engine", "raw", 0.85),
    Target("speed of stock", ("scalars",), "speed", "ours", "stock", 1.5),
    Target("speed of stock", ("4kib",), "speed", "ours", "stock", 8.0),
    Target("time of stock", ("tiny",), "time", "ours", "stock", 1.2, is_most=True),
    Target("peak extra memory, MiB", ALL, "extra_peak_mib", "ours", "", 128, is_most=True),
    Target("memory from save 3 to 30, growth in %", ALL, "growth", "ours", "", 1, is_most=True),
    Target("counting thread, a core free", ("64mib", "4gib"), "counting", "ours", "", 0.9),
)


LOADED = ("64mib", "64kib", "scalars", "tiny", "rows", "columns")


def warm(*fields: Any, is_most: bool = False) -> Target:
    return Target(*fields, is_most=is_most, cache="warm")


LOAD_TARGETS = (
    warm("speed of the raw limit", ("64mib",), "speed", "ours_unverified", "raw", 0.95),
    warm("speed of the raw limit", ("64mib",), "speed", "ours", "raw", 0.76),
    warm("speed of stock", ("64mib",), "speed", "ours", "stock", 5.2),
    Target("speed of the raw limit", ("64mib",), "speed", "ours", "raw", 0.9, cache="cold"),
    warm("speed of stock", ("64kib",), "speed", "ours", "stock", 5.0),
    warm("speed of stock", ("64kib",), "speed", "dcpx", "stock", 12.0),
    warm("speed of safetensors", ("64kib",), "speed", "dcpx", "safetensors", 1.0),
    warm("speed of stock", ("scalars",), "speed", "ours", "stock", 1.0),
    warm("time of stock", ("tiny",), "time", "ours", "stock", 1.2, is_most=True),
    warm("bytes read / needed", ("rows",), "engine_read", "ours", "", 1.02, is_most=True),
    warm("... by the kernel's count", ("rows",), "rchar", "ours", "", 1.02, is_most=True),
    # 1 % for the blocks at both ends of an item.
    warm("bytes read / whole items", ("columns",), "of_items", "ours", "", 1.01, is_most=True),
    warm(
        "bytes read / needed", ("columns",), "engine_read", "ours_unverified", "", 1.5,
        is_most=True,
    ),
    warm("... by the kernel's count", ("columns",), "rchar", "ours_unverified", "", 1.5,
         is_most=True),
    warm("speed of stock", ("rows",), "speed", "ours", "stock", 4.0),
    warm("speed of stock", ("columns",), "speed", "ours", "stock", 2.0),
    warm("speed of stock", ("columns",), "speed", "ours_unverified", "stock", 3.0),
    warm(
        "time of our own files", ("64mib", "64kib", "rows", "columns"), "time", "stock_files",
        "ours_unverified", 1.1, is_most=True,
    ),
    warm("peak extra memory, MiB", LOADED, "extra_peak_mib", "ours", "", 128, is_most=True),
)  # fmt: skip


BUDGET_MIB = 64  # `WriteOptions.host_memory_bytes`
EXPORT_TARGETS = tuple(
    target
    for ranks in (1, 2)
    for target in (
        Target("time of a save", ("64mib",), "time", "live", "save", 1.5, True, ranks=ranks),
        Target(
            "time of a load and a save", ("64mib",), "time", "stored", "load_and_save", 1.25, True,
            ranks=ranks,
        ),
        *(
            Target(
                "peak extra memory, MiB", ("64mib", "64kib"), "extra_peak_mib", side, "",
                BUDGET_MIB, True, ranks=ranks,
            )
            for side in ("live", "stored")
        ),
    )
)  # fmt: skip


def figure(target: Target, result: dict[str, Any]) -> dict[str, float] | None:
    """Returns the target's figure in a result of its case, None where it was not measured."""
    times = result.get("times", {})
    if target.what in ("speed", "time"):
        if not times.get(target.side) or not times.get(target.base):
            return None
        if target.what == "speed":
            return speed_ratio(times, target.side, target.base)
        return speed_ratio(times, target.base, target.side)
    if target.what in ("engine_read", "rchar", "of_items"):
        read = result.get("bytes_read", {}).get(target.side)
        if read is None:
            return None
        if target.what == "of_items":
            return spread([read["engine_read"] / result["item_bytes"]])
        return spread([read[target.what] / result["bytes"]])
    meters = result.get("meters", {}).get(target.side, {})
    if target.what == "extra_peak_mib" and "extra_peak_bytes" in meters:
        return spread([meters["extra_peak_bytes"] / MIB])
    if target.what == "growth" and "rss_bytes_after" in meters:
        after = meters["rss_bytes_after"]
        return spread([100 * (after["30"] / after["3"] - 1)])
    if target.what == "counting" and "counting" in meters:
        return spread([meters["counting"]["one worker"]])
    return None


def is_reached(target: Target, value: float) -> bool:
    return value <= target.bound if target.is_most else value >= target.bound


def summarize(report: dict[str, Any], targets: Sequence[Target] = SAVE_TARGETS) -> dict[str, Any]:
    """Returns the report with spreads, ratios to ours, and a row for each target and case."""
    for result in report["results"]:
        times = result.get("times", {})
        result["seconds"] = {side: spread(values) for side, values in times.items() if values}
        result["ours_speed_of"] = {
            side: speed_ratio(times, "ours", side)
            for side in times
            if side != "ours" and times.get("ours") and times[side]
        }
    by_case = {
        (result["case"], result.get("cache", ""), result["ranks"]): result
        for result in report["results"]
    }
    rows = []
    for target in targets:
        for case in target.cases:
            result = by_case.get((case, target.cache, target.ranks))
            found = None if result is None else figure(target, result)
            if found is None:
                continue
            row = {**target._asdict(), "case": case, "value": found}
            del row["cases"]
            rows.append({**row, "is_reached": is_reached(target, found["median"])})
    return {**report, "targets": rows}
