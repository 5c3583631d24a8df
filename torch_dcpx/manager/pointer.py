"""Tags, the names of checkpoints beneath a root, and `ROOT/newest`, which points to one of them.

A tag is the name of a directory in the root. The pointer is a line of JSON that each commit
replaces as a whole. It names
- the newest checkpoint. A listing gives the same answer, for a reader without the pointer;
- the tags whose commit has begun: after a kill between a commit and the next pointer, the next job
  sees without a listing that the pointer is stale, and where to look;
- the damaged saves of past resumes: a later job's retention keeps a good checkpoint instead;
- the run, and of which root: checkpoints that say another run were brought here by the user. In a
  root that was copied or moved the next save begins another run, for the first may go on in the
  root before; `earlier` has the runs whose checkpoints came with the root.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from torch_dcpx._answered_os import os
from torch_dcpx._integers import plain_int
from torch_dcpx.errors import (
    CorruptionError,
    OptionError,
    StorageError,
    UnsupportedError,
    must_be,
)
from torch_dcpx.storage.names import POINTER_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, SmallContent

Tag: TypeAlias = str | SupportsIndex  # a name, or a step

_MAX_TAG_BYTES = 249  # a name may have 255
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MAX_STEP = 10**18 - 1
_FORMAT = 1  # of the pointer
_MAX_BYTES = 1 << 20  # of the pointer


def tag_of(tag_or_step: Any) -> str:
    """Returns a checkpoint's tag, "step-N" of a step. Raises: OptionError."""
    step = plain_int(tag_or_step)
    if type(step) is int:
        return f"step-{checked_step(step, 'tag')}"
    is_text = type(tag_or_step) is str
    problem = _problem_of(tag_or_step) if is_text else "it is neither a str nor a step"
    if problem:
        rule = f"a tag is a step (int), or the name of one directory, of at most {_MAX_TAG_BYTES} B"
        message = f"name a checkpoint {tag_or_step!r:.80}: {problem}; {rule}"
        raise OptionError(message, option="tag", value=tag_or_step)
    return str(tag_or_step)


def tag_or_none(tag_or_step: Any) -> str | None:
    """Returns `tag_of`, or None where that raises."""
    try:
        return tag_of(tag_or_step)
    except OptionError:
        return None


def _problem_of(tag: str) -> str:
    """Returns why a name cannot be a tag, "" if it can."""
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
    """Returns whether a checkpoint may have this name."""
    return not _problem_of(name)


def checked_step(value: Any, option: str = "step", low: int = 0) -> int:
    """Returns a step of any integer type as an int. Raises OptionError: it is none."""
    step = plain_int(value)
    if type(step) is not int or not low <= step <= _MAX_STEP:
        raise must_be(option, value, f"an int from {low} to {_MAX_STEP}")
    return step


def step_of_name(tag: str) -> int | None:
    """Returns the step N of a tag "step-N"; None of any other."""
    match = _STEP_NAME.fullmatch(tag)
    return int(match[1]) if match else None


class Pointer(NamedTuple):
    """The content of the pointer."""

    tag: str | None = None  # None: nothing was committed so far
    step: int | None = None  # of that checkpoint, for people and scripts
    save_id: str | None = None
    order: int = 0  # of its commit; the last one that this root had
    committing: tuple[str, ...] = ()  # tags whose commit has begun
    damaged: tuple[str, ...] = ()  # ids of saves in which a resume has read wrong bytes
    run: str = ""  # that saves beneath this root; "": an earlier version noted none
    root: str = ""  # by its `identity_of`; "": an earlier version noted none
    earlier: Mapping[str, int] = MappingProxyType({})  # runs, and their last orders here


def read_pointer(place: Place) -> Pointer | None:
    """Returns the pointer of an open root, None of a missing one. Raises: CorruptionError,
    StorageError.
    """
    try:
        with place.open_small(POINTER_NAME) as file:
            return decoded_pointer(file)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def decoded_pointer(file: SmallContent) -> Pointer:
    """Returns the pointer in an open file. Raises: CorruptionError, StorageError."""
    text = file.part(0, min(file.nbytes, _MAX_BYTES + 1))
    try:
        found = json.loads(text)
        pointer = Pointer(*(found[name] for name in ("tag", "step", "save_id", "order")))._replace(
            committing=tuple(found["committing"]),
            damaged=tuple(found.get("damaged", ())),
            run=found.get("run", ""),
            root=found.get("root", ""),
            earlier=dict(found.get("earlier", {})),
        )
        tags = [tag for tag in (pointer.tag, *pointer.committing) if tag is not None]
        if not (
            found["format"] == _FORMAT
            and type(pointer.order) is int
            and (pointer.step is None or type(pointer.step) is int)
            and (pointer.save_id is None or type(pointer.save_id) is str)
            and all(type(tag) is str and is_tag(tag) for tag in tags)
            and all(type(word) is str for word in (pointer.run, pointer.root, *pointer.damaged))
            and all(type(order) is int for order in pointer.earlier.values())
        ):
            raise TypeError("its values are not those of a pointer")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        path = str(file.path)
        problem = f"read '{path}' of {len(text)} B: no pointer to a checkpoint: {error}"
        raise CorruptionError(problem, path=path, offset=0, nbytes=len(text)) from error
    return pointer


def refuse_users_pointer(root: Location) -> None:
    """Raises UnsupportedError: a user's link or directory has the name of the root's pointer."""
    path = root / POINTER_NAME
    try:
        mode = os.lstat(path).st_mode if isinstance(path, Path) else 0
    except OSError:  # of a missing one, or the next call tells
        return
    if stat.S_ISLNK(mode) or stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a directory"
        raise UnsupportedError(
            f"save beneath '{root}': '{path}' is {kind}, and a manager writes its pointer to the "
            "newest checkpoint under that name: move it, or save beneath another root"
        )


def encoded_pointer(pointer: Pointer) -> bytes:
    """Returns the line that `read_pointer` reads."""
    fields = {"format": _FORMAT, **pointer._asdict(), "earlier": dict(pointer.earlier)}
    for name in ("damaged", "run", "root", "earlier"):
        if not fields[name]:
            del fields[name]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
