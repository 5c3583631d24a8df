"""`dcpx inspect`: prints and draws what `dcpx.inspect` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_dcpx._gc import paused_gc
from torch_dcpx._text import human_bytes
from torch_dcpx.cli.inspect_page import inspect_data
from torch_dcpx.cli.output import FINE, UNSOUND, not_shown, put_json, put_lines, put_table
from torch_dcpx.cli.page import Page, put_written
from torch_dcpx.integrity.facts import Facts
from torch_dcpx.reader.hints import command
from torch_dcpx.storage.object_url import Location
from torch_dcpx.views.inspect import Described, inspect


@paused_gc()
def show(
    path: Location,
    keys: Sequence[str],
    *,
    with_parts: bool,
    limit: int,
    as_json: bool,
    page: Page | None,
) -> int:
    """Prints the checkpoint at `path`, and draws it on `page`. Returns the exit code."""
    found = inspect(path, keys)
    if page is not None:
        page.write("inspect", inspect_data(path, keys, found.saves))
    if as_json:
        put_json([_json(each, with_parts) for each in found.saves])
    else:
        for each in found.saves:
            _put(each, limit, with_parts)
        put_written(page)
    return UNSOUND if found.faults else FINE


def _json(found: Described, with_parts: bool) -> dict[str, Any]:
    items = [
        {**vars(item), "parts": item.parts if with_parts else len(item.parts)}
        for item in found.items
    ]
    names = ["path", "metadata_file", "written_by", *Facts._fields, "files", "nbytes", "faults"]
    names += ["parameters", "dtypes", "stored_nbytes"]
    return {**{name: getattr(found, name) for name in names}, "items": items}


def _put(found: Described, limit: int, with_parts: bool) -> None:
    way = [f"{command('verify', found.path)} says what can be done"] if found.faults else []
    put_lines([found.origin(), found.sums(), *found.faults, *way, ""])
    columns, rows = found.table()
    shown = min(limit or len(rows), len(rows))
    left = len(rows) - shown
    if with_parts:
        columns = ["dtype", "offsets", "sizes", "file", "#at byte", "#stored", "name"]
        rows = [
            (
                item.dtype or "object",
                list(part.offsets) if item.dtype else "",
                list(part.sizes) if item.dtype else "",
                part.file,
                part.offset,
                human_bytes(part.nbytes),
                item.fqn,
            )
            for item in found.items[:shown]
            for part in item.parts
        ]
        put_table(columns, rows)
    else:
        put_table(columns, rows[:shown])
    put_lines(not_shown(left))
