"""The last look of a save: one rank of each node sees what was committed before the save returns.

A file system that several nodes mount shows a change to another node late. The coordinator says
what it sees (`Seen`); a rank of each other node looks until it sees the same.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx._mounts import is_shared, shared_mount
from torch_dcpx.checkpoint.same_directory import Spread
from torch_dcpx.checkpoint.save_plan import SaveAnswer
from torch_dcpx.errors import DcpxError, StorageError
from torch_dcpx.metadata.brief import brief_of
from torch_dcpx.options import WriteOptions
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import open_place
from torch_dcpx.storage.visibility import look_until_seen

_MAX_FILES = 64  # that each node looks at: a thousand nodes must not ask for a thousand files each
_END_BYTES = 64  # of `.metadata`: its tail, which has checksums of all of it
_CEPH = frozenset({"ceph", "fuse.ceph-fuse"})


class Seen(NamedTuple):
    """Holds what the coordinator sees of a committed save."""

    nbytes: int  # of `.metadata`
    end: bytes  # of it
    sizes: dict[str, int]  # of data files, at most 64 spread over all


class Sight:
    """The coordinator's part, where ranks of a save are on several nodes."""

    def __init__(self, directory: Location, spread: Spread, options: WriteOptions) -> None:
        self.hosts = spread.hosts
        self._directory = directory
        self._lookers = spread.lookers
        self._is_shared = is_shared(directory)
        wanted = options.check_visible
        self._is_asked = self._is_shared if wanted == "auto" else wanted

    def asked(self, answers: Sequence[SaveAnswer]) -> list[SaveAnswer]:
        """Returns the answers, which say who looks."""
        if not self._is_asked:
            return list(answers)
        looking = frozenset(self._lookers)
        return [
            answer._replace(looks="looks" if rank in looking else "waits")
            for rank, answer in enumerate(answers)
        ]

    def replaced(self) -> str:
        """Returns the id of the save that is there, which a node may see for a while after the
        next one; "" where no node does, or nothing can be read.
        """
        with suppress(DcpxError):
            if self._is_shared:
                with open_place(self._directory) as place, place.open_small(METADATA_NAME) as file:
                    brief = brief_of(file, str(file.path))
                    return "" if brief is None else brief.save_id
        return ""

    def seen(self, save_id: str, sizes: Mapping[str, int]) -> Seen | None:
        """Returns what others are to see; None where nobody looks. Raises: StorageError."""
        if not self._is_asked:
            return None
        step = -(-len(sizes) // _MAX_FILES) or 1
        chosen = dict(islice(sizes.items(), 0, None, step))
        _show_to_others(self._directory)
        try:
            return Seen(*_metadata_at(self._directory), chosen)
        except DcpxError as error:
            raise _unseen(save_id, self._directory, f"0 ({self.hosts[0]})", error) from error


def _metadata_at(directory: Location) -> tuple[int, bytes]:
    with open_place(directory) as place, place.open_small(METADATA_NAME) as file:
        end = max(0, file.nbytes - _END_BYTES)
        return file.nbytes, file.part(end, file.nbytes - end)


def _show_to_others(directory: Location) -> None:
    """Has CephFS show a renamed file now. In a new directory another node's look-up waits until the
    metadata server writes its journal: in up to 5 s (seen with 16.2), or when the node that renamed
    it opens it for writing.
    """
    mount = shared_mount(str(directory)) if isinstance(directory, Path) else None
    if mount is not None and mount.kind in _CEPH:
        with suppress(OSError):  # then the look takes those seconds
            os.close(os.open(directory / METADATA_NAME, os.O_WRONLY | os.O_NOFOLLOW))


def look_for(
    seen: Seen, directory: Location, save_id: str, exchange: Exchange, options: WriteOptions
) -> None:
    """Looks until this node sees the save. Raises StorageError: not within `visible_s`."""

    def look() -> None:
        found = _metadata_at(directory)
        if found != seen[:2]:
            path = str(directory / METADATA_NAME)
            problem = f"'{path}' of {found[0]} B is not that of the save, of {seen.nbytes} B"
            raise StorageError(problem, errno=errno.ESTALE, path=path)
        with open_place(directory) as place:
            place.check_sizes(seen.sizes, is_exact=True)

    try:
        look_until_seen(directory, options.visible_s, look, is_known=True)
    except DcpxError as error:
        rank = f"{exchange.rank} ({exchange.host})"
        raise _unseen(save_id, directory, rank, error) from error


def _unseen(save_id: str, directory: Location, rank: str, error: DcpxError) -> StorageError:
    return StorageError(
        f"save {save_id} to '{directory}' is committed and durable, but rank {rank} does not see "
        f"it: {error}; WriteOptions(check_visible=False) does not ask",
        errno=errno.ESTALE,
        path=getattr(error, "path", None) or str(directory),
    )
