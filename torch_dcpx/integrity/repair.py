"""`torch_dcpx.repair`: a lost or damaged `.metadata` made anew.

1. Under the lock of a save: which files of metadata are lost or damaged? One that is good is never
   touched.
2. What it said is taken from the first of these that is there: the damaged file's columns, its
   pickle, the footers of the data files. The first two name the files of the save; with footers
   alone these must prove it (`rebuild`); what they cannot is assumed, and the caller says
   whether it is.
3. Every data file that it will name must be there, with a whole footer that holds what is said.
4. It is written as a save commits: temporary name, fsync, rename, fsync of the directory.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_dcpx.errors import CorruptionError, OptionError, RepairError, UnsafePickleError
from torch_dcpx.integrity.compare import (
    StoredCheckpoint,
    items_by_file,
    look_at_file,
    look_at_named,
)
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.integrity.findings import Finding, RepairedMetadata, RepairReport, Source
from torch_dcpx.integrity.footers import TENSOR, FileFacts
from torch_dcpx.integrity.rebuild import (
    check_ranks,
    data_file_rank,
    metadata_of,
    names_its_file,
    one_generation,
    one_save,
)
from torch_dcpx.integrity.verify import verify_job
from torch_dcpx.metadata.file import decode_columns, decode_file_names, decode_metadata
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import (
    METADATA_NAME,
    TOMBSTONE_NAME,
    FileEntry,
    is_data_file_name,
    is_metadata_name,
    is_rank_lock,
    metadata_name,
)
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.writer.commit import publish
from torch_dcpx.writer.locks import SaveLocks

_ZIP = b"PK\x03\x04"


def repair(
    path: str | os.PathLike[str],
    *,
    files: Sequence[str] | None = None,
    rank_local: bool | None = None,
    safe_globals: Sequence[Any] = (),
    dry_run: bool = False,
    accept_assumptions: bool = False,
) -> RepairReport:
    """Makes a lost or damaged `.metadata`, or `__{rank}.metadata`, anew.

    Data is not read but for footers: `torch_dcpx.verify` says whether it is as it was written.

    Args:
        path: directory of a checkpoint that torch-dcpx wrote.
        files: names of the data files of the save, where others lie beside them and nobody can
            tell. Default None: all that are there.
        rank_local: make each rank's own metadata (`use_collectives=False`). Default None: where
            such a file is there and no `.metadata`; refused where only the lock of such a save is.
        safe_globals: classes that the damaged file's pickle may name beside stock's own.
        dry_run: say what would be done and what it assumes, and write nothing.
        accept_assumptions: write where something must be assumed. Default False: that raises.

    Returns:
        What was made, and of what.

    Raises:
        RepairError: the metadata is good, what is there does not prove what it said, or only with
            assumptions that are not accepted (`assumptions`): nothing was written.
        NotCommittedError: `path` is no directory.
        ConcurrentSaveError: a save is under way there.
        StorageError: a file cannot be read or written; the old metadata is still there.
    """
    if isinstance(files, str):
        raise OptionError(f"files={files!r} is one name, not several", option="files", value=files)
    with open_checkpoint(path) as directory:
        run = _Repair(directory, files, safe_globals)
        locks = SaveLocks()
        try:
            if not dry_run:  # before anything is looked at: a save may commit meanwhile
                locks.take(directory, RunningSave(run))
            made = [run.plan(name) for name in run.targets(rank_local)]
            report = RepairReport(str(directory.path), tuple(one.report for one in made), dry_run)
            if not dry_run:
                if not accept_assumptions:
                    _refuse_assumed(report)
                for one in made:
                    run.publish(one)
        finally:
            # What is known of saves that did not end stays known.
            locks.release(has_ended_well=not locks.found_unended)
    return report


def _refuse_assumed(report: RepairReport) -> None:
    """Raises RepairError where something had to be assumed."""
    if report.assumptions:
        files = [file for one in report.repaired if one.assumed for file in one.files]
        raise RepairError(
            f"repair '{report.path}': nothing was written, for the files prove a checkpoint only "
            f"if {'; if '.join(report.assumptions)}. Where you know that, say so: "
            "repair(..., accept_assumptions=True), dcpx repair --accept-assumptions",
            path=report.path,
            candidates=tuple(files),
            assumptions=report.assumptions,
        )


class _Made(NamedTuple):
    """A file of metadata that is to be written."""

    report: RepairedMetadata
    metadata: Metadata
    files: list[FileEntry]


class _Kept(NamedTuple):
    """The part of a damaged file of metadata that is whole."""

    metadata: Metadata
    files: dict[str, FileEntry] | None  # None: only the names are known
    source: Source
    save_id: str


class _Repair:
    """One repair of one directory. Not thread-safe."""

    def __init__(
        self, directory: Directory, files: Sequence[str] | None, safe_globals: Sequence[Any]
    ) -> None:
        self._directory = directory
        self._chosen = files
        self._safe_globals = safe_globals

    def targets(self, rank_local: bool | None) -> list[str]:
        """Returns the names of the metadata that are to be made.

        Raises:
            RepairError: none is to be made.
        """
        names = self._directory.names()
        own = [name for name in names if is_metadata_name(name) and name != METADATA_NAME]
        if rank_local is None:
            rank_local = METADATA_NAME not in names and bool(own)
            if not rank_local and METADATA_NAME not in names and any(map(is_rank_lock, names)):
                # The locks stay when a save of all ranks replaces those of each.
                why = (
                    "ranks have saved checkpoints of their own here, and perhaps all of them one "
                    "since: say which of them is lost, repair(..., rank_local=True) or False"
                )
                raise self._refusal(METADATA_NAME, why)
        if not rank_local:
            if METADATA_NAME in names and self._is_good(METADATA_NAME):
                raise self._refusal(METADATA_NAME, "it is good, and stays as it is")
            return [METADATA_NAME]
        if METADATA_NAME in names:
            raise self._refusal(METADATA_NAME, "every load would prefer it to those of the ranks")
        ranks = {data_file_rank(name) for name in names} - {None}
        wanted = {f"__{rank}{METADATA_NAME}" for rank in ranks} | set(own)
        lost = [name for name in sorted(wanted) if name not in names or not self._is_good(name)]
        if not lost:
            raise self._refusal(METADATA_NAME, "the metadata of all ranks that have files are good")
        return lost

    def _is_good(self, name: str) -> bool:
        """Returns whether a file of metadata is not to be touched.

        A file of ours that was cut behind its pickle is not good, though stock reads it.

        Raises:
            CorruptionError: it is no regular file.
            DcpxError: it cannot be told.
        """
        data = self._directory.read_small(name)
        path = str(self._directory.path / name)
        try:
            found = decode_metadata(data, path, safe_globals=self._safe_globals)
        except UnsafePickleError:
            raise
        except CorruptionError:
            return False
        if found.files is not None:
            return True
        job = verify_job(self._directory, ReadOptions())
        named = {info.relative_path for info in found.metadata.storage_data.values()}
        is_there = [file for file in named if self._directory.is_regular(file)]
        return not is_there or not all(map(job.has_footer, is_there))

    def plan(self, name: str) -> _Made:
        """Returns what is to be written as `name`.

        Raises:
            RepairError: nobody can tell.
        """
        kept = self._kept_of(name)
        made = self._of_footers(name) if kept is None else self._of_kept(name, kept)
        self._check(name, made)
        return made

    def _kept_of(self, name: str) -> _Kept | None:
        """Returns the part of the damaged file that is known to be whole; None: there is none."""
        if name not in self._directory.names():
            return None
        data = self._directory.read_small(name)
        path = str(self._directory.path / name)
        parts = decode_parts(data, path)
        if parts.columns is not None:
            found = decode_columns(parts.columns)
            if found is not None:
                return _Kept(found.metadata, found.files, "columns", found.save_id)
        if parts.pickle is not None:
            metadata: Any = load_stock_metadata(
                parts.pickle, path, self._safe_globals, trusted=False
            )
            if isinstance(metadata, Metadata):
                return _Kept(metadata, None, "pickle", uuid.uuid4().hex)
        return None

    def _of_kept(self, name: str, kept: _Kept) -> _Made:
        """Makes what the damaged file named."""
        named = {info.relative_path for info in kept.metadata.storage_data.values()}
        files, save_id = kept.files, kept.save_id
        assumed: list[str] = []
        if files is None:
            facts = self._facts(name, sorted(named))
            path = str(self._directory.path / name)
            one_generation(facts, path, is_chosen=True)
            noted, assumed = one_save(facts, path, is_chosen=True)
            save_id = noted.hex() or kept.save_id
            files = {one.name: _entry(one) for one in facts}
            if any(not names_its_file(one) for one in files):
                assumed.append("no file without an id in its name is of another save")
        return _made(name, kept.source, save_id, kept.metadata, list(files.values()), assumed)

    def _of_footers(self, name: str) -> _Made:
        """Makes what the data files prove."""
        path = str(self._directory.path / name)
        is_whole = name == METADATA_NAME
        facts = self._facts(name, self._candidates(name))
        save_id, of_one_save = one_save(facts, path, is_chosen=self._chosen is not None)
        one_generation(facts, path, is_chosen=self._chosen is not None)
        if is_whole and self._chosen is None:
            check_ranks(facts, path)
        for one in facts:
            self._check_no_extension(name, one)
        metadata = metadata_of(facts, path, is_whole=is_whole)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self._directory.path))
        assumed = [
            "the save had ended: one that was killed before its commit leaves the same",
            *of_one_save,
            "the save had no metadata of a planner's own (planner_data) but names' paths",
        ]
        if is_whole:
            last = max(data_file_rank(one.name) or 0 for one in facts)
            assumed.append(f"no rank behind rank {last} had written a file")
        if self._chosen is None:
            assumed.append("no rank had written a file behind its last one here")
        text = save_id.hex() or uuid.uuid4().hex
        return _made(name, "footers", text, metadata, list(map(_entry, facts)), assumed)

    def _candidates(self, name: str) -> list[str]:
        """Returns the data files that may be of the save: no other metadata names them."""
        if self._chosen is not None:
            return sorted(set(self._chosen))
        names = self._directory.names()
        if TOMBSTONE_NAME in names:
            why = f"'{TOMBSTONE_NAME}' says that it was being deleted: what is left may be a part; "
            raise self._refusal(name, why + "name its files, repair(..., files=[...])")
        candidates = set(filter(is_data_file_name, names))
        for other in filter(is_metadata_name, names):
            if other != name and self._is_good(other):
                data = self._directory.read_small(other)
                candidates -= decode_file_names(data, str(self._directory.path / other))
        if name != METADATA_NAME:
            candidates = {one for one in candidates if metadata_name(data_file_rank(one)) == name}
        if not candidates:
            raise self._refusal(name, "there is no data file that it could name")
        return sorted(candidates)

    def _facts(self, name: str, files: Iterable[str]) -> list[FileFacts]:
        """Returns what the footers of files say, all of them whole.

        Raises:
            RepairError: with all that is wrong.
        """
        job = verify_job(self._directory, ReadOptions())
        found, findings = [], []
        for file in files:
            facts, looked = look_at_file(job, file)
            findings += looked.findings
            if facts is not None and facts.tail is not None and facts.rows is not None:
                found.append(facts)
        self._refuse_faults(name, findings)
        return found

    def _check_no_extension(self, name: str, one: FileFacts) -> None:
        """Refuses items that an extension changed on the way: which, no footer says."""
        rows = [row for row in one.rows or () if row.kind != TENSOR]
        heads = self._directory.read_at(one.name, [row.item_offset for row in rows], len(_ZIP))
        for row, head in zip(rows, heads, strict=True):
            if head != _ZIP:
                why = f"'{row.fqn}' in '{one.name}' is not in torch.save's format: an extension or "
                why += "a planner of its own wrote it, and only the lost metadata said which"
                raise self._refusal(name, why, [one.name])

    def _check(self, name: str, made: _Made) -> None:
        """Raises RepairError unless the data files hold all that `made` says of them."""
        files, items = {entry.path: entry for entry in made.files}, items_by_file(made.metadata)
        checkpoint = StoredCheckpoint(name, made.metadata, files, items)
        job = verify_job(self._directory, ReadOptions())
        findings: list[Finding] = []
        for file in dict.fromkeys([*files, *items]):
            findings += look_at_named(job, checkpoint, file).findings
        self._refuse_faults(name, findings)

    def _refuse_faults(self, name: str, findings: list[Finding]) -> None:
        faults = [finding for finding in findings if finding.is_fault]
        if faults:
            shown = "; ".join(map(str, faults[:10]))
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            why = f"not all of its data files are there and whole: {shown}{more}"
            raise self._refusal(name, why, sorted({finding.file for finding in faults}))

    def publish(self, made: _Made) -> None:
        """Commits. Raises: PlanError, StorageError."""
        name, save_id = made.report.name, made.report.save_id
        publish(self._directory, name, made.metadata, made.files, save_id, is_durable=True)

    def _refusal(self, name: str, why: str, candidates: Iterable[str] = ()) -> RepairError:
        path = str(self._directory.path / name)
        return RepairError(f"repair '{path}': {why}", path=path, candidates=tuple(candidates))


def _made(
    name: str,
    source: Source,
    save_id: str,
    metadata: Metadata,
    files: list[FileEntry],
    assumed: list[str],
) -> _Made:
    paths, items = tuple(file.path for file in files), len(metadata.storage_data)
    report = RepairedMetadata(name, source, save_id, paths, items, tuple(assumed))
    return _Made(report, metadata, files)


def _entry(facts: FileFacts) -> FileEntry:
    """Returns the row of the file table for a file with a whole footer."""
    if facts.tail is None:
        raise RepairError(f"'{facts.name}' has no footer", candidates=(facts.name,))
    tail = facts.tail
    return FileEntry(facts.name, tail.file_id, facts.nbytes, tail.footer_crc, tail.save_id)
