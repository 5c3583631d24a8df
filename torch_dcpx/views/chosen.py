"""The names that `keys` of `diff` and `stats` mean."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch_dcpx.checkpoint.load_checks import NearNames
from torch_dcpx.errors import UnknownNameError, must_be


def chosen(names: Collection[str], keys: str | Iterable[str] | None, where: str) -> list[str]:
    """Returns the names that keys mean, in their order; None means all.

    Raises: UnknownNameError: a key means none of them, which lie `where`. OptionError.
    """
    if keys is None:
        return list(names)
    globs: Any = (keys,) if isinstance(keys, str) else keys
    if not isinstance(globs, Iterable) or isinstance(globs, (bytes, Mapping)):
        raise must_be("keys", keys, "None, a name or glob, or several of them")
    found: set[str] = set()
    for glob in globs:
        if not isinstance(glob, str):
            raise must_be("keys", keys, "None, a name or glob, or several of them")
        fit = (
            {glob}
            if glob in names
            else set(filter(re.compile(fnmatch.translate(glob)).match, names))
        )
        if not fit:
            near = NearNames(names).nearest(glob)
            lead = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            wrong = f"{where}: {glob!r} is no name there, nor a glob of some{lead}"
            raise UnknownNameError(wrong, fqn=glob, nearest=near)
        found |= fit
    return [name for name in names if name in found]
