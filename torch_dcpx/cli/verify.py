"""`dcpx verify` and `dcpx repair`: `torch_dcpx.verify` and `torch_dcpx.repair` from a shell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_dcpx.cli.output import FINE, UNSOUND, put_json, put_lines, showing_progress
from torch_dcpx.integrity.repair import repair
from torch_dcpx.integrity.verify import verify
from torch_dcpx.storage.directory import Directory


def _look_at(path: Path) -> None:
    """Raises StorageError where there is no directory: that says nothing of a checkpoint."""
    Directory(path).close()


def run_verify(path: Path, *, workers: int | None, as_json: bool) -> int:
    """Prints what `verify` finds. Returns the exit code."""
    _look_at(path)
    with showing_progress(f"verify {path.name}", is_shown=not as_json) as tell:
        report = verify(path, workers=workers, progress=tell)
    if as_json:
        put_json({"ok": report.ok, **vars(report)})
    else:
        put_lines(str(report).splitlines())
    return FINE if report.ok else UNSOUND


def run_repair(
    path: Path,
    *,
    files: Sequence[str],
    rank_local: bool | None,
    is_dry_run: bool,
    accepts: bool,
    as_json: bool,
) -> int:
    """Prints what `repair` makes. Returns the exit code: of a dry run, what it would exit with."""
    _look_at(path)
    report = repair(
        path,
        files=files or None,
        rank_local=rank_local,
        dry_run=is_dry_run,
        accept_assumptions=accepts,
    )
    if as_json:
        put_json({"assumptions": report.assumptions, **vars(report)})
    else:
        put_lines(str(report).splitlines())
    return UNSOUND if report.assumptions and not accepts else FINE
