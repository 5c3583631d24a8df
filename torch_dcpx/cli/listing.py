"""`dcpx verify` and `dcpx repair`: print what the library returns."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch_dcpx._text import counted
from torch_dcpx.cli.output import (
    CANNOT,
    FINE,
    UNSOUND,
    exit_code,
    put_error,
    put_json,
    put_lines,
    put_problem,
    showing_progress,
)
from torch_dcpx.errors import DcpxError, NotCommittedError, RepairError, StorageError
from torch_dcpx.integrity.contents import open_checkpoint, open_contents, refuse_several
from torch_dcpx.integrity.facts import Facts, facts_of_export
from torch_dcpx.integrity.findings import RepairReport
from torch_dcpx.integrity.repair import accepting, repair
from torch_dcpx.integrity.states import Seen, State, state_at, state_of, walk
from torch_dcpx.integrity.verify import verify
from torch_dcpx.integrity.way_out import settled
from torch_dcpx.reader.hints import command
from torch_dcpx.reader.safetensors import names_file
from torch_dcpx.storage.names import is_metadata_name
from torch_dcpx.storage.object_url import Location
from torch_dcpx.views.inspect import described
from torch_dcpx.views.ls import listed


class _Verified(NamedTuple):
    """Holds what `verify` says of one place."""

    code: int
    lines: list[str]
    row: dict[str, Any]  # of the JSON
    state: str


def run_verify(paths: Sequence[Location], *, workers: int | None, as_json: bool) -> int:
    """Prints a report of `verify` for each checkpoint at these paths. Returns the exit code: damage
    that was found counts more than what could not be looked at.

    Raises: StorageError: at one of these paths is no checkpoint.
    """
    found: dict[Location, _Verified] = {}
    for path in dict.fromkeys(paths):
        is_any = False
        for seen in _seen_at(path):
            is_any = is_any or seen is None or seen.state.kind != "none"
            where = path if seen is None else seen.path
            if seen is not None and seen.state.kind == "none":
                one = _unverified(seen, seen.state, is_named=False)
            elif where in found:
                continue
            else:
                one = _verified(path, seen, workers, as_json=as_json)
                found[where] = one
            put_lines(() if as_json else one.lines)
        if not is_any:
            text = f"'{path}' holds no checkpoint, nor does what lies beneath it"
            raise StorageError(text, errno=errno.ENOENT, path=str(path))
    rows = [one.row for one in found.values()]
    if as_json:
        put_json(rows[0] if list(found) == list(paths) and len(rows) == 1 else rows)
    elif len(rows) > 1:
        put_lines([_summary(found.values())])
    codes = {one.code for one in found.values()}
    return UNSOUND if UNSOUND in codes else max(codes, default=FINE)


def _seen_at(path: Location) -> Iterator[Seen | None]:
    """Yields what a path means for `verify`: None stands for files of an export at the path."""
    if names_file(path):
        yield None
        return
    is_any = False
    for seen in walk(path):
        is_any = is_any or seen.state.kind != "none"
        if seen.state.kind != "none" or (seen.state.text and not _is_own(seen, path)):
            yield seen
    if not is_any:
        with open_contents(path) as contents:
            refuse_several(path, contents.look.names)
            is_export = contents.artifact is not None
        if is_export:
            yield None


def _is_own(seen: Seen, path: Location) -> bool:
    return seen.state.is_export and seen.path == path


def _verified(
    path: Location, seen: Seen | None, workers: int | None, *, as_json: bool
) -> _Verified:
    """Verifies one place: one that cannot be read hides no other."""
    where = path if seen is None else seen.path
    if seen is not None:
        state = seen.state
        if seen.place is not None and seen.look is not None:
            state = settled(seen.place, state, seen.look.names)
        if state.kind in ("saving", "removed", "unreadable"):
            return _unverified(seen, state, is_named=where == path)
    began = time.time()
    try:
        with showing_progress(f"verify {where.name}", is_shown=not as_json) as tell:
            report = verify(where, workers=workers, progress=tell)
            if not report.ok and seen is not None and _is_new(where, began):
                report = verify(where, workers=workers, progress=tell)
        told = {"ok": report.ok, "proved": report.proved}
        row: dict[str, Any] = {**told, **_facts(path, seen), **vars(report)}
    except DcpxError as error:
        if seen is None or where == path:
            raise
        now = state_at(where)
        if now.kind in ("saving", "removed", "none"):  # meanwhile
            return _unverified(seen, now, is_named=False)
        return _unverified(seen, State("unreadable", str(error), error=error), is_named=False)
    if seen is not None and not report.ok:
        now = state_at(where)
        if now.kind in ("saving", "removed", "none"):  # meanwhile
            return _unverified(seen, now, is_named=where == path)
    code = FINE if report.ok else UNSOUND
    return _Verified(code, str(report).splitlines(), row, "whole" if report.ok else "with faults")


def _is_new(path: Location, since: float) -> bool:
    """Returns whether a save has committed since a time, or is under way."""
    try:
        with open_checkpoint(path) as place:
            state, look = state_of(place)
    except NotCommittedError:
        return False
    dates = map(look.modified_s, filter(is_metadata_name, look.names))
    return bool(state.saving) or any(date is not None and date >= since - 1 for date in dates)


def _facts(path: Location, seen: Seen | None) -> dict[str, Any]:
    """Returns what `Facts` has, of an export less."""
    if seen is None:
        with open_contents(path) as contents:
            return facts_of_export(path, contents.look, contents.artifact or "")._asdict()
    row = listed(seen)
    return {name: getattr(row, name) for name in Facts._fields}


def _unverified(seen: Seen, state: State, *, is_named: bool) -> _Verified:
    """Returns what is said of a place that is no checkpoint: beneath a root it is no fault."""
    is_wrong = state.kind == "unreadable" or is_named
    code = FINE
    if is_wrong:
        code = CANNOT if state.error is None else exit_code(state.error)
    facts = {**_facts(seen.path, seen), "state": state.kind}
    row = {"ok": not is_wrong, **facts, "path": str(seen.path), "problem": state.text}
    text = f"'{seen.path}' is not verified: {state.text or 'it has gone'}"
    return _Verified(code, [text], {**row, "findings": []}, state.kind)


def _summary(found: Iterable[_Verified]) -> str:
    counts = Counter(one.state for one in found)
    verified = counts.pop("whole", 0) + counts["with faults"]
    text = f"{counted(verified, 'checkpoint')}, {counts.pop('with faults', 0)} with faults"
    words = {"saving": "being saved", "unreadable": "unreadable", "none": "gone meanwhile"}
    return ", ".join([text, *(f"{n} {words.get(kind, kind)}" for kind, n in counts.items())])


def run_repair(path: Location, *, as_json: bool, **arguments: Any) -> int:
    """Prints the report of `repair`. Returns the exit code: of a dry run, that of the repair."""
    try:
        report = repair(path, **arguments)
    except RepairError as error:
        if arguments["files"] is None and state_at(path).kind in ("none", "removed"):
            put_error(error, as_json=as_json)
            return CANNOT
        found = described(path) if error.is_good else []
        faults = [fault for each in found for fault in each.faults]
        if faults:
            error.message += f"; it mends no data: {faults[0]} ({command('verify', path)})"
        if faults or not error.is_good:
            raise
        if as_json:
            nothing = RepairReport(str(path), (), arguments["dry_run"])
            put_json({"assumptions": (), **vars(nothing)})
        else:
            put_lines([f"nothing to do: {error}"])
        return FINE
    if as_json:
        put_json({"assumptions": report.assumptions, **vars(report)})
    else:
        put_lines(str(report).splitlines())
    if not report.assumptions or arguments["accept_assumptions"]:
        return FINE
    line = accepting(path, arguments["files"], arguments["rank_local"])
    put_problem(f"nothing was written: where you know what is assumed, {line} writes it")
    return UNSOUND
