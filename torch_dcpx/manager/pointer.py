"""Tags, the names of checkpoints beneath a root, and `ROOT/newest`, which points to one of them.

A tag is the name of a directory in the root. The pointer is a line of JSON that each commit
replaces as a whole. It names the newest checkpoint, and the tags whose commit has begun: a job that
is killed between a commit and the next pointer leaves a pointer that says where to look, and the
next job sees without a listing that it is stale. A reader that does not trust the pointer loses
nothing, because a listing gives the same answer. The pointer also names the saves that a resume has
seen damaged, so that a later job's retention keeps a good checkpoint instead.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcpx.errors import CorruptionError, OptionError, StorageError
from torch_dcpx.storage.directory import Directory, make_directory
from torch_dcpx.storage.names import POINTER_NAME, is_pointer_temporary, temporary_name

_MAX_TAG_BYTES = 249  # a name may have 255
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MAX_STEP = 10**18 - 1


def tag_of(tag_or_step: Any) -> str:
    """Returns the name of a checkpoint's directory: itself, or "step-N" of a step.

    Raises:
        OptionError: no step from 0 on, and no name that may be given to a checkpoint.
    """
    if type(tag_or_step) is int:
        check_step(tag_or_step)
        return f"step-{tag_or_step}"
    problem = "it is neither a str nor a step" if type(tag_or_step) is not str else ""
    problem = problem or _problem_of(tag_or_step)
    if problem:
        raise OptionError(
            f"name a checkpoint {tag_or_step!r:.80}: {problem}; a tag is a step (int), or the name "
            f"of one directory, of at most {_MAX_TAG_BYTES} B",
            option="tag",
            value=tag_or_step,
        )
    tag: str = tag_or_step
    return tag


def tag_or_none(tag_or_step: Any) -> str | None:
    """Returns as `tag_of`, None where that raises."""
    try:
        return tag_of(tag_or_step)
    except OptionError:
        return None


def _problem_of(tag: str) -> str:
    """Returns what is wrong with a name, "" if nothing is."""
    try:
        nbytes = len(os.fsencode(tag))
    except UnicodeEncodeError:
        return "the file system's encoding has no such character"
    if not tag or tag != tag.strip():
        return "it is empty, or begins or ends with a space"
    if nbytes > _MAX_TAG_BYTES:
        return f"it has {nbytes} B"
    if "/" in tag or not tag.isprintable():
        return "it has a slash or a character that cannot be printed"
    if tag.startswith("."):
        return "names that begin with a dot are the manager's own"
    if tag == "newest" or tag.startswith("newest."):
        return "the name is the manager's own"
    return ""


def is_tag(name: str) -> bool:
    """Whether a directory of this name may be a checkpoint of a manager's."""
    return not _problem_of(name)


def check_step(step: Any, option: str = "step") -> None:
    """Raises OptionError for what is no step."""
    if type(step) is not int or not 0 <= step <= _MAX_STEP:
        raise OptionError(
            f"{option} must be an int from 0 to {_MAX_STEP}, got {step!r:.80}",
            option=option,
            value=step,
        )


def step_of_name(tag: str) -> int | None:
    """Returns the step that a tag names, "step-N"; None of any other."""
    match = _STEP_NAME.fullmatch(tag)
    return int(match[1]) if match else None


# ---- The pointer ---------------------------------------------------------------------------------


_FORMAT = 1
_MAX_BYTES = 1 << 20


class Pointer(NamedTuple):
    """The content of the pointer."""

    tag: str | None  # None: nothing was committed so far
    step: int | None  # of that checkpoint, for people and scripts
    save_id: str | None
    order: int  # of its commit; the last one that this root had
    committing: tuple[str, ...] = ()  # tags whose commit has begun
    damaged: tuple[str, ...] = ()  # ids of saves in which a resume has read wrong bytes


def is_own_name(name: str) -> bool:
    """Whether a file of this name in a root is the pointer, or a piece of one."""
    return name == POINTER_NAME or is_pointer_temporary(name)


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
            if is_pointer_temporary(name):  # of a job that was killed
                directory.unlink(name)
        temporary = temporary_name(POINTER_NAME)
        try:
            directory.create(temporary, [content], is_durable=is_durable)
            directory.rename(temporary, POINTER_NAME)
        except BaseException:
            directory.unlink(temporary)
            raise
        if is_durable:
            directory.sync()
