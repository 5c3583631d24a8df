"""`ROOT/newest`: which checkpoint is the newest, in a line of JSON that is replaced as a whole.

It also names the tags whose commit has begun. So a job that is killed between the commit and the
pointer's next writing leaves a pointer that says where to look, and no listing is needed to notice
that it is stale. A reader that does not trust it loses nothing: a listing finds the same. And it
names what a resume found damaged, so that later jobs let it take no good checkpoint's place.
"""

from __future__ import annotations

import errno
import json
import re
import uuid
from pathlib import Path
from typing import NamedTuple

from torch_dcpx.errors import CorruptionError, StorageError
from torch_dcpx.manager.checkpoint_tags import is_tag
from torch_dcpx.storage.directory import Directory, make_directory

POINTER_NAME = "newest"
_FORMAT = 1
_MAX_BYTES = 1 << 20
_TEMPORARY = re.compile(r"newest\.[0-9a-f]{12}\.tmp")


class Pointer(NamedTuple):
    """What the pointer says."""

    tag: str | None  # None: nothing was committed so far
    step: int | None  # of that checkpoint, for people and scripts
    save_id: str | None
    order: int  # of its commit; the last one that this root had
    committing: tuple[str, ...] = ()  # tags whose commit has begun
    damaged: tuple[str, ...] = ()  # ids of saves of which a resume has found wrong bytes


def is_own_name(name: str) -> bool:
    """Whether a file of this name in a root is the pointer, or a piece of one."""
    return name == POINTER_NAME or _TEMPORARY.fullmatch(name) is not None


def read_pointer(root: Path) -> Pointer | None:
    """Returns the pointer; None where there is none.

    Raises:
        CorruptionError: it is none of ours, or torn.
        StorageError: it cannot be read.
    """
    path = root / POINTER_NAME
    try:
        with Directory(root) as directory, directory.open_small(POINTER_NAME) as file:
            text = file.part(0, min(file.nbytes, _MAX_BYTES + 1))
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        found = json.loads(text)
        pointer = Pointer(
            found["tag"],
            found["step"],
            found["save_id"],
            found["order"],
            tuple(found["committing"]),
            tuple(found.get("damaged", ())),
        )
        tags = [tag for tag in (pointer.tag, *pointer.committing) if tag is not None]
        is_right = (
            found["format"] == _FORMAT
            and type(pointer.order) is int
            and (pointer.step is None or type(pointer.step) is int)
            and (pointer.save_id is None or type(pointer.save_id) is str)
            and all(type(tag) is str and is_tag(tag) for tag in tags)
            and all(type(save_id) is str for save_id in pointer.damaged)
        )
        if not is_right:
            raise TypeError("its values are not those of a pointer")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(
            f"read '{path}' of {len(text)} B: no pointer to a checkpoint: {error}",
            path=str(path),
            offset=0,
            nbytes=len(text),
        ) from error
    return pointer


def write_pointer(root: Path, pointer: Pointer, *, is_durable: bool, is_alone: bool = True) -> None:
    """Replaces the pointer: written under another name, fsynced, renamed, directory fsynced.

    Args:
        root: of the checkpoints; made where it is missing.
        pointer: what to write.
        is_durable: whether to fsync.
        is_alone: whether no other job writes at this moment: what killed ones left is removed.

    Raises:
        StorageError: it could not be written; the one before is still there.
    """
    make_directory(root, is_durable=is_durable)
    fields = {"format": _FORMAT, **pointer._asdict()}
    if not pointer.damaged:
        del fields["damaged"]
    content = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    with Directory(root) as directory:
        for name in directory.names() if is_alone else ():
            if _TEMPORARY.fullmatch(name):  # of a job that was killed
                directory.unlink(name)
        temporary = f"{POINTER_NAME}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            directory.create(temporary, [content], is_durable=is_durable)
            directory.rename(temporary, POINTER_NAME)
        except BaseException:
            directory.unlink(temporary)
            raise
        if is_durable:
            directory.sync()
