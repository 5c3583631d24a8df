"""One directory beneath a manager's root: is it a whole checkpoint, and may a manager change it?

Whole: its `.metadata` reads, and every data file that it names is there with its size. `examine`
reads no data but the manager's record, a line of JSON in the item `dcpx.manager` of each of its
checkpoints: `.metadata` commits it together with everything else.

A manager changes only directories of the root itself. It reads through a user's link,
`latest -> step-300`; a change through the link would reach another checkpoint, or leave the root.
"""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch_dcpx._answered_os import os
from torch_dcpx._json import parsed_json
from torch_dcpx.checkpoint.load import load_for_another_call
from torch_dcpx.errors import (
    CorruptionError,
    NotCommittedError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.integrity.contents import read_commit, wanted_sizes
from torch_dcpx.manager.pointer import step_of_name
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.reader import quiet_reader
from torch_dcpx.storage.directory import Directory, storage_error
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, PosixPlace
from torch_dcpx.storage.system_calls import uninterrupted
from torch_dcpx.storage.visibility import hidden

Skipped: TypeAlias = tuple[tuple[str, str], ...]  # tags that are not whole, and reasons

_RECORD_ITEM = "dcpx.manager"
_FORMAT = 1
_MAX_RECORD_BYTES = 1 << 20
_MAX_RANKS = 1 << 20  # a merge reads an item of each
_NO_LINK = frozenset({errno.EINVAL, errno.ENOENT, errno.ENOTDIR})
_LINK_OPENED = frozenset({errno.ELOOP, errno.ENOTDIR})  # by O_NOFOLLOW, with O_DIRECTORY
_WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Record(NamedTuple):
    """A manager's own record in a checkpoint."""

    tag: str  # as it was saved; a directory of another name is a copy, or was renamed
    step: int
    order: int  # of the commit among all beneath this root
    ranks: int  # that saved it
    metrics: dict[str, float]
    parts: tuple[str, ...]  # arguments of `save`, sorted: "model", "optimizer" ...
    per_rank: tuple[str, ...]  # paths of each rank's own values, sorted
    saved_at: int = 0  # seconds since 1970 by the coordinator's clock, for people; 0: unknown
    run: str = ""  # as in the pointer of its root; "": an earlier version noted none

    def encoded(self) -> str:
        """Returns the record as JSON."""
        return json.dumps({"format": _FORMAT, **self._asdict()}, separators=(",", ":"))

    @classmethod
    def decoded(cls, text: Any, path: Location) -> Record:
        """Returns the record in a text of `encoded`. Raises CorruptionError: there is none."""
        try:
            found = parsed_json(text)
            names = cls._fields[:-2]
            tag, step, order, ranks, metrics, parts, per_rank = (found[name] for name in names)
            # Earlier versions noted neither.
            saved_at, run = found.get("saved_at", 0), found.get("run", "")
            metrics = {key: float(n) for key, n in metrics.items() if not math.isnan(float(n))}
            words = tuple(parts), tuple(per_rank)
            record = cls(tag, step, order, ranks, metrics, *words, saved_at, run)
            numbers = (found["format"], step, order, ranks, saved_at)
            if not (
                all(type(number) is int and number >= 0 for number in numbers)
                and ranks <= _MAX_RANKS
                and all(type(word) is str for word in (tag, run, *parts, *per_rank))
            ):
                raise TypeError(f"{found!r:.200}")
        except _WRONG as error:
            raise _wrong_record(path, f"no record of a manager: {error}") from error
        if numbers[0] != _FORMAT:
            problem = f"its format is {numbers[0]}, this torch-dcpx reads {_FORMAT}"
            raise _wrong_record(path, problem)
        return record


def _wrong_record(path: Location, problem: str) -> CorruptionError:
    message = f"read the item '{_RECORD_ITEM}' of '{path}': {problem}"
    return CorruptionError(message, fqn=_RECORD_ITEM, path=str(path))


class Stored(NamedTuple):
    """A whole checkpoint beneath a root."""

    tag: str  # the directory's name
    path: Location
    save_id: str
    record: Record | None  # None: no manager saved it
    is_ours: bool = False  # saved beneath this root, and in its place: retention may remove it

    @property
    def step(self) -> int | None:
        return step_of_name(self.tag) if self.record is None else self.record.step

    @property
    def told(self) -> str:
        """Its step, and its tag where the step does not say it; for people."""
        return told_step(self.tag, self.step)

    @property
    def order(self) -> int:
        return 0 if self.record is None else self.record.order

    @property
    def run(self) -> str:
        return "" if self.record is None else self.record.run

    @property
    def is_in_place(self) -> bool:
        """Whether its record names its directory: else it is a user's copy, or was renamed."""
        return self.record is not None and self.record.tag == self.tag


def told_step(tag: str, step: int | None) -> str:
    """Returns a checkpoint by its step, and by its tag where that is another: for people."""
    if step is not None and step_of_name(tag) == step:
        return f"step {step}"
    return repr(tag) if step is None else f"{tag!r} (step {step})"


class DataFiles(NamedTuple):
    """The data files that a `.metadata` names, and their bytes."""

    sizes: dict[str, int]
    is_exact: bool  # stock's metadata says only the least of them

    def check(self, place: Place) -> None:
        """Raises, as `examine`, unless each is a regular file of its size."""
        place.check_sizes(self.sizes, is_exact=self.is_exact)


def examine(place: Place, options: ReadOptions | None = None) -> tuple[Stored, DataFiles]:
    """Returns the whole checkpoint in an open place, whose name is the tag.

    Raises:
        NotCommittedError: no `.metadata`: never committed, or half deleted.
        StorageError: a data file is missing or its status cannot be read.
        ShortReadError: a data file has not the size that its save gave it.
        CorruptionError: `.metadata` or the manager's record cannot be read.
    """
    path = place.path
    names = place.names()
    if METADATA_NAME not in names:
        why = hidden(place, names) if isinstance(place, PosixPlace) else ""
        problem = why or f"it holds no '{METADATA_NAME}': a save that did not end, or a deletion"
        missing = str(path / METADATA_NAME)
        raise NotCommittedError(f"'{path}': {problem}", errno=errno.ENOENT, path=missing)
    found = read_commit(place, METADATA_NAME)
    files = DataFiles(wanted_sizes(found), found.files is not None)
    files.check(place)
    record = None
    if _RECORD_ITEM in found.metadata.state_dict_metadata:
        item: dict[str, Any] = {"dcpx": {"manager": ""}}
        load_for_another_call(item, quiet_reader(path, options))
        text = item["dcpx"]["manager"]
        is_text = type(text) is str and len(text) <= _MAX_RECORD_BYTES
        record = Record.decoded(text if is_text else "", path)
    return Stored(path.name, path, found.save_id, record), files


class OwnDirectory(PosixPlace):
    """An open directory beneath the root, itself no link; the root and its parents may be links."""

    FLAGS = Directory.FLAGS | os.O_NOFOLLOW

    def __init__(self, path: Path, doing: str = "save") -> None:
        """Opens `path`. Raises: StorageError; as `lies_there`."""
        try:
            super().__init__(path)
        except StorageError as error:
            if error.errno in _LINK_OPENED:
                lies_there(path, doing)
            raise


def lies_there(path: Path, doing: str) -> bool:
    """Returns whether anything lies at a path beneath the root. `doing` is the verb of messages.

    Raises UnsupportedError: a symbolic link, dangling or not. StorageError: it cannot be read.
    """
    try:
        target = uninterrupted(os.readlink, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise storage_error("read link", path, error, is_read=True) from error
        return error.errno == errno.EINVAL
    raise UnsupportedError(
        f"{doing} '{path}': it is a symbolic link to '{target}', and a manager changes nothing "
        "through links; use the name of what it leads to, or another one"
    )
