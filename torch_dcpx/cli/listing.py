"""`dcpx ls`, `dcpx verify` and `dcpx repair`: print checkpoints, and the library's reports."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from torch_dcpx._text import counted, human_bytes
from torch_dcpx.cli.output import (
    CANNOT,
    FINE,
    UNSOUND,
    is_of_checkpoint,
    put_json,
    put_lines,
    put_table,
    showing_progress,
)
from torch_dcpx.errors import DcpxError, NotCommittedError, RepairError, StorageError
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.integrity.findings import RepairReport, VerifyReport
from torch_dcpx.integrity.repair import repair
from torch_dcpx.integrity.verify import verify
from torch_dcpx.reader.safetensors import names_file
from torch_dcpx.storage.names import Look, is_data_file_name, is_metadata_name, is_temporary_name
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.views.inspect import described, described_in


class _Listed(NamedTuple):
    """One directory or prefix."""

    name: str
    state: str  # "whole", "damaged", "uncommitted", "unreadable" or "none"
    written_by: str = ""
    items: int = 0
    files: int = 0
    nbytes: int = 0
    problem: str = ""


def show(path: Location, *, with_all: bool, as_json: bool) -> int:
    """Prints the checkpoints at `path`. Returns the exit code.

    Raises: StorageError: it cannot be listed; of a URL, nothing is there.
    """
    with open_checkpoint(path) as place:
        look = place.look()
        if _are_files(look.names):
            found = [_listed(place, look, path.name or str(path))]
        else:
            beneath = look.beneath()
            if place.is_object and not (look.names or beneath):
                text = f"'{path}': the store holds nothing beneath it"
                raise StorageError(text, errno=errno.ENOENT, path=str(path))
            found = [_listed_at(path / name, name) for name in sorted(beneath, key=_in_order)]
    if not with_all:
        found = [each for each in found if each.state != "none"]
    if as_json:
        put_json(found)
    else:
        put_table(
            ["state", "written by", "#items", "#files", "#size", "name", "problem"],
            ((*each[1:5], human_bytes(each.nbytes), each.name, each.problem) for each in found),
        )
    states = {each.state for each in found}
    if states & {"damaged", "uncommitted"}:
        return UNSOUND
    return CANNOT if "unreadable" in states else FINE


def _in_order(name: str) -> list[str | int]:
    """Returns a key by which step-5 comes before step-10."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def holds_files(path: Location) -> bool:
    """Returns whether files of a checkpoint lie in a directory, or beneath a URL."""
    with open_checkpoint(path) as place:
        return _are_files(place.names())


def _are_files(names: Iterable[str]) -> bool:
    return any(
        is_metadata_name(name) or is_data_file_name(name) or is_temporary_name(name)
        for name in names
    )


def _listed_at(path: Location, name: str) -> _Listed:
    try:
        with open_checkpoint(path) as place:
            return _listed(place, place.look(), name)
    except DcpxError as error:
        return _unreadable(name, error)


def _unreadable(name: str, error: DcpxError) -> _Listed:
    state = "damaged" if is_of_checkpoint(error) else "unreadable"
    return _Listed(name, state, problem=f"{type(error).__name__}: {error}")


def _listed(place: Place, look: Look, name: str) -> _Listed:
    try:
        if not _are_files(look.names):
            return _Listed(name, "none")
        with being_read(place.path):
            found = described_in(place, look)
    except NotCommittedError as error:
        return _Listed(name, "uncommitted", problem=str(error))
    except DcpxError as error:
        return _unreadable(name, error)
    faults = [fault for each in found for fault in each.faults]
    state, problem = ("damaged", faults[0]) if faults else ("whole", "")
    items = sum(len(each.fqns) for each in found)
    nbytes = sum(each.nbytes for each in found)
    files: set[str] = set().union(*(each.files for each in found))
    return _Listed(name, state, found[0].written_by, items, len(files), nbytes, problem)


def run_verify(paths: Sequence[Location], *, workers: int | None, as_json: bool) -> int:
    """Prints a report of `verify` for each checkpoint at these paths. Returns the exit code."""
    places = list(dict.fromkeys(place for path in paths for place in checkpoints_at(path)))
    reports: list[VerifyReport] = []
    for place in places:
        with showing_progress(f"verify {place.name}", is_shown=not as_json) as tell:
            reports.append(verify(place, workers=workers, progress=tell))
        if not as_json:
            put_lines(str(reports[-1]).splitlines())
    found = [{"ok": report.ok, **vars(report)} for report in reports]
    damaged = sum(not report.ok for report in reports)
    if as_json:
        put_json(found[0] if places == list(paths) and len(found) == 1 else found)
    elif len(reports) > 1:
        put_lines([f"{counted(len(reports), 'checkpoint')}, {damaged} with faults"])
    return UNSOUND if damaged else FINE


@overload
def checkpoints_at(path: Path) -> list[Path]: ...
@overload
def checkpoints_at(path: Location) -> list[Location]: ...
def checkpoints_at(path: Location) -> Sequence[Location]:
    """Returns `path`, or the directories beneath it that hold files of checkpoints."""
    if names_file(path):
        return [path]
    with open_checkpoint(path) as place:
        look = place.look()
    if _are_files(look.names):
        return [path]
    return [path / name for name in look.beneath() if holds_files(path / name)] or [path]


def run_repair(path: Location, *, as_json: bool, **arguments: Any) -> int:
    """Prints the report of `repair`. Returns the exit code: of a dry run, that of the repair."""
    try:
        report = repair(path, **arguments)
    except RepairError as error:
        if not error.is_good or any(each.faults for each in described(path)):
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
    return UNSOUND if report.assumptions and not arguments["accept_assumptions"] else FINE
