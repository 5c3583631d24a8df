"""`dcpx gc`: lists, or removes, what saves and removals have left in directories of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch_dcpx._text import counted, human_bytes
from torch_dcpx.cli.output import CANNOT, FINE, UNSOUND, exit_code, put_json, put_lines, put_table
from torch_dcpx.errors import DcpxError, OptionError, StorageError
from torch_dcpx.integrity.leftovers import GRACE_S, find_leftovers, remove_leftovers
from torch_dcpx.integrity.states import Seen, State, state_at, walk
from torch_dcpx.integrity.way_out import settled
from torch_dcpx.reader.hints import command
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.storage.visibility import or_hidden


class _Row(NamedTuple):
    """Files of one place: "left" by a save that did not end, "waiting" to go behind a removal, of a
    save that is under way ("saving"), of a rank whose metadata is not there ("kept"), "removed" by
    this command, or "unknown".
    """

    path: Location
    state: str
    files: dict[str, int]  # bytes by name
    nbytes: int
    problem: str


def run_gc(paths: Sequence[Location], *, delete: bool, grace_s: float | None, as_json: bool) -> int:
    """Prints the leftovers at `paths`. Returns the exit code: that of the worst error.

    Raises: StorageError: a path cannot be listed, or is a URL beneath which nothing lies;
    OptionError: a grace that is no number.
    """
    if grace_s is not None and grace_s != grace_s:
        raise OptionError("--grace is no number of seconds: nan", option="grace", value=grace_s)
    rows: dict[Location, list[_Row]] = {}
    notes: list[str] = []
    codes = {FINE}
    for path in dict.fromkeys(paths):
        is_any = False
        for seen in walk(path):
            is_any = is_any or seen.state.kind != "none"
            if seen.state.kind == "none":
                notes += [f"note: '{seen.path}': {seen.state.text}"] if _is_note(seen.state) else []
            elif seen.path not in rows:
                is_named = seen.path in paths
                rows[seen.path] = list(_looked_at(seen, delete, grace_s, is_named, codes))
        if not is_any:  # but for what a killed process may have left right there
            rows[path] = list(_left(path, delete, grace_s))
    shown = [row for each in rows.values() for row in each]
    if any(row.state == "kept" and or_hidden(row.path) for row in shown):
        codes.add(CANNOT)
    if as_json:
        put_json(shown)
    else:
        _put(shown, paths, notes, delete=delete)
    return UNSOUND if UNSOUND in codes else max(codes)


def _is_note(state: State) -> bool:
    return bool(state.text) and not state.is_export


def _looked_at(
    seen: Seen, delete: bool, grace_s: float | None, is_named: bool, codes: set[int]
) -> Iterator[_Row]:
    """Yields the rows of a place, and removes what may go. One error hides no other place."""
    try:
        if seen.state.error is not None:
            raise seen.state.error
        state, is_listed = seen.state, not (delete and is_named)
        if seen.place is not None and seen.look is not None and is_listed:
            state = settled(seen.place, state, seen.look.names)
        if state.saving and is_listed:
            found = find_leftovers(seen.path)
            if found.files:
                text = state.text or f"a save is under way ({state.saving})"
                yield _row(seen.path, "saving", found.files, text)
        elif state.kind == "unfinished" and is_listed:
            yield _row(seen.path, "left", find_leftovers(seen.path).files, state.text)
        elif seen.state.kind == "removed":
            yield from _left(seen.path, delete, grace_s, "waiting", seen.state.text)
        else:
            yield from _left(seen.path, delete, grace_s)
    except DcpxError as error:
        with suppress(StorageError):
            if seen.place is not None and state_at(seen.path).kind != seen.state.kind:
                return  # it was removed, or saved, meanwhile
        yield _row(seen.path, "unknown", {}, str(error))
        codes.add(exit_code(error))


def _left(
    path: Location, delete: bool, grace_s: float | None, state: str = "left", text: str = ""
) -> Iterator[_Row]:
    """Yields what has gone, and what stays and why."""
    found = find_leftovers(path)
    if found.kept:
        doubt = or_hidden(path)
        way = f"{command('repair', path)} may make it anew; else remove them by hand"
        why = f"'{next(iter(found.kept))}' is of a rank whose metadata is not there"
        yield _row(path, "kept", found.kept, why + (doubt or f": {way}"))
    left = found.files
    gone = remove_leftovers(path, grace_s).files if left and delete else {}
    if gone:
        yield _row(path, "removed", gone, "")
    stay = {name: size for name, size in left.items() if name not in gone}
    if stay and delete and isinstance(path, ObjectUrl):
        grace = GRACE_S if grace_s is None else grace_s
        young = f"younger than {grace:.0f} s: a save or a load may be under way; see --grace"
        text = f"{text}; {young}" if text else young
    if stay:
        yield _row(path, state, stay, text)


def _row(path: Location, state: str, files: dict[str, int], problem: str) -> _Row:
    return _Row(path, state, files, sum(files.values()), problem)


def _put(
    rows: Sequence[_Row], paths: Sequence[Location], notes: Sequence[str], *, delete: bool
) -> None:
    """Prints a table of the rows, and what they are."""
    if not rows:
        put_lines([f"no file there is left by a save: {', '.join(map(str, paths))}", *notes])
        return
    columns = ["state", "#files", "#size", "name"]
    put_table(
        columns,
        ((row.state, len(row.files), human_bytes(row.nbytes), row.path) for row in rows),
    )
    put_lines(f"{row.path}: {row.problem}" for row in rows if row.problem)
    left = sum(len(row.files) for row in rows if row.state == "left" and not row.problem)
    waiting = sum(len(row.files) for row in rows if row.state == "waiting")
    if left and not delete:
        put_lines(
            [f"{counted(left, 'file')} left by saves that did not end: --delete removes them"]
        )
    if waiting and not delete:
        text = f"{counted(waiting, 'file')} of checkpoints that their manager has removed: a later "
        put_lines([f"{text}commit of it takes them, --delete those that are old"])
    put_lines(notes)
