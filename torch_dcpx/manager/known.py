"""A resume finds what is known to be committed: what is missing is not what was never there.

Known is what the pointer names, what this process has committed, and a directory that a commit has
marked. Where it is not found, or a part of the file system does not answer, nothing older takes its
place, and no training begins anew, without the user's word (`allow_older=True`).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from torch_dcpx._mounts import is_shared
from torch_dcpx.errors import DcpxError, StorageError
from torch_dcpx.manager.newest import highest_first, is_older_by_name
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.stored import Skipped, Stored
from torch_dcpx.storage.names import (
    METADATA_NAME,
    POINTER_NAME,
    READERS_NAME,
    TOMBSTONE_NAME,
)

logger = logging.getLogger("torch_dcpx")

_WAY_OUT = "CheckpointManager(..., allow_older=True) goes on without it"
_ABSENT = ("NotCommittedError",)  # how a reason begins that is no damage
_LATE = (*_ABSENT, "StorageError", "ShortReadError")  # nor this, where nodes see files late


def check_found(
    root: ManagerRoot,
    chosen: Stored | None,
    skipped: Skipped,
    passed: Collection[str] = (),
    *,
    allow_fresh: bool = False,
) -> None:
    """Raises StorageError where a resume that takes `chosen` would go back behind what is known.

    Args:
        root: has looked for the newest checkpoint.
        skipped: what it has passed over, with reasons.
        passed: damaged ones that this resume has tried.
        allow_fresh: whether it starts anew where nothing is chosen. Default False.
    """
    if chosen is None and passed:
        return  # the damage is the error
    problem = _silent(root, chosen, passed)
    problem = problem or _lost(root, chosen, dict(skipped), passed, allow_fresh=allow_fresh)
    is_allowed = root.allow_older
    if problem is None and chosen is None and (allow_fresh or not skipped):  # else these are told
        problem, is_allowed = _unread(root), root.allow_older and allow_fresh
    if problem is None:
        return
    if not is_allowed:
        raise problem
    taken = "a fresh start" if chosen is None else f"'{chosen.tag}' is taken"
    logger.warning("allow_older=True: %s: %s", taken, problem)


def _silent(
    root: ManagerRoot, chosen: Stored | None, passed: Collection[str]
) -> StorageError | None:
    """Returns the error of a checkpoint that does not answer, and may be newer than the chosen."""
    for tag in highest_first(root.silent):
        error = root.silent[tag]
        if tag in passed or _is_older(tag, chosen):
            continue
        text = f"resume from '{root.path}': '{tag}' does not answer, and may be the newest: {error}"
        return StorageError(f"{text}; {_WAY_OUT}", errno=error.errno, path=error.path)
    return None


def _is_older(tag: str, chosen: Stored | None) -> bool:
    return chosen is not None and is_older_by_name(tag, chosen)


def _lost(
    root: ManagerRoot,
    chosen: Stored | None,
    reasons: dict[str, str],
    passed: Collection[str],
    *,
    allow_fresh: bool,
) -> StorageError | None:
    """Returns the error of a commit that is known and was not found; of a damaged one where a
    training would begin anew.
    """
    known, begins_anew = root.known, chosen is None and allow_fresh
    if known.tag is not None:
        is_later = chosen is not None and (chosen.is_ours and chosen.order >= known.order)
        if is_later or known.tag in passed or root.has_seen(known.save_id):
            return None
        if known.tag in root.being_committed:
            return None  # by the save in which a signal's handler resumes
        tag, what = known.tag, f"'{known.tag}' (save {known.save_id}) is known to be committed"
    else:
        newer = [tag for tag in highest_first(reasons) if not _is_older(tag, chosen)]
        marked = [tag for tag in newer if _is_marked(root, tag, begins_anew=begins_anew)]
        if not marked and not (newer and _lacks_pointer(root, chosen, begins_anew=begins_anew)):
            return None
        tag = (marked or newer)[0]
        what = f"'{tag}' holds files of a commit"
        if not marked:
            what = f"'{tag}' may be the newest, for there is no '{POINTER_NAME}' to say it"
    reason = reasons.get(tag, "")
    is_damage = not reason.startswith(_LATE if is_apart(root) else _ABSENT)
    if reason and is_damage and not begins_anew:
        return None  # the one before it may take its place
    if is_removed(root, tag):
        return None
    found = reason or f"'{root.path / tag}' is not there"
    return StorageError(
        f"resume from '{root.path}': {what}, and is not found whole: {found}; {_WAY_OUT}",
        errno=errno.ENOENT,
        path=str(root.path / tag / METADATA_NAME),
    )


def check_none_silent(root: ManagerRoot, kept: str, skipped: Skipped) -> None:
    """Raises StorageError where a checkpoint besides `kept` may be whole: it does not answer, or
    another node's file system hides it. Args: `skipped` is what the last listing has passed over.
    """
    for tag in highest_first(tag for tag, _ in skipped if tag != kept):
        error = root.silent.get(tag)
        if error is None and not (is_apart(root) and not is_removed(root, tag)):
            continue
        text = f"delete '{root.path / kept}': no other whole checkpoint is seen, and '{tag}' "
        text += f"does not answer: {dict(skipped)[tag]}; nothing was removed"
        path = str(root.path / tag / METADATA_NAME)
        raise StorageError(text, errno=error.errno if error else errno.ENOENT, path=path)


def _unread(root: ManagerRoot) -> StorageError | None:
    """Returns the error of a pointer that is there and cannot be read: it names some commit."""
    if not root.unread:
        return None
    return StorageError(
        f"resume from '{root.path}': '{POINTER_NAME}' is there and of no use, and no checkpoint is "
        f"found: {root.unread}; CheckpointManager(..., allow_older=True, allow_fresh=True) starts "
        "anew all the same",
        errno=errno.EIO,
        path=str(root.path / POINTER_NAME),
    )


def is_apart(root: ManagerRoot) -> bool:
    """Returns whether other nodes mount the root's file system: a missing file is no damage."""
    return isinstance(root.path, Path) and is_shared(root.path)


def is_removed(root: ManagerRoot, tag: str) -> bool:
    """Returns whether a manager has begun to remove a checkpoint."""
    with suppress(DcpxError), root.files.open(tag) as place:
        return place.is_regular(TOMBSTONE_NAME) and not place.is_regular(METADATA_NAME)
    return False


def _is_marked(root: ManagerRoot, tag: str, *, begins_anew: bool) -> bool:
    """Returns whether a commit has left something in a place: its lock file for readers, without
    metadata; or metadata, where a training would begin anew or files are seen late.
    """
    with suppress(DcpxError), root.files.open(tag) as place:
        names = place.names()
        if METADATA_NAME in names:
            return begins_anew or is_apart(root)
        return READERS_NAME in names and TOMBSTONE_NAME not in names
    return False


def _lacks_pointer(root: ManagerRoot, chosen: Stored | None, *, begins_anew: bool) -> bool:
    """Returns whether a manager's root has lost its pointer: a part of its file system may be gone,
    and what lay there with it. A listing leaves that out, without an error.
    """
    is_managers = begins_anew or (chosen is not None and chosen.record is not None)
    return is_managers and not root.has_pointer and is_apart(root)
