"""`dcpx gc`: lists, or removes, what failed saves have left in directories of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_dcpx._text import counted, human_bytes
from torch_dcpx.cli.listing import checkpoints_at
from torch_dcpx.cli.output import FINE, exit_code, put_json, put_lines, put_table
from torch_dcpx.errors import DcpxError
from torch_dcpx.integrity.leftovers import GRACE_S, find_leftovers, remove_leftovers
from torch_dcpx.storage.object_url import Location, ObjectUrl


def run_gc(paths: Sequence[Location], *, delete: bool, grace_s: float | None, as_json: bool) -> int:
    """Prints the leftovers at `paths`. Returns the exit code: that of the worst error."""
    rows: list[dict[str, Any]] = []
    code = FINE
    for place in dict.fromkeys(place for path in paths for place in checkpoints_at(path)):
        state, problem = "left", ""
        try:
            found = find_leftovers(place)
            is_known = found.is_committed or found.is_removed
            if found.files and not is_known and not (delete and place in paths):
                problem = (
                    f"no metadata: if it was a checkpoint, `dcpx repair {place}` may make it; "
                )
                problem += "--delete removes it only if it is named"
            elif found.files and delete:
                left = found.files
                found, state = remove_leftovers(place, grace_s), "removed"
                young = {name: size for name, size in left.items() if name not in found.files}
                if young and isinstance(place, ObjectUrl):
                    grace = GRACE_S if grace_s is None else grace_s
                    stays = f"younger than {grace:.0f} s: a save may be under way; see --grace"
                    rows.append(_row(place, "left", young, stays))
        except DcpxError as error:
            rows.append(_row(place, "unknown", {}, str(error)))
            code = max(code, exit_code(error))
            continue
        if found.files:
            rows.append(_row(place, state, found.files, problem))
    if as_json:
        put_json(rows)
        return code
    if not rows:
        put_lines([f"no file there is left by a save: {', '.join(map(str, paths))}"])
        return code
    put_table(
        ["directory", "state", "#files", "#size", "problem"],
        (
            (
                row["path"],
                row["state"],
                len(row["files"]),
                human_bytes(row["nbytes"]),
                row["problem"],
            )
            for row in rows
        ),
    )
    files = sum(len(row["files"]) for row in rows if row["state"] == "left" and not row["problem"])
    if files and not delete:
        put_lines(
            [f"{counted(files, 'file')} left by saves that did not end: --delete removes them"]
        )
    return code


def _row(place: Location, state: str, files: dict[str, int], problem: str) -> dict[str, Any]:
    total = sum(files.values())
    return {"path": place, "state": state, "files": files, "nbytes": total, "problem": problem}
