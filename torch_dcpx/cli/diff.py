"""`dcpx diff`: prints how two checkpoints differ, and draws it."""

from __future__ import annotations

import math
from typing import Any

from torch_dcpx._text import printable
from torch_dcpx.cli.output import FINE, UNSOUND, put_json, put_result
from torch_dcpx.cli.page import Page, put_written
from torch_dcpx.storage.object_url import Location
from torch_dcpx.views.diff import DiffReport, diff


def run_diff(
    a: Location, b: Location, *, limit: int, as_json: bool, page: Page | None, **choices: Any
) -> int:
    """Prints how two checkpoints differ, and draws it on `page`. Returns the exit code: 1 if they
    do. `choices` are those of `dcpx.diff`.
    """
    report = diff(a, b, **choices)
    if page is not None:
        page.write("diff", _drawn(report))
    if as_json:
        put_json(_json(report))
    else:
        put_result(report, limit)
        put_written(page)
    return FINE if report.is_equal else UNSOUND


def _json(report: DiffReport) -> dict[str, Any]:
    whole = {name: value for name, value in vars(report).items() if name != "names"}
    return {**whole, "equal": report.equal, "differences": report.differences}


def _drawn(report: DiffReport) -> dict[str, Any]:
    """Returns what the page shows; of its items a list for each column."""
    columns: dict[str, list[Any]] = {
        "name": [printable(one.name) for one in report.names],
        "what": ["values" if one.what == "bits" else one.what for one in report.names],
    }
    for column in ("a", "b", "bytes_a", "bytes_b", "elements", "different", "max_abs", "rel"):
        columns[column] = [_plain(getattr(one, column)) for one in report.names]
    facts = {name: getattr(report, name) for name in ("equal", "read_bytes", "by_sums")}
    return {"a": printable(report.a), "b": printable(report.b), **facts, "items": columns}


def _plain(value: Any) -> Any:
    """Returns a value of JSON: "nan" and "inf" are texts there."""
    if isinstance(value, str):
        return printable(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
