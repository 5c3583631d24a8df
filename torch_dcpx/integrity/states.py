"""The state of what lies in a place: one look, for `ls`, `verify`, `gc`, `repair` and `doctor`.

committed   its metadata is there; `saving` says who saves to it anew at this moment
saving      it is no checkpoint yet: somebody holds its lock
removed     a manager has removed it; what is left goes later
unfinished  data of a save that nobody holds
unreadable  nobody can tell: `text` says why
none        no sign of a checkpoint

A store has no locks. A manager's save puts a mark there, which counts while the record of its root
says that the manager lives; of other saves nothing shows before their commit, but that their
objects are young. Imports no torch.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from torch_dcpx._answered_os import os
from torch_dcpx._json import parsed_json
from torch_dcpx._text import age_text, counted
from torch_dcpx.errors import CorruptionError, DcpxError, NotCommittedError, StorageError
from torch_dcpx.reader.hints import absent, command
from torch_dcpx.reader.safetensors import file_among
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    TOMBSTONE_NAME,
    Look,
    data_file_parts,
    holds_checkpoint,
    index_kind,
    is_data_file_name,
    is_metadata_name,
    is_rank_lock,
    metadata_name,
    step_in,
)
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place, PosixPlace, open_place
from torch_dcpx.storage.root_record import ObjectRecord
from torch_dcpx.storage.save_lock import owner_of
from torch_dcpx.storage.visibility import hidden

Kind: TypeAlias = Literal["committed", "saving", "removed", "unfinished", "unreadable", "none"]

GRACE_S = 3600.0  # of managers, by default: what is older in a store is no save under way
_YOUNG_S = 600.0  # objects of a save without a mark: of one that may be under way
_LATE_S = 300.0  # a holder's record that is older: clocks of machines differ
_MOST_BENEATH = 1000  # directories of the second level
_MOST_LOOKS = 5  # while names come and go
_MAX_NOTE_BYTES = 64 << 20
_MAX_S = 253402300799  # the last second of the year 9999


class State(NamedTuple):
    """Says what lies in a place."""

    kind: Kind
    text: str = ""  # all of it in words, but for a committed one
    saving: str = ""  # who saves there now
    is_young: bool = False  # unfinished: a save that shows no lock may be under way
    error: DcpxError | None = None  # of an unreadable one
    is_export: bool = False  # of no checkpoint: safetensors lie there


@dataclass(frozen=True)
class Seen:
    """One place, as the walk has found it; closed when the walk goes on."""

    name: str  # beneath the root
    path: Location
    state: State
    place: Place | None = None  # None: it cannot be opened
    look: Look | None = None


# ---- One place -----------------------------------------------------------------------------------


def state_of(place: Place, look: Look | None = None) -> tuple[State, Look]:
    """Returns the state of an open place, and the look that shows it, newer than `look` where a
    save has ended meanwhile. Changes nothing, and keeps no save away.

    Raises: StorageError: it cannot be listed.
    """
    look = look or place.look()
    for _ in range(_MOST_LOOKS):
        saving = _saving(place, look)
        if saving or is_committed(look.names) or not holds_checkpoint(look.names):
            break
        again = place.look()  # behind the lock: a save may have committed between
        if again.names == look.names:
            break
        look = again
    return _state(place, look, saving), look


def state_at(path: Location) -> State:
    """Returns the state of a place by its path; "none" where no such directory is any more.

    Raises: StorageError: it cannot be opened or listed.
    """
    try:
        with opened(path) as place:
            return state_of(place)[0]
    except NotCommittedError:
        return State("none")


def is_committed(names: Sequence[str]) -> bool:
    """Whether these names are those of a committed checkpoint."""
    return any(map(is_metadata_name, names))


def ranks_without_metadata(names: Sequence[str]) -> list[str]:
    """Returns the data files of ranks that lack metadata beside those of others: each rank's own
    save that did not end, or is under way.
    """
    if METADATA_NAME in names or not is_committed(names):
        return []
    parts = {name: data_file_parts(name) for name in names}
    return [n for n, found in parts.items() if found and metadata_name(found[0]) not in names]


def _state(place: Place, look: Look, saving: str) -> State:
    names = look.names
    if is_committed(names) and not (saving and ranks_without_metadata(names)):
        return State("committed", saving=saving)
    # A removal holds the lock of a directory, too; the mark in a store is of saves alone.
    if TOMBSTONE_NAME in names and not (saving and place.is_object):
        return State("removed", _removed(place, look), saving)
    if saving:
        return State("saving", f"a save is under way ({saving})", saving)
    problem = _hidden(place, names)
    if problem is not None:
        return State("unreadable", str(problem), error=problem)
    if not holds_checkpoint(names):
        return State("none")
    files = counted(sum(map(is_data_file_name, names)), "data file")
    youngest = _youngest(look)
    text, age_s = f"{files} of a save that did not end", time.time() - (youngest or 0.0)
    is_young = age_s < _YOUNG_S and not (isinstance(place, PosixPlace) and _has_record(look))
    if is_young:
        when = age_text(max(0.0, age_s))
        text += f", the last one changed {when}: a save that takes no lock may be under way"
    return State("unfinished", text, is_young=is_young)


def refuse_hidden(place: Place, names: Sequence[str]) -> None:
    """Raises StorageError where a place of these names may hold a checkpoint which nobody sees."""
    problem = _hidden(place, names)
    if problem is not None:
        raise problem


def _hidden(place: Place, names: Sequence[str]) -> StorageError | None:
    """Returns the error of a place that may hold a checkpoint which nobody sees."""
    if not isinstance(place, PosixPlace):
        return None
    try:
        why = hidden(place, names)
    except StorageError as error:
        return error
    text = f"look into '{place.path}': {why}"
    return StorageError(text, errno=errno.ENOENT, path=str(place.path)) if why else None


def _has_record(look: Look) -> bool:
    """Whether a save has noted itself there that nobody holds any more: it was killed."""
    locks = [name for name in look.names if name == LOCK_NAME or is_rank_lock(name)]
    return any(look.size(name) for name in locks)


def _youngest(look: Look) -> float | None:
    dates = map(look.modified_s, filter(is_data_file_name, look.names))
    return max((date for date in dates if date is not None), default=None)


def _saving(place: Place, look: Look) -> str:
    """Returns who saves to a place at this moment, and since when; "" if nobody can be seen."""
    if isinstance(place, ObjectPlace):
        return _marked(place, look) if LOCK_NAME in look.names else ""
    for name in look.names:
        if name == LOCK_NAME or is_rank_lock(name):
            with suppress(CorruptionError, StorageError):  # no file, or nobody may look
                owner = owner_of(place, name)
                if owner:
                    return f"{owner}, since {utc_text(look.modified_s(name)) or 'unknown'}"
    return ""


def _marked(place: ObjectPlace, look: Look) -> str:
    """Returns whose mark of a save lies in a store, "" where its manager has gone."""
    since, now_s = look.modified_s(LOCK_NAME) or 0.0, time.time()
    if now_s - since > GRACE_S:
        return ""
    holder: Holder | None = None
    root = ObjectPlace(place.path.parent)
    with suppress(DcpxError):  # no record, or none that can be read
        record = ObjectRecord(root, is_conditional=False)
        holder = record.look().holder
    if holder is None or holder.is_over:
        return ""
    fate = holder.fate(None, str(root.path))
    is_late = fate == "unknown" and now_s - _seconds(holder.renewed) > _LATE_S
    is_of_other = since < _seconds(holder.since) - _LATE_S  # a mark of an earlier job
    if fate == "gone" or is_late or is_of_other:
        return ""
    return f"host={holder.host} pid={holder.pid}, since {utc_text(since)}"


def _removed(place: Place, look: Look) -> str:
    """Returns what is said of a removed checkpoint: when, and until when what is left stays."""
    text = "its manager has removed it"
    if not isinstance(place, ObjectPlace):
        return f"{text}; what is left goes with the manager's next commit"
    since = look.modified_s(TOMBSTONE_NAME)
    grace = None
    with suppress(DcpxError, ValueError, KeyError, TypeError, RecursionError):
        with place.open_small(TOMBSTONE_NAME) as note:
            found = parsed_json(note.part(0, min(note.nbytes, _MAX_NOTE_BYTES)))["grace_s"]
        grace = float(found)
    if grace is None or since is None:
        stays = "for the grace of that manager"
    else:
        stays = f"until {utc_text(since + grace) or 'later'}"
    when = utc_text(since) or "nobody knows when"
    return (
        f"{text} ({when}); its data stay {stays}, for loads under way, and go with a later commit"
    )


def utc_text(seconds: float | None) -> str | None:
    """Returns a time since 1970 as "2026-01-31T23:59:59Z"; None of none, or of no such year."""
    if seconds is None or not 0 <= seconds <= _MAX_S:
        return None
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float:
    """Returns the time of a holder's record; 0 of no time."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return 0.0


# ---- All beneath a root --------------------------------------------------------------------------


def walk(path: Location) -> Iterator[Seen]:
    """Yields what lies at `path`: itself, if it is a checkpoint or what is left of one; else what
    lies beneath, one level down, and two where no checkpoint is. Each is open until the next.

    What cannot be opened comes as "unreadable", or as "none" with a text, where nothing says that
    it is a checkpoint, as `lost+found`.

    Raises: NotCommittedError: no directory; StorageError: it cannot be listed, or it is a URL
    beneath which nothing lies.
    """
    with opened(path) as place:
        state, look = state_of(place)
        if state.kind != "none":
            yield Seen(path.name or str(path), path, state, place, look)
            return
        names = look.beneath()
        if place.is_object and not (look.names or names):
            text = f"'{path}': the store holds nothing beneath it"
            raise StorageError(text, errno=errno.ENOENT, path=str(path))
    links = _lost_links(path, set(look.names).difference(names)) if isinstance(path, Path) else []
    budget = [_MOST_BENEATH]
    is_any = False
    for name in sorted([*names, *links], key=in_order):
        for seen in _beneath(path / name, name, budget, is_last=False):
            is_any = is_any or seen.state.kind != "none"
            yield seen
    if budget[0] < 0:
        text = f"no more than {_MOST_BENEATH} directories two levels down were looked into"
        yield Seen(path.name or str(path), path, State("none", text))
    own = _no_checkpoint(path, look.names)
    if own.is_export and not is_any:  # beside checkpoints it is not what was asked about
        yield Seen(path.name or str(path), path, own)


def opened(where: Location, text: str = "") -> Place:
    """Opens a place, which errors call `text`. Raises: NotCommittedError: there is no such
    directory; StorageError: it cannot be opened.
    """
    text = text or str(where)
    try:
        return open_place(where)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise NotCommittedError(absent(text), errno=error.errno, path=text) from error


def in_order(name: str) -> list[str | int]:
    """Returns a key by which step-5 comes before step-10."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", name))]


def _beneath(path: Location, name: str, budget: list[int], *, is_last: bool) -> Iterator[Seen]:
    names: list[str] = []
    none = State("none")
    try:
        with open_place(path) as place:
            state, look = state_of(place)
            if state.kind != "none":
                yield Seen(name, path, state, place, look)
                return
            none = _no_checkpoint(path, look.names)
            if not is_last and not _is_link(path):
                names = look.beneath()
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR) or _is_link(path):
            yield Seen(name, path, _unreadable(path, error))
        return  # else it has gone meanwhile
    has_any = False
    for each in sorted(names, key=in_order):
        budget[0] -= 1
        if budget[0] < 0:
            break
        for seen in _beneath(path / each, f"{name}/{each}", budget, is_last=True):
            if seen.state.kind != "none" or seen.state.is_export:
                has_any = True
                yield seen
    if none.is_export or not (has_any or is_last):
        yield Seen(name, path, none)


def _no_checkpoint(path: Location, names: Sequence[str]) -> State:
    """Returns the state of a place without one, which leads on to the export there."""
    files = [name for name in names if name.endswith(".safetensors") or index_kind(name)]
    if not files:
        return State("none")
    where = path
    try:
        file_among(path, names)
    except NotCommittedError:  # several, or a part
        where = path / min(files)
    text = f"no checkpoint, but an export: {command('inspect', where)} shows it"
    return State("none", text, is_export=True)


def _unreadable(path: Location, error: StorageError) -> State:
    """Returns the state of what cannot be opened: a note, unless it may be a checkpoint."""
    text = str(error)
    if isinstance(path, Path) and _is_link(path) and not _is_there(path):
        text = f"it is a link to '{os.readlink(path)}', which is not there"
    is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP)
    if isinstance(path, Path) and is_refused and step_in(path.name) is None:
        signs = (METADATA_NAME, LOCK_NAME, TOMBSTONE_NAME)
        if not any(_is_there(path / sign) for sign in signs):
            return State("none", text)
    return State("unreadable", text, error=error)


def _lost_links(path: Path, names: set[str]) -> list[str]:
    """Returns the names of links that lead nowhere."""
    return [name for name in names if _is_link(path / name) and not _is_there(path / name)]


def _is_link(path: Location) -> bool:
    try:
        return isinstance(path, Path) and os.path.islink(path)
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError:
        return False
    return True
