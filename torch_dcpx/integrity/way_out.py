"""Says what can be done with what a save has left: a repair, or its removal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch_dcpx.errors import DcpxError, RepairError
from torch_dcpx.integrity.states import Kind, State, opened, state_of
from torch_dcpx.reader.hints import command
from torch_dcpx.storage.names import METADATA_NAME, is_data_file_name, is_rank_lock
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import Place


def settled(directory: Place, state: State, names: Sequence[str]) -> State:
    """Returns an "unfinished" state with what can be done, another one as it is. Young objects that
    prove no checkpoint may be of a save under way.
    """
    if state.kind != "unfinished":
        return state
    is_help, text = _way_out(directory, names)
    if state.is_young and not is_help and directory.is_object:
        text = f"{state.text}: the objects are young"
        return State("saving", text, "objects are young")
    if state.is_young and not is_help:
        text = f"wait until it has ended; if none is, {text}"
    return state._replace(text=f"{state.text}; {text}")


def kind_at(where: Location) -> Kind:
    """Returns what lies in a place, as `settled` sees it. Raises: as `state_at`."""
    with opened(where) as place:
        state, look = state_of(place)
        return settled(place, state, look.names).kind


def mending(directory: Place) -> str:
    """Returns what mends metadata that are there and damaged, "" where nobody can tell."""
    from torch_dcpx.integrity.repair import repair  # which imports torch

    path = str(directory.path)
    try:
        needs = repair(path, dry_run=True).assumptions
    except RepairError as error:
        return f"it cannot be mended as it is: {error}"
    except DcpxError:
        return ""
    return f"{command('repair --accept-assumptions' if needs else 'repair', path)} makes it anew"


def _way_out(directory: Place, names: Sequence[str]) -> tuple[bool, str]:
    """Returns whether a repair can help, or may, and what can be done."""
    from torch_dcpx.integrity.repair import repair  # which imports torch

    path = str(directory.path)
    wrong: tuple[str, ...] = ()
    try:
        needs = repair(path, dry_run=True).assumptions
    except RepairError as error:
        wrong = error.candidates or ()
        if any(map(is_rank_lock, names)) and not wrong:
            return True, f"{command('repair', path)} with --rank-local or --all-ranks may mend it"
    except DcpxError as error:
        return True, f"whether {command('repair', path)} helps is not known: {error}"
    else:
        verb = "repair --accept-assumptions" if needs else "repair"
        return True, f"if that save had ended, {command(verb, path)} makes '{METADATA_NAME}' anew"
    rest = [name for name in names if is_data_file_name(name) and name not in wrong]
    with suppress(DcpxError):
        if wrong and rest:
            repair(path, files=rest, dry_run=True)
            return True, f"{command('repair', path)} with --file for each of its files may mend it"
    return False, f"no repair can help: {command('gc --delete', path)} removes what is left"
