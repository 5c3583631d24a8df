"""What `torch_dcpx.repair` has made anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_dcpx._text import printable

Source = Literal["columns", "pickle", "footers"]


@dataclass(frozen=True)
class RepairedMetadata:
    """One file of metadata that was made anew.

    Attributes:
        name: `.metadata`, or `__{rank}.metadata`.
        source: what it was made of: the "columns" or the "pickle" of the damaged file, which name
            the data files of the save, or the "footers" of the data files alone.
        save_id: the save's own, where the columns were whole or footers say it; else a new one.
        files: the data files that it names.
        items: tensors, shards and Python objects that it names.
        assumed: what nothing in the directory could prove.
    """

    name: str
    source: Source
    save_id: str
    files: tuple[str, ...]
    items: int
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class RepairReport:
    """What one `repair` has done, or with `dry_run` would do.

    Attributes:
        path: the directory.
        repaired: each file of metadata that was made anew.
        is_dry_run: nothing was written.
    """

    path: str
    repaired: tuple[RepairedMetadata, ...]
    is_dry_run: bool

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What must be true beyond what is there, of all files of metadata."""
        return tuple(dict.fromkeys(text for one in self.repaired for text in one.assumed))

    def __str__(self) -> str:
        verb = "would make" if self.is_dry_run else "made"
        path = printable(self.path)
        lines = []
        for one in self.repaired:
            lines.append(
                f"{verb} '{one.name}' in '{path}' of the {one.source}: {one.items} items in "
                f"{len(one.files)} files"
            )
            lines += [f"  assumed: {text}" for text in one.assumed]
        return "\n".join(lines)
