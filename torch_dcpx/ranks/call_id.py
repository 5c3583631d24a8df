"""Which call an operation is: ranks compare it, so that two that make different calls never mix.

A call is named by its function and the last component of its path. The whole path is not compared:
a directory may lie elsewhere on every node.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class CallId:
    """One rank's call.

    Attributes:
        name: of the function, "async_save" or "CheckpointManager.resume".
        target: last component of its path, a tag; None where it has none, or none that can be read.
        options: those that must be equal on all ranks, "on_busy='skip'".
        is_target_compared: whether the target must be equal, too: not where ranks look themselves
            whether they mean one directory (same_directory).
        is_write: whether ranks that are at two calls of one name would mix what they write.
    """

    name: str
    target: str | None = None
    options: str = ""
    is_target_compared: bool = True
    is_write: bool = False

    @property
    def identity(self) -> str:
        """What makes it this call and no other, whatever its options."""
        return self.name if self.target is None else f"{self.name} {self.target!r}"

    @property
    def compared(self) -> str:
        """What must be equal on all ranks, but for the options."""
        return self.identity if self.is_target_compared else self.name

    @property
    def digest(self) -> bytes:
        """8 B that are equal where what is compared and the options are."""
        whole = f"{self.compared} {self.options}".encode(errors="surrogatepass")
        return hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest()

    def __str__(self) -> str:
        target = "" if self.target is None else f" of {self.target!r}"
        return f"{self.name}{target}{f' with {self.options}' if self.options else ''}"

    def is_among(self, identities: Iterable[str]) -> bool:
        """Returns whether it may be one of these: where there is no target, the name decides."""
        for other in identities:
            name, _, target = other.partition(" ")
            if name == self.name and (
                not target or self.target is None or target == repr(self.target)
            ):
                return True
        return False


def last_component(path: Any) -> str | None:
    """Returns the name of the directory that a path means; None for what is no path.

    A link is followed, so that two names of one directory are one. Never raises: what is wrong with
    the path is told to all ranks by whoever uses it.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    try:
        plain = Path(os.fsdecode(path)).absolute()
        # Of what ends in "..", too.
        return (plain.resolve() if plain.is_symlink() or plain.name == ".." else plain).name
    except Exception:  # noqa: BLE001 - no text, links in a circle, whatever an __fspath__ raises
        return None


def path_name(storage: Any) -> str | None:
    """Returns the last component of the path of a writer or reader; None where it has none."""
    try:
        return last_component(getattr(storage, "path", None))
    except Exception:  # noqa: BLE001 - of somebody's property: told by whoever uses it
        return None
