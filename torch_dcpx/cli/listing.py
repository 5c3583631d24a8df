"""`dcpx ls`, `dcpx verify` and `dcpx repair`: print checkpoints, and the library's reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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
from torch_dcpx.errors import DcpxError, NotCommittedError
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
    with Directory(path) as directory:
        names = directory.names()
    if any(map(_is_of_checkpoint, names)):
        found = [_listed(path, path.name or str(path))]
    else:
        found = [_listed(path / name, name) for name in names if (path / name).is_dir()]
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


def _is_of_checkpoint(name: str) -> bool:
    return is_metadata_name(name) or is_data_file_name(name) or is_temporary_name(name)


def _listed(path: Path, name: str) -> _Listed:
    try:
        with Directory(path) as directory:
            if not any(map(_is_of_checkpoint, directory.names())):
                return _Listed(name, "none")
        found = described(path)
    except NotCommittedError as error:
        return _Listed(name, "uncommitted", problem=str(error))
    except DcpxError as error:
        state = "damaged" if is_of_checkpoint(error) else "unreadable"
        return _Listed(name, state, problem=f"{type(error).__name__}: {error}")
    faults = [fault for each in found for fault in each.faults]
    state, problem = ("damaged", faults[0]) if faults else ("whole", "")
    items = sum(len(each.items) for each in found)
    nbytes = sum(each.nbytes for each in found)
    files: set[str] = set().union(*(each.files for each in found))
    return _Listed(name, state, found[0].written_by, items, len(files), nbytes, problem)


def run_verify(path: Path, *, workers: int | None, as_json: bool) -> int:
    """Prints the report of `verify`. Returns the exit code."""
    if not path.is_file() or find_artifact(path) is None:
        Directory(path).close()  # a missing one is an error of the path, not of a checkpoint
    with showing_progress(f"verify {path.name}", is_shown=not as_json) as tell:
        report = verify(path, workers=workers, progress=tell)
    _put(report, as_json, ok=report.ok)
    return FINE if report.ok else UNSOUND


def run_repair(path: Path, *, as_json: bool, **arguments: Any) -> int:
    """Prints the report of `repair`. Returns the exit code: of a dry run, that of the repair."""
    Directory(path).close()
    report = repair(path, **arguments)
    _put(report, as_json, assumptions=report.assumptions)
    return UNSOUND if report.assumptions and not arguments["accept_assumptions"] else FINE


def _put(report: VerifyReport | RepairReport, as_json: bool, **more: Any) -> None:
    if as_json:
        put_json({**more, **vars(report)})
    else:
        put_lines(str(report).splitlines())
