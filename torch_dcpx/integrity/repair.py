"""`torch_dcpx.repair`: a lost or damaged `.metadata` made anew.

1. Under the lock of a save, `targets` finds the files of metadata that are lost or damaged. Good
   ones stay as they are.
2. `plan` takes the content from the first source that is whole: the damaged file's columns, its
   pickle, the footers of the data files. The first two name the files of the save. Footers alone
   must prove it (`rebuild`); the caller must accept assumptions that they cannot prove.
3. Every data file that the metadata will name must be there, with a whole footer that agrees.
4. It is written as a save commits: temporary name, fsync, rename, fsync of the directory. In a
   store, by one PUT on the condition that what `claims` has found before step 1 is still there.
"""

from __future__ import annotations

import errno
import os
import shlex
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_dcpx._arguments import check_bool, checked_globals, checked_globs
from torch_dcpx.errors import (
    ConcurrentSaveError,
    CorruptionError,
    RepairError,
    UnsafePickleError,
)
from torch_dcpx.integrity.compare import (
    StoredCheckpoint,
    items_by_file,
    look_at_file,
    look_at_named,
)
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.integrity.facts import seen_whole
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
from torch_dcpx.integrity.states import state_of
from torch_dcpx.metadata.file import decode_columns, decode_file_names, decode_metadata
from torch_dcpx.metadata.parts import decode_parts
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.hints import beneath, command
from torch_dcpx.storage.names import (
    METADATA_NAME,
    FileEntry,
    is_data_file_name,
    is_metadata_name,
    is_rank_lock,
    metadata_name,
)
from torch_dcpx.storage.place import Place
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
        path: directory of a checkpoint that torch-dcpx wrote, or its URL in a store.
        files: names of the data files of the save, where others lie beside them and nobody can
            tell. Of rank-local saves, name those of each rank whose metadata is made. Default
            None: all that are there.
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
        ConcurrentSaveError: a save is under way there; of a store: one was committed meanwhile.
        StorageError: a file cannot be read or written; the old metadata is still there.
        UnsupportedError: a URL of another kind of store, or a store without conditional writes.
        OutcomeUnknownError: the store does not say whether it was written.
        OptionError: an argument that cannot work.
    """
    if files is not None:
        files = checked_globs("files", files, "['__0_0.distcp']", "names")
    if rank_local is not None:
        check_bool("rank_local", rank_local)
    check_bool("dry_run", dry_run)
    check_bool("accept_assumptions", accept_assumptions)
    safe_globals = checked_globals(safe_globals)
    with open_checkpoint(path) as directory:
        _refuse_state(directory, is_named=files is not None)
        run = _Repair(directory, files, safe_globals)
        locks = SaveLocks()
        try:
            if not dry_run:  # before anything is looked at: a save may commit meanwhile
                locks.take(directory, RunningSave(run))
                claim = directory.claims()
            made = [run.plan(name) for name in run.targets(rank_local)]
            reports = tuple(one.report() for one in made)
            report = RepairReport(str(directory.path), reports, dry_run)
            if not dry_run:
                if not accept_assumptions:
                    _refuse_assumed(report, files, rank_local)
                for one in made:
                    publish(
                        directory,
                        one.name,
                        one.metadata,
                        one.files,
                        one.save_id,
                        is_durable=True,
                        lock=claim(one.name),
                    )
        finally:
            # Knowledge of saves that did not end stays.
            locks.release(has_ended_well=not locks.found_unended)
    return report


def _refuse_state(directory: Place, *, is_named: bool) -> None:
    """Raises RepairError, ConcurrentSaveError where nothing is to be repaired now; StorageError
    where the metadata may be hidden.
    """
    state, look = state_of(directory)
    seen_whole(directory, look)
    path = str(directory.path)
    if state.kind == "saving" or (state.saving and state.kind == "committed"):
        raise ConcurrentSaveError(
            f"repair '{path}': a save is under way ({state.saving}); wait for it",
            errno=errno.EWOULDBLOCK,
            path=path,
            owner=state.saving,
        )
    if state.kind == "unreadable" and state.error is not None and not is_named:
        state.error.message += "; where nothing is hidden, name its files: repair(..., files=[...])"
        raise state.error
    if state.kind == "removed" and not is_named:
        why = f"{state.text}. What is left may be a part: name its files, repair(..., files=[...])"
        raise RepairError(f"repair '{path}': {why}", path=path)


def accepting(
    path: str | os.PathLike[str], files: Sequence[str] | None, rank_local: bool | None
) -> str:
    """Returns the same repair, of `dcpx`, with its assumptions accepted."""
    words = ["repair", "--accept-assumptions"]
    words += [] if rank_local is None else ["--rank-local" if rank_local else "--all-ranks"]
    words += [f"--file {shlex.quote(name)}" for name in files or ()]
    return command(" ".join(words), path)


def _refuse_assumed(
    report: RepairReport, chosen: Sequence[str] | None, rank_local: bool | None
) -> None:
    """Raises RepairError where something had to be assumed."""
    if report.assumptions:
        files = [file for one in report.repaired if one.assumed for file in one.files]
        raise RepairError(
            f"repair '{report.path}': nothing was written, for the files prove a checkpoint only "
            f"if {'; if '.join(report.assumptions)}. Where you know that, say so: "
            f"{accepting(report.path, chosen, rank_local)}, or "
            "repair(..., accept_assumptions=True)",
            path=report.path,
            candidates=tuple(files),
            assumptions=report.assumptions,
        )


class _Made(NamedTuple):
    """A file of metadata that is to be written."""

    name: str
    source: Source
    save_id: str
    metadata: Metadata
    files: list[FileEntry]
    assumed: list[str]

    def report(self) -> RepairedMetadata:
        metadata, paths = self.metadata, tuple(file.path for file in self.files)
        counts = len(metadata.state_dict_metadata), len(metadata.storage_data)
        return RepairedMetadata(
            self.name, self.source, self.save_id, paths, *counts, tuple(self.assumed)
        )


@dataclass(eq=False)
class _Repair:
    """One repair of one directory. Not thread-safe."""

    _directory: Place
    _chosen: Sequence[str] | None  # files that the caller named
    _safe_globals: Sequence[Any]

    def targets(self, rank_local: bool | None) -> list[str]:
        """Returns the names of the metadata to be made; RepairError: there is none."""
        names = self._directory.names()
        own = [name for name in names if is_metadata_name(name) and name != METADATA_NAME]
        if rank_local is None:
            rank_local = METADATA_NAME not in names and bool(own)
            if not rank_local and METADATA_NAME not in names and any(map(is_rank_lock, names)):
                # The locks stay when a save of all ranks replaces those of each.
                why = (
                    "ranks have saved checkpoints of their own here, and perhaps all of them one "
                    "since: say which of them is lost, `dcpx repair` with --rank-local or "
                    "--all-ranks, repair(..., rank_local=True) or False"
                )
                raise self._refusal(METADATA_NAME, why)
        if not rank_local:
            if METADATA_NAME in names and self._is_good(METADATA_NAME):
                raise self._refusal(METADATA_NAME, "it is good, and stays as it is", is_good=True)
            return [METADATA_NAME]
        if METADATA_NAME in names:
            raise self._refusal(METADATA_NAME, "every load would prefer it to those of the ranks")
        ranks = {data_file_rank(name) for name in names} - {None}
        wanted = {f"__{rank}{METADATA_NAME}" for rank in ranks} | set(own)
        lost = [name for name in sorted(wanted) if name not in names or not self._is_good(name)]
        if not lost:
            why = "the metadata of all ranks that have files are good, and stay as they are"
            raise self._refusal(METADATA_NAME, why, is_good=True)
        return lost

    def _is_good(self, name: str) -> bool:
        """Returns whether a file of metadata must stay, or raises DcpxError if it cannot tell.

        A file of ours that was cut behind its pickle is not good, though stock reads it.
        """
        path = str(self._directory.path / name)
        try:
            data = self._directory.read_small(name)
        except CorruptionError as error:  # no regular file
            way = f"move it away, and {command('repair', self._directory.path)} may make it anew"
            raise self._refusal(name, f"{error}; {way}", [name]) from error
        try:
            found = decode_metadata(data, path, safe_globals=self._safe_globals)
        except UnsafePickleError:
            raise
        except CorruptionError:
            return False
        if found.files is not None:
            return True
        job = self._directory.verify_job(ReadOptions())
        named = {info.relative_path for info in found.metadata.storage_data.values()}
        is_there = [file for file in named if self._directory.is_regular(file)]
        return not is_there or not all(map(job.has_footer, is_there))

    def plan(self, name: str) -> _Made:
        """Returns the file to be written as `name`; RepairError: nobody can tell."""
        made = self._of_damaged(name) or self._of_footers(name)
        self._check(made)
        return made

    def _of_damaged(self, name: str) -> _Made | None:
        """Makes the file from the whole parts of the damaged one, or None."""
        if name not in self._directory.names():
            return None
        path = str(self._directory.path / name)
        parts = decode_parts(self._directory.read_small(name), path)
        found = None if parts.columns is None else decode_columns(parts.columns)
        if found is not None:
            files = list((found.files or {}).values())
            return _Made(name, "columns", found.save_id, found.metadata, files, [])
        if parts.pickle is None:
            return None
        metadata = load_stock_metadata(parts.pickle, path, self._safe_globals)
        named = {info.relative_path for info in metadata.storage_data.values()}
        facts = self._facts(name, sorted(named))
        one_generation(facts, path, is_chosen=True)
        save_id, assumed = one_save(facts, path, is_chosen=True)
        if not all(names_its_file(one.name) for one in facts):
            assumed.append("no file without an id in its name is of another save")
        text = save_id.hex() or uuid.uuid4().hex
        return _Made(name, "pickle", text, metadata, list(map(_entry, facts)), assumed)

    def _of_footers(self, name: str) -> _Made:
        """Makes the file that the data files prove."""
        path = str(self._directory.path / name)
        is_whole = name == METADATA_NAME
        facts = self._facts(name, self._candidates(name))
        if not is_whole:  # the caller may have named files of several ranks
            own = (name, METADATA_NAME)  # the latter for a name without a rank: refused below
            facts = [one for one in facts if metadata_name(data_file_rank(one.name)) in own]
        if not facts:
            why = "there is no data file that it could name" + beneath(self._directory.path)
            raise self._refusal(name, why)
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
        return _Made(name, "footers", text, metadata, list(map(_entry, facts)), assumed)

    def _candidates(self, name: str) -> list[str]:
        """Returns the data files that may be of the save: no other metadata names them."""
        if self._chosen is not None:
            return sorted(set(self._chosen))
        names = self._directory.names()
        candidates = set(filter(is_data_file_name, names))
        for other in filter(is_metadata_name, names):
            if other != name and self._is_good(other):
                data = self._directory.read_small(other)
                candidates -= decode_file_names(data, str(self._directory.path / other))
        if name != METADATA_NAME:
            candidates = {one for one in candidates if metadata_name(data_file_rank(one)) == name}
        return sorted(candidates)

    def _facts(self, name: str, files: Iterable[str]) -> list[FileFacts]:
        """Returns the facts of whole footers, or raises RepairError with all that is wrong."""
        job = self._directory.verify_job(ReadOptions())
        found, findings = [], []
        for file in files:
            facts, looked = look_at_file(job, file)
            findings += looked.findings
            if facts is not None and facts.tail is not None and facts.rows is not None:
                found.append(facts)
        self._refuse_faults(name, findings)
        return found

    def _check_no_extension(self, name: str, one: FileFacts) -> None:
        """Refuses items that an extension changed on the way: footers do not name it."""
        rows = [row for row in one.rows or () if row.kind != TENSOR]
        heads = self._directory.read_at(one.name, [row.item_offset for row in rows], len(_ZIP))
        for row, head in zip(rows, heads, strict=True):
            if head != _ZIP:
                why = f"'{row.fqn}' in '{one.name}' is not in torch.save's format: an extension or "
                why += "a planner of its own wrote it, and only the lost metadata said which"
                raise self._refusal(name, why, [one.name])

    def _check(self, made: _Made) -> None:
        """Raises RepairError unless the data files hold all that `made` says of them."""
        files, items = {entry.path: entry for entry in made.files}, items_by_file(made.metadata)
        checkpoint = StoredCheckpoint(made.name, made.metadata, files, items)
        job = self._directory.verify_job(ReadOptions())
        findings: list[Finding] = []
        for file in dict.fromkeys([*files, *items]):
            findings += look_at_named(self._directory, job, checkpoint, file).findings
        self._refuse_faults(made.name, findings)

    def _refuse_faults(self, name: str, findings: list[Finding]) -> None:
        faults = [finding for finding in findings if finding.is_fault]
        if faults:
            shown = "; ".join(map(str, faults[:10]))
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            why = f"not all of its data files are there and whole: {shown}{more}"
            raise self._refusal(name, why, sorted({finding.file for finding in faults}))

    def _refusal(
        self, name: str, why: str, candidates: Iterable[str] = (), *, is_good: bool = False
    ) -> RepairError:
        path = str(self._directory.path / name)
        message = f"repair '{path}': {why}"
        return RepairError(message, path=path, candidates=tuple(candidates), is_good=is_good)


def _entry(facts: FileFacts) -> FileEntry:
    """Returns the row of the file table for a file with a whole footer."""
    if facts.tail is None:
        raise RepairError(f"'{facts.name}' has no footer", candidates=(facts.name,))
    tail = facts.tail
    return FileEntry(facts.name, tail.file_id, facts.nbytes, tail.footer_crc, tail.save_id)
