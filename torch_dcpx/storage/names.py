"""Names in a checkpoint directory and in a manager's root, and the entry of a data file.

No other module spells one, but for `artifacts`, which names the files of an export, by the suffixes
that stand here. Names follow
stock DCP: `__{rank}_{n}.distcp` for data, `.metadata` for a global commit, `__{rank}.metadata` for
one of a rank by itself (rank-local mode).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from typing import NamedTuple

METADATA_NAME = ".metadata"
LOCK_NAME = ".dcpx.lock"
READERS_NAME = ".dcpx.readers"  # readers of the checkpoint lock it, and so does its removal
PIN_NAME = ".dcpx.pin"  # keeps a checkpoint of a manager
TOMBSTONE_NAME = ".dcpx.deleted"  # what `.metadata` becomes when its checkpoint is deleted

FOLDER_NAME = ".dcpx.folder"  # in an adapter's folder of several checkpoints: what is ours in it
SAVING_PREFIX = ".dcpx.saving."  # beside such a folder: what the next one is made in

POINTER_NAME = "newest"  # in a manager's root
TRASH_PREFIX = ".dcpx.trash."  # directories on their way out
ROOT_LOCK_NAME = ".dcpx.root"  # in a manager's root: who saves there; with a number in a directory

TORCH_SUFFIXES = (".bin", ".pt", ".pth")  # of files of torch.save
ARTIFACT_SUFFIXES = (".safetensors", ".index.json", *TORCH_SUFFIXES)  # of an export
# Of Hugging Face's libraries, with a variant: model.safetensors.index.fp16.json
_INDEX = re.compile(r".+\.(safetensors|bin)\.index(\.[\w-]+)?\.json")

_NUMBER = "(0|[1-9][0-9]{0,8})"  # as `str` writes a rank, or a file's number
_DATA_FILE = re.compile(rf"__{_NUMBER}_{_NUMBER}(?:\.([0-9a-f]{{12}}))?\.distcp")
_METADATA = re.compile(rf"(__{_NUMBER})?\.metadata")
_RANK_LOCK = re.compile(rf"\.dcpx\.{_NUMBER}\.lock")
_TEMPORARY = re.compile(rf"(__{_NUMBER})?\.metadata\.[0-9a-f]{{12}}\.tmp")
_PROBE = re.compile(r"\.dcpx\.probe\.[0-9a-f]{12}")
_POINTER_TEMPORARY = re.compile(r"newest\.[0-9a-f]{12}\.tmp")
# NFS and libfuse rename a file that is removed while it is open.
_OPEN_FILE = re.compile(r"\.nfs[0-9a-f]{8,}|\.fuse_hidden[0-9a-f]{8,}")
_ROOT_LOCK = re.compile(r"\.dcpx\.root\.([1-9][0-9]{0,17})")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
# As managers, torchtitan, Megatron-Core, DeepSpeed, Lightning and the Trainer write it.
_STEP = re.compile(
    r"(?<![A-Za-z])(?:(?:(?:global_?)?step|iter)[-_=]?([0-9]{1,18})(?![0-9])|checkpoint-([0-9]{1,18}))"
)


class Look(NamedTuple):
    """Holds what one look at a place has found."""

    names: list[str]  # of all that lies directly in it
    size: Callable[[str], int | None]  # bytes of a regular file by name; None: there is no such
    beneath: Callable[[], list[str]]  # names of directories, or of prefixes
    modified_s: Callable[[str], float | None]  # since 1970: when a file of it was last written


class FileEntry(NamedTuple):
    """One data file of a save, as its rank reports it."""

    path: str  # relative to the checkpoint directory
    file_id: bytes  # 16 random bytes, also in the file's footer
    nbytes: int  # size of the whole file
    footer_crc: int  # CRC-32 of the footer's tail
    save_id: bytes = b""  # 16 bytes: of its save; b"": not known


def id_bytes(save_id: object) -> bytes:
    """Returns a save's id as footers hold it; b"" if it is none."""
    is_id = isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id)
    return bytes.fromhex(str(save_id)) if is_id else b""


def data_file_names(prefix: str, index: int, file_id: bytes, *, is_fresh: bool) -> tuple[str, ...]:
    """Returns the names to try, in order, for data file number `index` of a rank.

    Args:
        prefix: DCP's storage prefix, `__{rank}_`.
        file_id: 16 random bytes; 12 hex digits of them make a name that was never used.
        is_fresh: the directory holds no metadata, so no reader knows the stock name.
    """
    own = f"{prefix}{index}.{file_id.hex()[:12]}.distcp"
    return (f"{prefix}{index}.distcp", own) if is_fresh else (own,)


def data_file_parts(name: str) -> tuple[int, int, str | None] | None:
    """Returns rank, number and 12 hex digits of the file id (None in a stock name) of the name of a
    data file; None for any other name.
    """
    found = _DATA_FILE.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), found[3])


def metadata_name(rank: int | None) -> str:
    """Returns the name of the global metadata file, or of a rank's own in rank-local mode."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def is_data_file_name(name: str) -> bool:
    """Whether a save, ours or stock's, gives `name` to a data file: a removal may take it.

    Any other name is a user's own, `__my_notes.distcp` too, or has a user's own prefix.
    """
    return _DATA_FILE.fullmatch(name) is not None


def temporary_name(name: str) -> str:
    """Returns a new name for metadata or a manager's pointer, until the rename to `name`."""
    return f"{name}.{uuid.uuid4().hex[:12]}.tmp"


def is_temporary_name(name: str) -> bool:
    """Whether a save that was killed before its rename leaves `name` behind."""
    return _TEMPORARY.fullmatch(name) is not None


def is_metadata_name(name: str) -> bool:
    """Whether `name` commits a checkpoint: `.metadata` or `__{rank}.metadata`."""
    return _METADATA.fullmatch(name) is not None


def probe_name() -> str:
    """Returns a new name for an object by which a store is asked what it can, and for its clock."""
    return f".dcpx.probe.{uuid.uuid4().hex[:12]}"


def is_probe_name(name: str) -> bool:
    """Whether `probe_name` gives such a name: a killed process may leave the object."""
    return _PROBE.fullmatch(name) is not None


def is_pointer_temporary(name: str) -> bool:
    """Whether a manager that was killed before its pointer's rename leaves `name` behind."""
    return _POINTER_TEMPORARY.fullmatch(name) is not None


def root_lock_name(number: int) -> str:
    """Returns the name of the lock of the so-manieth holder of a root."""
    return f"{ROOT_LOCK_NAME}.{number}"


def root_lock_number(name: str) -> int | None:
    """Returns the number in the name of a root's lock; None of any other name."""
    found = _ROOT_LOCK.fullmatch(name)
    return None if found is None else int(found[1])


def is_artifact_name(name: str) -> bool:
    """Whether `name` is, by its suffix, a file of tensors or an index of such."""
    return name.endswith(ARTIFACT_SUFFIXES) or _INDEX.fullmatch(name) is not None


def index_kind(name: str) -> str | None:
    """Returns "safetensors" or "bin" of the name that Hugging Face's libraries give an index of
    such files; None of any other name.
    """
    found = _INDEX.fullmatch(name)
    return None if found is None else found[1]


def is_of_checkpoint(name: str) -> bool:
    """Whether `name`, in a directory, says that a save, ours or stock's, has been there."""
    return (
        name in (LOCK_NAME, READERS_NAME, PIN_NAME, TOMBSTONE_NAME)
        or name.endswith(".distcp")  # also behind a prefix of a user's own
        or is_metadata_name(name)
        or is_temporary_name(name)
        or is_rank_lock(name)
    )


def holds_checkpoint(names: Iterable[str]) -> bool:
    """Whether files of a save lie among these names: metadata, data, or temporary ones."""
    return any(
        is_metadata_name(name) or is_data_file_name(name) or is_temporary_name(name)
        for name in names
    )


def step_in(path: str) -> int | None:
    """Returns the training step that the last names of a path say; None: they say none."""
    for name in reversed(path.split("/")):
        found = _STEP.search(name)
        if found is not None:
            return int(found[1] or found[2])
    return None


def rank_lock_name(rank: int) -> str:
    """Returns the name of a rank's lock in rank-local mode."""
    return f".dcpx.{rank}.lock"


def is_rank_lock(name: str) -> bool:
    """Whether `name` is a rank's lock of rank-local mode."""
    return _RANK_LOCK.fullmatch(name) is not None


def is_name_of_open_file(name: str) -> bool:
    """Whether NFS or a file system in user space gave `name` to a removed file that is still open.

    The file goes when the last process closes it.
    """
    return _OPEN_FILE.fullmatch(name) is not None
