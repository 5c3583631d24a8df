"""`dcpx ls`, `dcpx verify` and `dcpx repair`: print checkpoints, and the library's reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcpx._text import counted
from torch_dcpx.cli.inspect import described
from torch_dcpx.cli.output import (
    CANNOT,
    FINE,
    UNSOUND,
    human_bytes,
    is_of_checkpoint,
    put_json,
    put_lines,
    put_table,
    showing_progress,
)
from torch_dcpx.errors import DcpxError, NotCommittedError, RepairError
from torch_dcpx.integrity.artifact import find_artifact
from torch_dcpx.integrity.findings import RepairReport, VerifyReport
from torch_dcpx.integrity.repair import repair
from torch_dcpx.integrity.verify import verify
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import is_data_file_name, is_metadata_name, is_temporary_name


class _Listed(NamedTuple):
    """One directory."""

    name: str
    state: str  # "whole", "damaged", "uncommitted", "unreadable" or "none"
    written_by: str = ""
    items: int = 0
    files: int = 0
    nbytes: int = 0
    problem: str = ""


def show(path: Path, *, with_all: bool, as_json: bool) -> int:
    """Prints the checkpoints at `path`. Returns the exit code."""
    places = [path] if holds_files(path) else _beneath(path)
    found = [_listed(place, place.name or str(place)) for place in places]
    if not with_all:
        found = [each for each in found if each.state != "none"]
    if as_json:
        put_json(found)
    else:
        put_table(
            ["name", "state", "written by", "#items", "#files", "#size", "problem"],
            ((*each[:5], human_bytes(each.nbytes), each.problem) for each in found),
        )
    states = {each.state for each in found}
    if states & {"damaged", "uncommitted"}:
        return UNSOUND
    return CANNOT if "unreadable" in states else FINE


def holds_files(path: Path) -> bool:
    """Returns whether files of a checkpoint lie in a directory."""
    with Directory(path) as directory:
        return any(
            is_metadata_name(name) or is_data_file_name(name) or is_temporary_name(name)
            for name in directory.names()
        )


def _beneath(path: Path) -> list[Path]:
    with Directory(path) as directory:
        return [path / name for name in directory.names() if (path / name).is_dir()]


def _listed(path: Path, name: str) -> _Listed:
    try:
        if not holds_files(path):
            return _Listed(name, "none")
        found = described(path)
    except NotCommittedError as error:
        return _Listed(name, "uncommitted", problem=str(error))
    except DcpxError as error:
        state = "damaged" if is_of_checkpoint(error) else "unreadable"
        return _Listed(name, state, problem=f"{type(error).__name__}: {error}")
    faults = [fault for each in found for fault in each.faults]
    state, problem = ("damaged", faults[0]) if faults else ("whole", "")
    items = sum(len(each.fqns) for each in found)
    nbytes = sum(each.nbytes for each in found)
    files: set[str] = set().union(*(each.files for each in found))
    return _Listed(name, state, found[0].written_by, items, len(files), nbytes, problem)


def run_verify(paths: Sequence[Path], *, workers: int | None, as_json: bool) -> int:
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


def checkpoints_at(path: Path) -> list[Path]:
    """Returns `path`, or the directories beneath it that hold files of checkpoints."""
    if path.is_file() and find_artifact(path) is not None:
        return [path]
    found = [] if holds_files(path) else list(filter(holds_files, _beneath(path)))
    return found or [path]


def run_repair(path: Path, *, as_json: bool, **arguments: Any) -> int:
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
