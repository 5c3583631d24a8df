"""The names that `keys` of `inspect`, `diff` and `stats` mean."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch_dcpx._globs import chosen_names, names_beneath, unmatched
from torch_dcpx._text import counted
from torch_dcpx.checkpoint.load_checks import NearNames
from torch_dcpx.errors import UnknownNameError, must_be
from torch_dcpx.reader.hints import command

_MAX_SHOWN = 5  # names in an error


def globs_of(keys: str | Iterable[str] | None) -> list[str] | None:
    """Returns keys as a list, None for all. Raises: OptionError: they are no names and globs."""
    given: Any = (keys,) if isinstance(keys, str) else keys
    if given is None:
        return None
    wrong = "None, a name or glob, or several of them"
    if not isinstance(given, Iterable) or isinstance(given, (bytes, Mapping)):
        raise must_be("keys", keys, wrong)
    globs = list(given)
    if not all(isinstance(glob, str) for glob in globs):
        raise must_be("keys", keys, wrong)
    return globs


def chosen(
    names: Collection[str],
    keys: str | Iterable[str] | None,
    *paths: str | os.PathLike[str],
    objects: Collection[str] = (),
) -> list[str]:
    """Returns the names that keys mean, in their order; None means all.

    Args:
        objects: names that lie there, too, but have no numbers, which are wanted.

    Raises: UnknownNameError: a key means none of them, which lie at these paths. OptionError.
    """
    globs = globs_of(keys)
    if globs is None:
        return list(names)
    where = " and ".join(f"'{path}'" for path in paths)
    path = os.fspath(paths[0])
    for glob in unmatched(names, globs, objects):
        near, why = names_beneath(glob, names, objects)
        if meant := chosen_names(objects, (glob,), names):
            shown = command("cat", path, meant[0])
            why = f"means {counted(len(meant), 'object')}, no numbers: {shown} shows {meant[0]!r}"
        elif why and near and not set(near).difference(objects):
            why += f"; {command('cat', path, glob)} shows more"
        elif not why:
            near = NearNames(names).nearest(glob)
            some = near or tuple(names)[:_MAX_SHOWN]
            shown = ", ".join(map(repr, some))
            more = ", ..." if len(names) > len(some) else ""
            count = counted(len(names), "item")
            way = f"did you mean {shown}?" if near else f"of its {count}: {shown}{more}"
            why = f"is no name there, nor a glob of some; {way}"
        raise UnknownNameError(f"{where}: {glob!r} {why}", fqn=glob, path=path, nearest=near)
    return chosen_names(names, globs, objects)
