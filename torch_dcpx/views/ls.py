"""`dcpx.ls`: the checkpoints at a path, or beneath it, and the state of each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from torch_dcpx._arguments import check_bool
from torch_dcpx._text import age_text, human_bytes
from torch_dcpx.errors import CorruptionError, DcpxError, ShortReadError
from torch_dcpx.integrity.contents import commits_among, location, read_commit, wanted_sizes
from torch_dcpx.integrity.facts import Facts, facts_of
from torch_dcpx.integrity.states import Seen, State, ranks_without_metadata, state_of, walk
from torch_dcpx.integrity.way_out import settled
from torch_dcpx.metadata.file import CheckpointMetadata
from torch_dcpx.storage.names import Look
from torch_dcpx.storage.place import Place
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.views.tables import Shown, Table

ListedState: TypeAlias = Literal[
    "committed", "saving", "removed", "unfinished", "damaged", "unreadable", "none"
]


@dataclass(frozen=True)
class ListedCheckpoint:
    """One checkpoint, or what is left of one, or of a save.

    Attributes:
        name: beneath the path that was listed.
        path: of it.
        state: "committed"; "saving": no checkpoint yet, and a save is under way; "removed" by its
            manager, what is left goes later; "unfinished": of a save that nobody holds; "damaged":
            its metadata, or the size of a file, is wrong; "unreadable"; "none": no checkpoint.
        step: of the training, by its manager's record or its name; None: unknown.
        saved_at: "2026-01-31T23:59:59Z"; None: unknown.
        ranks: how many saved it; None: unknown.
        nbytes: of its data files.
        pinned: retention leaves it alone.
        save_id: "" if unknown.
        items: how many tensors and objects it names.
        files: how many data files it names.
        written_by: "torch-dcpx" or "stock".
        problem: why it is not committed, or what is wrong with it, and what can be done.
        saving: who saves to it at this moment, "" if nobody can be seen.
    """

    name: str
    path: str
    state: ListedState
    step: int | None = None
    saved_at: str | None = None
    ranks: int | None = None
    nbytes: int = 0
    pinned: bool = False
    save_id: str = ""
    items: int = 0
    files: int = 0
    written_by: str = ""
    problem: str = ""
    saving: str = ""

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

    path: str
    checkpoints: tuple[ListedCheckpoint, ...]

    @property
    def newest(self) -> ListedCheckpoint | None:
        """The committed one that was saved last; None: there is none."""
        committed = [one for one in self.checkpoints if one.state == "committed"]
        last = max(
            enumerate(committed),
            key=lambda row: (row[1].saved_at or "", row[1].step or 0, row[0]),
            default=None,
        )
        return None if last is None else last[1]

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
        columns = ["state", "#step", "saved", "#ranks", "#items", "#size", "pinned"]
        rows = [
            (
                one.state,
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
        row = _listed(seen, place, state, look)
        while row.state in ("damaged", "unreadable"):  # or something was saved or removed meanwhile
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
    commits, error = _commits(place, look)
    facts = facts_of(place, look, state, commits)
    if error is not None:
        is_damage = isinstance(error, (CorruptionError, ShortReadError))
        told: ListedState = "damaged" if is_damage else "unreadable"
        return _row(name, path, told, facts, problem=f"{type(error).__name__}: {error}")
    sizes, faults = _sizes(look, commits)
    return _row(
        name,
        path,
        "damaged" if faults else "committed",
        facts,
        nbytes=sum(sizes.values()),
        items=sum(len(found.metadata.state_dict_metadata) for found in commits),
        files=len(sizes),
        written_by="torch-dcpx" if commits[0].files is not None else "stock",
        problem=faults[0] if faults else "",
        saving=state.saving,
    )


def _row(name: str, path: str, state: ListedState, facts: Facts, **more: Any) -> ListedCheckpoint:
    return ListedCheckpoint(name, path, **{**facts._asdict(), "state": state, **more})


def _commits(place: Place, look: Look) -> tuple[list[CheckpointMetadata], DcpxError | None]:
    """Returns the metadata there, or the first error."""
    try:
        return [read_commit(place, name) for name in commits_among(look.names)], None
    except DcpxError as error:
        return [], error


def _sizes(look: Look, commits: list[CheckpointMetadata]) -> tuple[dict[str, int], list[str]]:
    """Returns the bytes of each file that is there, and what is wrong with files."""
    sizes: dict[str, int] = {}
    faults: list[str] = []
    for checkpoint in commits:
        for name, wanted in sorted(wanted_sizes(checkpoint).items()):
            found, is_exact = look.size(name), checkpoint.files is not None
            sizes[name] = found or 0
            if found is None:
                faults.append(f"'{name}' is missing")
            elif found != wanted if is_exact else found < wanted:
                faults.append(f"'{name}' has {found} B, {wanted} B were written")
    alone = ranks_without_metadata(look.names)
    faults += [f"'{name}' is of a rank whose metadata is not there" for name in alone]
    return sizes, faults
