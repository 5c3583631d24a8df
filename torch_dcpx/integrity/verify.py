"""`torch_dcpx.verify`: is what lies in a directory, or a store, what was written there?

1. `.metadata` is read and its parts are compared; without it each rank's own, or none at all.
2. Every data file that it names is opened, and its footer (of stock's its zip items, and the shapes
   and dtypes in these) compared with the metadata. Without metadata: every data file there is, by
   its footer alone.
3. Several workers read and sum all bytes that a checksum covers.

Nothing ends at the first finding, no process group is needed, and nothing of a file is trusted.
Files of safetensors and torch.save are `artifact`'s.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_dcpx._arguments import check_callable, checked_globals
from torch_dcpx._native import _C
from torch_dcpx.integrity.artifact import verify_artifact
from torch_dcpx.integrity.compare import (
    LookedAt,
    StoredCheckpoint,
    look_at_file,
    look_at_named,
    read_checkpoint,
)
from torch_dcpx.integrity.contents import commits_among, open_contents, refuse_several
from torch_dcpx.integrity.facts import seen_whole
from torch_dcpx.integrity.findings import Finding, VerifyReport, file_finding, led_on, of_raw
from torch_dcpx.integrity.footers import RawFinding
from torch_dcpx.integrity.states import state_of
from torch_dcpx.integrity.way_out import mending, settled
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.hints import beneath
from torch_dcpx.storage.names import (
    METADATA_NAME,
    Look,
    is_data_file_name,
    is_metadata_name,
    is_temporary_name,
)
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.reader_lock import being_read

logger = logging.getLogger("torch_dcpx")


def verify(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    host_memory_bytes: int | None = None,
    safe_globals: Sequence[Any] = (),
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compares a whole checkpoint with its checksums, and reports all its faults.

    Args:
        path: directory of a checkpoint, of ours or of stock's, of all ranks or of each rank's own,
            or its URL in a store; or what `export` writes, as `load_pretrained` finds it.
            Safetensors hold no checksums: headers, sizes and the index are compared, and a note
            says so.
        workers: threads that read and sum. Default None: as in `ReadOptions`; of a store 32
            requests at a time, within `host_memory_bytes`.
        host_memory_bytes: bound on the memory that files are read into. Default None: 64 MiB.
        safe_globals: classes that the metadata's pickle may name beside stock's own.
        progress: called about ten times a second, and at the end, with the bytes summed so far
            and those to sum.

    Returns:
        The report: `report.ok`, `report.findings`. Faults raise nothing.

    Raises:
        NotCommittedError: `path` is no directory, or holds several exports.
        StorageError: the directory cannot be opened or listed.
        OptionError: an argument that cannot work.
        UnsupportedError: a URL of another kind of store; a file of torch.save in a store.
    """
    check_callable("progress", progress)
    safe_globals = checked_globals(safe_globals)
    began = time.perf_counter()
    options = ReadOptions(workers=workers)
    if host_memory_bytes is not None:
        options = replace(options, host_memory_bytes=host_memory_bytes)
    with being_read(path), open_contents(path) as contents:
        directory = contents.place
        job = directory.verify_job(options)
        if contents.artifact is not None:
            return verify_artifact(contents, job, safe_globals, progress)
        refuse_several(contents.path, contents.look.names)
        run = _Run(directory, seen_whole(directory, contents.look), job, safe_globals)
        run.compare()
        looked = time.perf_counter()
        run.sum(progress)
        ended = time.perf_counter()
    return VerifyReport(
        path=str(directory.path),
        findings=tuple(sorted(run.findings, key=lambda f: (not f.is_fault, f.file, f.offset or 0))),
        metadata_files=tuple(run.commits),
        files=sum(one.is_there for one in run.looked.values()),
        items=run.items,
        parts=run.parts,
        checked_bytes=run.checked_bytes,
        metadata_s=looked - began,
        sum_s=ended - looked,
        total_s=ended - began,
        is_form_compared=run.is_form_compared,
        is_named=not run.is_of_stock,
    )


@dataclass(eq=False)
class _Run:
    """One verification of one directory. Not thread-safe."""

    directory: Place
    look: Look
    job: _C.VerifyJob
    safe_globals: Sequence[Any]
    looked: dict[str, LookedAt] = field(default_factory=dict)  # by file
    findings: list[Finding] = field(default_factory=list)
    commits: Sequence[str] = ()
    items: int = 0
    parts: int = 0
    checked_bytes: int = 0
    is_form_compared: bool = False
    is_of_stock: bool = False

    def compare(self) -> None:
        """Steps 1 and 2."""
        names = self.look.names
        self.commits = commits_among(names)
        known = [found for found in map(self._read, self.commits) if found is not None]
        self.is_form_compared = bool(known) and len(known) == len(self.commits)
        self.is_of_stock = any(each.files is None for each in known)
        for checkpoint in known:
            self.items += len(checkpoint.metadata.state_dict_metadata)
            self.parts += len(checkpoint.metadata.storage_data)
            for name in dict.fromkeys([*(checkpoint.files or ()), *checkpoint.items]):
                if name not in self.looked:
                    self._add(name, look_at_named(self.directory, self.job, checkpoint, name))
        data_names = list(filter(is_data_file_name, names))
        unnamed = [name for name in data_names if name not in self.looked]
        if not self.commits:
            state, _ = state_of(self.directory)
            state = settled(self.directory, state, names)
            message = f"'{self.directory.path}' holds no committed checkpoint"
            if state.kind == "none":
                message += beneath(self.directory.path)
            else:
                message += f": {state.text}"
            self.findings.append(file_finding("uncommitted", METADATA_NAME, message))
        if len(known) < len(self.commits) or not known:
            for name in unnamed:  # nobody knows their save: each is looked at by itself
                self._add(name, look_at_file(self.job, name)[1])
        else:
            self._note_leftovers(unnamed)
        beside = set(filter(is_metadata_name, names)) - set(self.commits)
        self._note_leftovers([*beside, *filter(is_temporary_name, names)])

    def sum(self, progress: Callable[[int, int], None] | None) -> None:
        """Step 3."""
        for row in self.job.sum(progress):
            raw = RawFinding._make(row)
            name = raw.path.removeprefix(f"{self.directory.path}/")
            items = self.looked[name].items if name in self.looked else None
            self.findings.append(of_raw(raw, name, items))
        if progress is not None:
            progress(self.job.done_bytes, self.job.total_bytes)
        self.checked_bytes += self.job.done_bytes

    def _read(self, name: str) -> StoredCheckpoint | None:
        checkpoint, findings, nbytes = read_checkpoint(self.directory, name, self.safe_globals)
        if checkpoint is None and findings[-1].kind in ("metadata", "file"):
            findings[-1] = led_on(findings[-1], mending(self.directory))
        self.findings += findings
        if checkpoint is not None and checkpoint.files is not None:
            self.checked_bytes += nbytes
        return checkpoint

    def _add(self, name: str, looked: LookedAt) -> None:
        self.looked[name] = looked
        self.findings += looked.findings

    def _note_leftovers(self, names: Iterable[str]) -> None:
        """Notes files that nothing names; of a rank without metadata that is a fault."""
        commits, ways = set(self.commits), dict[str, str]()
        for name in sorted(names):
            rank = name.removeprefix("__").split("_")[0].split(".")[0]
            own = f"__{rank}{METADATA_NAME}"
            if METADATA_NAME not in commits and rank.isdigit() and own not in commits:
                message = f"'{name}' is of rank {rank}, of which there is no '{own}'"
                found = file_finding("uncommitted", name, message)
                ways.setdefault(own, mending(self.directory) if not ways else "")
                self.findings.append(led_on(found, ways[own]))
            elif not (is_data_file_name(name) and self.look.size(name) == 0):
                # Stock leaves an empty one for a rank that has nothing to write.
                message = f"'{name}' is named by no metadata that counts: of a save that failed or "
                self.findings.append(file_finding("leftover", name, message + "was replaced"))
