"""The name of a call, which ranks compare: two ranks that make different calls never mix.

It holds the function and the last component of its path. Ranks do not compare the whole path: a
directory may lie elsewhere on every node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_dcpx import _mounts
from torch_dcpx._answered_os import os
from torch_dcpx._answers import BOUND, StorageTimeout

_DIGEST_BYTES = 8
_LINK_S = 4.0


@dataclass(frozen=True)
class CallId:
    """One rank's call."""

    name: str  # of the function, "async_save" or "CheckpointManager.resume"
    target: str | None = None  # last component of its path, a tag; None: none, or unreadable
    options: str = ""  # that must be equal on all ranks, "on_busy='skip'"
    is_target_compared: bool = True  # False if `same_directory` compares the directories
    is_write: bool = False  # whether two calls of one name would mix the files that they write

    @property
    def identity(self) -> str:
        """The call's name without its options."""
        return self.name if self.target is None else f"{self.name} {self.target!r}"

    @property
    def compared(self) -> str:
        """The part that must be equal on all ranks, without the options."""
        return self.identity if self.is_target_compared else self.name

    @property
    def digest(self) -> bytes:
        """8 B that are equal on two ranks if `compared` and the options are."""
        whole = f"{self.compared} {self.options}".encode(errors="surrogatepass")
        return hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest()

    def __str__(self) -> str:
        target = "" if self.target is None else f" of {self.target!r}"
        return f"{self.name}{target}{f' with {self.options}' if self.options else ''}"

    def is_among(self, identities: Iterable[str]) -> bool:
        """Returns whether it may be one of these: without a target the name decides."""
        for other in identities:
            name, _, target = other.partition(" ")
            is_target = not target or self.target is None or target == repr(self.target)
            if name == self.name and is_target:
                return True
        return False


def last_component(path: Any) -> str | None:
    """Returns the name of the directory that a path means; None if it is no path.

    Follows a link: two names of one directory are one. Never raises: the code that uses a wrong
    path tells all ranks.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    try:
        plain = Path(os.fsdecode(path)).absolute()
    except Exception:  # noqa: BLE001 - no text, an __fspath__ that raises
        return None
    # No option is known yet, and what is silent raises later.
    before = BOUND.set(StorageTimeout(_LINK_S, "_LINK_S")) if _mounts.HAS_SHARED else None
    try:
        # Of what ends in "..", too.
        if plain.name == ".." or os.path.islink(plain):
            return Path(os.path.realpath(plain)).name
        return plain.name
    except (OSError, RuntimeError, ValueError):  # links in a circle, or a storage that fails
        return plain.name
    finally:
        if before is not None:
            BOUND.reset(before)


def path_name(storage: Any) -> str | None:
    """Returns the last component of the path of a writer or reader; None if it has none."""
    try:
        return last_component(getattr(storage, "path", None))
    except Exception:  # noqa: BLE001 - of a user's property: the code that uses it tells
        return None
