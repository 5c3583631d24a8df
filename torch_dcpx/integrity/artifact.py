"""Verifies files of safetensors and torch.save: what `export` writes, and others of their kind.

A file of torch.save has a checksum for each record. Safetensors have none: headers must describe
the files byte for byte, and an index and its files must name the same tensors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcpx._text import counted
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
)
from torch_dcpx.integrity.contents import Contents, open_contents
from torch_dcpx.integrity.findings import (
    Finding,
    ItemRanges,
    VerifyReport,
    file_finding,
    of_error,
    of_raw,
)
from torch_dcpx.integrity.footers import RawFinding
from torch_dcpx.reader.safetensors import (
    files_of,
    read_header,
    read_index,
    refuse_link,
    tensors_of,
    unnamed_in,
)
from torch_dcpx.reader.saved_parts import PARTS_NAME, StoredTensor
from torch_dcpx.reader.torch_file import on_disk, read_torch_file
from torch_dcpx.storage.names import TORCH_SUFFIXES
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place

if TYPE_CHECKING:
    from torch_dcpx._native import _C


class Artifact(NamedTuple):
    """Says where an artifact lies: its directory, and the name of its file or index."""

    directory: Location
    name: str


def find_artifact(path: str | os.PathLike[str]) -> Artifact | None:
    """Returns the artifact that a path means; None: a checkpoint, a part of one, or nothing.

    Raises: OptionError, UnsupportedError: as `checked_location`.
    """
    try:
        with open_contents(path) as found:
            name = found.artifact
            return None if name is None else Artifact(found.place.path, name)
    except StorageError:  # NotCommittedError, too: the look at a checkpoint says it better
        return None


def verify_artifact(
    contents: Contents,
    job: _C.VerifyJob,
    safe_globals: Sequence[Any],
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Compares an artifact with itself and with its checksums. Faults raise nothing.

    Raises: NotCommittedError: the file that the path names is not there; UnsupportedError: a file
    of torch.save in a store; a link; a part of a tensor alone; an index of files of torch.save.
    """
    began, directory, name = time.perf_counter(), contents.place, contents.artifact or ""
    if name not in (*contents.look.names, PARTS_NAME):
        path = str(directory.path / name)
        message = f"'{path}' is not there: there is nothing to verify"
        raise NotCommittedError(message, errno=errno.ENOENT, path=path)
    if name.endswith(TORCH_SUFFIXES):
        on_disk(directory.path, name)
        refuse_link(directory.path, name)
        looked = _of_torch(contents, job, safe_globals)
    else:
        looked = _of_safetensors(directory, name)
    summed = time.perf_counter()
    raws = map(RawFinding._make, job.sum(progress))
    findings = [*looked.findings, *(of_raw(raw, name, looked.ranges) for raw in raws)]
    if progress is not None:
        progress(job.done_bytes, job.total_bytes)
    ended = time.perf_counter()
    return VerifyReport(
        path=str(contents.path),
        findings=tuple(sorted(findings, key=lambda f: (not f.is_fault, f.file, f.offset or 0))),
        metadata_files=(name,),
        files=looked.files,
        items=looked.items,
        parts=looked.parts,
        checked_bytes=job.done_bytes,
        metadata_s=summed - began,
        sum_s=ended - summed,
        total_s=ended - began,
        is_form_compared=looked.items > 0,
    )


class _Looked(NamedTuple):
    """Holds what the files say, before their bytes are summed."""

    findings: list[Finding]
    files: int
    items: int
    parts: int
    ranges: ItemRanges | None = None


def _of_torch(contents: Contents, job: _C.VerifyJob, safe_globals: Sequence[Any]) -> _Looked:
    """Looks at a file of torch.save, and adds its records to the sums of `job`."""
    directory, name = contents.place, contents.artifact or ""
    findings, ranges, items = [], None, 0
    try:
        places = read_torch_file(directory.path, name, safe_globals).places
        items = len(places)
        ranges = ItemRanges((one.offset, one.offset + one.length, n) for n, one in places.items())
    except UnsafePickleError as error:  # no fault of the bytes, but no names for them either
        findings.append(of_error("unchecked", error, name))
    except DcpxError as error:
        findings.append(_error_of(error, name))
    try:
        _, raws = job.add_foreign(name, [(0, contents.look.size(name) or 0, False)])
    except DcpxError as error:
        if not findings:
            findings.append(_error_of(error, name))
        return _Looked(findings, 0, items, items)
    findings += [of_raw(raw, name, ranges) for raw in map(RawFinding._make, raws)]
    return _Looked(findings, 1, items, items, ranges)


def _of_safetensors(directory: Place, name: str) -> _Looked:
    """Looks at a file, or at all files of an index or of ranks. Raises: UnsupportedError."""
    findings: list[Finding] = []
    weight_map = None
    if name.endswith(".json"):
        try:
            weight_map = read_index(directory, name)
        except UnsupportedError:
            raise
        except DcpxError as error:
            return _Looked([_error_of(error, name)], 0, 0, 0)
    held: dict[str, dict[str, StoredTensor]] = {}
    for file in files_of(directory, name, weight_map):
        try:
            held[file], _ = read_header(directory, file)
        except UnsupportedError:
            raise
        except DcpxError as error:
            findings.append(_error_of(error, file))
    if not findings:
        try:
            tensors_of(directory.path, name, weight_map, held)
        except CorruptionError as error:
            findings.append(of_error("disagreement", error, name))
    if name == PARTS_NAME:
        message = (
            f"'{directory.path}' holds files of ranks, and none says how many ranks there were"
        )
        findings.append(file_finding("unchecked", name, message))
    for file, left in unnamed_in(weight_map, held).items():
        message = f"'{file}' holds {counted(len(left), 'tensor')} that '{name}' does not name there"
        findings.append(
            file_finding("leftover", file, f"{message}: loads leave them out", fqns=left)
        )
    for file, tensors in held.items():
        nbytes = sum(one.entry.end - one.entry.begin for one in tensors.values())
        message = (
            f"'{file}' is of safetensors, which hold no checksums: {nbytes} B are not compared"
        )
        findings.append(file_finding("unchecked", file, message))
    items, parts = len(set().union(*held.values())), sum(map(len, held.values()))
    return _Looked(findings, len(held), items, parts)


def _error_of(error: DcpxError, name: str) -> Finding:
    """Returns the finding of a file that cannot be read, or is not what its suffix says."""
    if isinstance(error, StorageError):
        return of_error("missing" if error.errno == errno.ENOENT else "unreadable", error, name)
    return of_error("metadata", error, name)
