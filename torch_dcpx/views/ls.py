"""`dcpx.ls`: the checkpoints at a path, or beneath it, and the state of each. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch_dcpx._answers import current_timeout, wait_at_most
from torch_dcpx._arguments import check_bool
from torch_dcpx._text import age_text, human_bytes
from torch_dcpx.errors import CorruptionError, DcpxError, ShortReadError
from torch_dcpx.integrity.contents import commits_among, location, read_brief
from torch_dcpx.integrity.facts import (
    Facts,
    Files,
    facts_of,
    files_of,
    files_text,
    seen_whole,
)
from torch_dcpx.integrity.states import Kind, Seen, State, state_of, walk
from torch_dcpx.integrity.way_out import settled
from torch_dcpx.metadata.brief import Brief
from torch_dcpx.reader.hints import command
from torch_dcpx.storage.names import Look
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.storage.visibility import or_hidden
from torch_dcpx.views.tables import Shown, Table


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint, or what is left of one, or of a save.

    Attributes:
        name: beneath the path that was listed.
        path: of it.
        state: "committed"; "saving": no checkpoint yet, and a save is under way; "removed" by its
            manager, what is left goes later; "unfinished": of a save that nobody holds;
            "unreadable": nobody can tell, or its metadata is damaged; "none": no checkpoint.
        step: of the training, by its manager's record or its name; None: unknown.
        saved_at: "2026-01-31T23:59:59Z"; None: unknown.
        ranks: how many saved it; None: unknown.
        nbytes: of its data files.
        pinned: retention leaves it alone.
        save_id: "" if unknown.
        items: how many tensors and objects it names.
        files: how many data files it names.
        missing: how many of these are not there.
        short: how many end before the last byte recorded in them.
        long: how many are longer than they were written, of torch-dcpx's.
        whole: whether all are there in their sizes: `verify` reads the bytes. False also where the
            metadata, or that of a rank, is damaged or lost; None: unknown, or no checkpoint.
        written_by: "torch-dcpx" or "stock".
        problem: why it is not committed, or what is wrong with it, and what can be done.
        saving: who saves to it at this moment, "" if nobody can be seen.
    """

    name: str
    path: str
    state: Kind
    step: int | None = None
    saved_at: str | None = None
    ranks: int | None = None
    nbytes: int = 0
    pinned: bool = False
    save_id: str = ""
    items: int = 0
    files: int = 0
    missing: int = 0
    short: int = 0
    long: int = 0
    whole: bool | None = None
    written_by: str = ""
    problem: str = ""
    saving: str = ""

    @property
    def found(self) -> str:
        """Says if its data files are there: "whole", "1 of 2 missing"; "" where nobody can tell."""
        if self.state != "committed":
            return ""
        counts = self.files, self.missing, self.short, self.long
        return files_text(*counts, is_whole=bool(self.whole))

    @property
    def age_s(self) -> float | None:
        """Seconds since it was saved, by this machine's clock; None: unknown."""
        if self.saved_at is None:
            return None
        saved = datetime.fromisoformat(self.saved_at.replace("Z", "+00:00"))
        return max(0.0, time.time() - saved.timestamp())


@dataclass(frozen=True, repr=False)
class Listing(Shown[ListedCheckpoint]):
    """Holds what `ls` has found. Iterates over the checkpoints.

    Attributes:
        path: that was listed.
        checkpoints: in the order of their names; numbers in these count as numbers.
    """

    _keeps_last = True  # the newest, by their names

    path: str
    checkpoints: tuple[ListedCheckpoint, ...]

    @property
    def newest(self) -> ListedCheckpoint | None:
        """The committed and whole one that was saved last; None: there is none."""
        whole = [one for one in self.checkpoints if one.state == "committed" and one.whole]
        return max(reversed(whole), key=_saved, default=None)

    @property
    def broken(self) -> list[ListedCheckpoint]:
        """Those that are damaged, or of a save that did not end and that nobody holds."""
        return [o for o in self.checkpoints if o.whole is False or o.state == "unfinished"]

    def each(self) -> Sequence[ListedCheckpoint]:
        return self.checkpoints

    def head(self) -> str:
        """Returns how many there are of each state."""
        counts: dict[str, int] = {}
        for one in self.checkpoints:
            if one.state != "none":
                counts[one.state] = counts.get(one.state, 0) + 1
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{self.path}: {states or 'no checkpoint'}"

    def table(self) -> Table:
        """Returns a row for each."""
        columns = ["state", "files", "#step", "saved", "#ranks", "#items", "#size", "pinned"]
        rows = [
            (
                one.state,
                one.found,
                "" if one.step is None else one.step,
                age_text(one.age_s),
                "" if one.ranks is None else one.ranks,
                one.items if one.written_by else "",
                human_bytes(one.nbytes) if one.written_by else "",
                "pinned" if one.pinned else "",
                one.written_by,
                one.name,
            )
            for one in self.checkpoints
        ]
        return Table([*columns, "written by", "name"], rows)

    @property
    def notes(self) -> list[str]:
        """A line for each that has a problem, or is saved to."""
        lines = [f"{one.name}: {one.problem}" for one in self.checkpoints if one.problem]
        return lines + [
            f"{one.name}: a save to it is under way ({one.saving})"
            for one in self.checkpoints
            if one.saving and one.state == "committed"
        ]


def ls(path: str | os.PathLike[str], *, with_all: bool = False) -> Listing:
    """Lists the checkpoints at a path, or beneath it, and says of each what its state is.

    It compares sizes and reads no tensor: see `verify`. Beneath a directory that is no checkpoint
    it looks one level down, and two where it finds none.

    Args:
        path: directory or URL of a checkpoint, or of several.
        with_all: also directories without a checkpoint.

    Returns:
        A `Listing`, which prints as a table, as in a notebook.

    Raises:
        NotCommittedError: `path` is no directory.
        StorageError: it cannot be opened or listed, or is a URL beneath which nothing lies.
        OptionError, UnsupportedError: no path, or a URL of another kind of store.
    """
    check_bool("with_all", with_all)
    where = location(path)
    with wait_at_most(current_timeout()):
        found = [listed(seen) for seen in walk(where)]
    kept = (one for one in found if with_all or one.state != "none" or one.problem)
    return Listing(str(where), tuple(kept))


def listed(seen: Seen) -> ListedCheckpoint:
    """Returns the row of one place of a walk."""
    place, state, look = seen.place, seen.state, seen.look
    if place is None or look is None or state.kind == "none":
        return ListedCheckpoint(seen.name, str(seen.path), state.kind, problem=state.text)
    with being_read(seen.path):
        if not place.is_object:
            state, look = state_of(place)  # a removal may have begun before our lock
            look = seen_whole(place, look)
        row = _listed(seen, place, state, look)
        while not row.whole and row.state in (
            "committed",
            "unreadable",
        ):  # or something was saved or removed meanwhile
            before, (state, look) = row, state_of(place)
            row = _listed(seen, place, state, look)
            if row == before:
                break
    return row


def _listed(seen: Seen, place: Place, state: State, look: Look) -> ListedCheckpoint:
    name, path = seen.name, str(seen.path)
    if state.kind != "committed":
        state = settled(place, state, look.names)
        facts = facts_of(place, look, state)
        return _row(name, path, state.kind, facts, problem=state.text, saving=state.saving)
    commits, files, error = _commits(place, look)
    facts = facts_of(place, look, state, commits)
    if error is not None:
        is_damage = isinstance(error, (CorruptionError, ShortReadError))
        text, whole = f"{type(error).__name__}: {error}", False if is_damage else None
        if "`dcpx" not in text:
            text += f"; {command('verify', path)} says what can be done"
        return _row(name, path, "unreadable", facts, problem=text, whole=whole)
    is_lost = files.missing or files.short or files.long
    way = f"{command('verify', path)} lists all"
    doubt = or_hidden(place.path) if files.missing or not is_lost else ""
    way = way if is_lost or doubt else f"{command('repair', path)} may make it anew"
    return _row(
        name,
        path,
        "committed",
        facts,
        nbytes=sum(files.sizes.values()),
        items=sum(found.items for found in commits),
        files=len(files.sizes),
        missing=files.missing,
        short=files.short,
        long=files.long,
        whole=files.is_whole,
        written_by="torch-dcpx" if commits[0].is_exact else "stock",
        problem=f"{files.faults[0]}{doubt}; {way}" if files.faults else "",
        saving=state.saving,
    )


def _row(name: str, path: str, state: Kind, facts: Facts, **more: Any) -> ListedCheckpoint:
    return ListedCheckpoint(name, path, **{**facts._asdict(), "state": state, **more})


def _commits(place: Place, look: Look) -> tuple[list[Brief], Files, DcpxError | None]:
    """Returns what the metadata there name, and their files; or the first error."""
    try:
        commits = [read_brief(place, name) for name in commits_among(look.names)]
        return commits, files_of(look, commits), None
    except DcpxError as error:
        return [], Files({}), error


def _saved(one: ListedCheckpoint) -> tuple[str, int]:
    return one.saved_at or "", one.step or 0
