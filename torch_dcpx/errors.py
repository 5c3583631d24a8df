"""The errors of torch-dcpx, all picklable with their fields (DCP ships them between ranks).

    DcpxError
    +-- OptionError(ValueError)             an option or argument that cannot work
    +-- PlanError(ValueError)               items, regions or results that contradict each other
    |   +-- MismatchError                   a state asks for what the checkpoint does not hold
    |   +-- UnknownNameError(KeyError)      a name or glob that the checkpoint does not hold
    +-- StagingError(RuntimeError)          no snapshot, or a copy from or to a device failed: fqn
    +-- StorageError(OSError)               a system call failed: errno, path, offset, nbytes
    |   +-- ShortReadError(EOFError)        the file ended before the range did
    |   +-- NotCommittedError(FileNotFoundError)  the directory holds no committed checkpoint
    |   +-- ConcurrentSaveError             another save holds the directory's lock
    +-- CorruptionError(ValueError)         bytes are not what was written: fqn, path, range
    |   +-- UnsafePickleError               a pickle asks for a global that is not allowed
    +-- RankError(RuntimeError)             another rank failed with an error of another library
    +-- RankLostError(TimeoutError)         a rank gave no sign by the deadline: ranks, phases
    +-- StoreLostError(ConnectionError)     the process group's store is gone or does not answer
    +-- OutcomeUnknownError(RuntimeError)   the coordinator was lost while it committed
    +-- RepairError(ValueError)             `repair` cannot prove what was there: candidates
    +-- UnsupportedError(NotImplementedError)   valid, but refused by name

An error of these classes on another rank is raised as its own class with its own fields, and a
message that begins with rank, host and phase. Through `dcp.*`, DCP wraps them in
`CheckpointException`: look into `failures[rank][0]`.
"""

from __future__ import annotations

import os
from typing import Any

from torch_dcpx._text import with_short_names


def _rebuild(cls: type[DcpxError], message: str, fields: dict[str, Any]) -> DcpxError:
    return cls(message, **fields)


_NAMES = ("fqn", "global_name")  # fields that a file has chosen


class DcpxError(Exception):
    """Base of every error that torch-dcpx raises on purpose.

    Args:
        message: verb, object, numbers, cause, and where there is one the way out.
        fields: values of the names in `FIELDS`; the others are None.
    """

    FIELDS: tuple[str, ...] = ()  # names that a class of this file and its bases annotate

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:  # a user's subclass may annotate what is no field
            cls.FIELDS = (*cls.FIELDS, *cls.__annotations__)

    def __init__(self, message: str, **fields: Any) -> None:
        unknown = set(fields) - set(self.FIELDS)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        super().__init__(with_short_names(message, map(fields.get, _NAMES)))
        for name in self.FIELDS:
            setattr(self, name, fields.get(name))
        self.message = message

    @property
    def message(self) -> str:
        """The text: the one border where names of files come into messages."""
        return self._message

    @message.setter
    def message(self, text: str) -> None:
        self._message = with_short_names(text, (getattr(self, name, None) for name in _NAMES))

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.FIELDS}
        return _rebuild, (type(self), self.message, fields)


class OptionError(DcpxError, ValueError):
    """An option, argument or environment variable that cannot work; raised before any I/O."""

    option: str | None
    value: Any


_MAX_SHOWN = 80  # characters of a value
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def must_be(option: str, value: object, wanted: str, way_out: str = "") -> OptionError:
    """Returns the error of an option that is not what is wanted, such as "an int above 0".

    Its text is one line, however long the value is. It keeps plain values only: ranks send each
    other their errors, and a state or a model would go along.
    """
    kept = value if _is_plain(value) else None
    message = f"{option} must be {wanted}, got {shown(value)}{way_out}"
    return OptionError(message, option=option, value=kept)


def shown(value: object) -> str:
    """Returns a value as an error shows it: a short text, or of what is long its class."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value).__qualname__
    is_path = isinstance(value, os.PathLike) and type(value).__module__.startswith("pathlib")
    if not (_is_plain(value) or is_path or type(value).__module__ == "numpy"):
        return with_article(kind)
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    text = text.replace("\n", " ")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def _is_plain(value: object) -> bool:
    if type(value) in (tuple, list):
        parts: Any = value
        return len(parts) <= 8 and all(type(part) in _PLAIN for part in parts)
    return type(value) in _PLAIN


class PlanError(DcpxError, ValueError):
    """Items, regions or results that contradict each other or the metadata."""

    fqn: str | None


class MismatchError(PlanError):
    """The state asks for what the checkpoint at `path` does not hold; nothing was read.

    Raised by `dcpx.load` with the same lists on every rank: they hold what any rank asked for.

    `missing` are fully qualified names; `shapes`, `dtypes` and `kinds` rows of (name, stored,
    wanted): sizes, names of dtypes such as "float32", and what sort of thing it is. `nearest`
    suggests stored names for the first missing ones. `ranks` are those on which something differs,
    `fqn` is the first name of all. `left` are names of the checkpoint that no rank takes, where a
    `CheckpointManager.resume` may leave none.
    """

    path: str | None
    left: tuple[str, ...] | None
    missing: tuple[str, ...] | None
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] | None
    dtypes: tuple[tuple[str, str, str], ...] | None
    kinds: tuple[tuple[str, str, str], ...] | None
    nearest: dict[str, tuple[str, ...]] | None
    ranks: tuple[int, ...] | None


class UnknownNameError(PlanError, KeyError):
    """The checkpoint at `path` holds no tensor of the name, or for the glob, `fqn`.

    `nearest` suggests stored names. Raised by `load_tensors` and what `open_checkpoint` returns.
    """

    path: str | None
    nearest: tuple[str, ...] | None


class StagingError(DcpxError, RuntimeError):
    """A snapshot of the state could not be taken, or a copy between host and device failed.

    `fqn` names a tensor of the copies that failed; one call of the driver may move several.
    Of a load, `touched` lists the fully qualified names whose tensors may already hold new bytes.
    """

    fqn: str | None
    touched: tuple[str, ...] | None


class StorageError(DcpxError, OSError):
    """A system call failed. `errno` is the system's, `offset` and `nbytes` count bytes.

    Of a load, `touched` lists the fully qualified names whose tensors may already hold new bytes.
    """

    errno: int | None
    path: str | None
    offset: int | None
    nbytes: int | None
    touched: tuple[str, ...] | None


class ShortReadError(StorageError, EOFError):
    """The file ended before the range that was asked for."""


class NotCommittedError(StorageError, FileNotFoundError):
    """The directory holds no committed checkpoint (no `.metadata`).

    `files` is the number of data files there, of a save that did not end.
    """

    files: int | None


class ConcurrentSaveError(StorageError):
    """Another save is writing this checkpoint, or another job's manager saves beneath the root, or
    somebody reads what is to be deleted.

    `owner` is host and pid of the lock's holder, and a save's boot id, or since when a job saves.
    """

    owner: str | None


class CorruptionError(DcpxError, ValueError):
    """Bytes [offset, offset + nbytes) of `path` are not what was written.

    `touched` lists the fully qualified names whose tensors may already hold new bytes.
    """

    fqn: str | None
    path: str | None
    offset: int | None
    nbytes: int | None
    expected: str | None
    found: str | None
    touched: tuple[str, ...] | None


class UnsafePickleError(CorruptionError):
    """A pickle asks for `global_name`, which is on no allow-list. Nothing of it was executed."""

    global_name: str | None


class RankError(DcpxError, RuntimeError):
    """Rank `rank` on `host` failed in `phase` with an error that is not one of these classes.

    `original` is the full name of that error's type. The error itself is `__cause__`, where it can
    be pickled; the message ends with where on that rank it was raised.
    """

    rank: int | None
    host: str | None
    phase: str | None
    original: str | None


class RankLostError(DcpxError, TimeoutError):
    """Ranks gave no sign for `waited_s` seconds: killed, stopped, stuck, or they never called.

    `ranks` are ranks of the process group, `phases` the last that each of them was seen in.
    """

    ranks: tuple[int, ...] | None
    phases: tuple[str, ...] | None
    waited_s: float | None


class StoreLostError(DcpxError, ConnectionError):
    """The process group's store is gone, or did not answer within `waited_s` seconds."""

    waited_s: float | None


class OutcomeUnknownError(DcpxError, RuntimeError):
    """The coordinator, or the store, was lost between its decision and its answer.

    The directory holds either the previous checkpoint or the new one, whole.
    """


class RepairError(DcpxError, ValueError):
    """`repair` refuses: the metadata is good, or what the footers say makes no whole checkpoint.

    `path` is the file of metadata that was to be made anew, or their directory, `candidates` the
    data files from which nobody can choose, or that lack something. `assumptions` is what was not
    accepted, where that is all that is missing. `is_good`: the metadata is good; whether the
    data are too, `verify` says.
    """

    path: str | None
    candidates: tuple[str, ...] | None
    assumptions: tuple[str, ...] | None
    is_good: bool | None


class UnsupportedError(DcpxError, NotImplementedError):
    """A valid request that torch-dcpx refuses by name instead of serving it wrongly."""
