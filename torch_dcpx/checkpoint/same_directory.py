"""Do all ranks of a save mean one directory? They look if they name it differently, and in the
first save beneath a directory from several nodes.

1. Each rank sends, with its plan, a digest of its directory's path, and its node. If all are equal,
   the ranks do nothing more.
2. Else the coordinator leaves an empty file of a random name in its directory, and each rank looks
   for it in its own. A rank that sees it has only another name for the directory: a link, another
   mount, a relative path.
3. A rank that does not see it would write elsewhere. Under another name all ranks refuse the save,
   under the same one those of a manager do, which needs one root: then each rank removes the
   directories that this save has made. Else each node has its own, and a WARNING says so once.

With `WriteOptions(node_local=True)` on all ranks none looks.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx.errors import DcpxError, PlanError, StorageError
from torch_dcpx.ranks.exchange import Exchange, host_name
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import LOCK_NAME, METADATA_NAME, temporary_name
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.storage.place import open_place
from torch_dcpx.storage.save_lock import boot_id
from torch_dcpx.storage.visibility import UNKNOWN_S, look_until_seen

logger = logging.getLogger("torch_dcpx")

_STEP = "directories"
_WAYS_OUT = (
    "a manager needs one root for all nodes: mount it on each, or save to disks of each node by "
    "dcpx.save with WriteOptions(node_local=True)"
)
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR})
_Made = tuple[str, int]  # last component and inode of a directory: devices differ over hosts


class Place(NamedTuple):
    """The directory that a rank saves to."""

    directory: Location  # absolute, unless its place is unknown
    is_node_local: bool  # of `WriteOptions`
    needs_one: bool = False  # a manager's, which finds all files from one node
    made: Sequence[Path] = ()  # directories that this save has made here, the outermost first

    @property
    def told(self) -> str:
        """The path, and of a URL its store."""
        directory = self.directory
        endpoint = directory.endpoint if isinstance(directory, ObjectUrl) else None
        return os.fspath(directory) + ("" if endpoint is None else f" at {endpoint}")

    @property
    def digest(self) -> bytes:
        """17 bytes, equal on two ranks if path and option are, of which the first is the option;
        then the name of the node.
        """
        path = hashlib.blake2b(os.fsencode(self.told), digest_size=16).digest()
        return bytes([self.is_node_local]) + path + node_name().encode()


class _Look(NamedTuple):
    """A rank's look at its directory."""

    path: str
    host: str
    is_node_local: bool
    is_found: bool  # the coordinator's file is there
    needs_one: bool
    made: tuple[_Made, ...]


class Spread(NamedTuple):
    """The ranks of a save on their nodes."""

    hosts: tuple[str, ...] = ()  # by rank; () where one node has all of them
    lookers: tuple[int, ...] = ()  # one rank of each node but the coordinator's

    @classmethod
    def of(cls, digests: Sequence[bytes]) -> Spread:
        """Returns where ranks are, whose `Place.digest` these are."""
        nodes = [digest[17:].decode() for digest in digests]
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        if len(first) == 1:
            return cls()
        hosts = tuple(node.partition(" ")[0] for node in nodes)
        return cls(hosts, tuple(sorted(set(first.values()) - {0})))


_seen: dict[tuple[str, str], bool] = {}  # by group and directory: whether all nodes see one
_MAX_SEEN = 1024


@cache
def node_name() -> str:
    """Returns what tells this node from others: its name, and which start of it."""
    return f"{host_name()} {boot_id()}"


class SameDirectory:
    """The comparison on this rank. The end of its block removes the coordinator's file."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._probe: tuple[Location, str] | None = None  # of the coordinator

    def probe_for(self, place: Place, digests: Sequence[bytes]) -> str:
        """Leaves a file in the coordinator's directory, and returns its name; "" if no rank need
        look. Raises StorageError: it cannot be left there.
        """
        if len(set(digests)) == 1 or all(digest[0] for digest in digests):
            return ""
        is_one_path = len({digest[:17] for digest in digests}) == 1
        if is_one_path and (isinstance(place.directory, ObjectUrl) or self._key(place) in _seen):
            return ""
        # If this process is killed, the next save removes a file of such a name.
        name = temporary_name(METADATA_NAME)
        self._probe = place.directory, name
        with open_place(place.directory) as directory:
            directory.create(name, (), is_durable=False)
        return name

    def _key(self, place: Place) -> tuple[str, str]:
        return self._exchange.group, str(place.directory.parent)

    def are_together(self, place: Place) -> bool:
        """Returns whether all nodes see one directory, as far as the coordinator knows."""
        return not place.is_node_local and _seen.get(self._key(place), True)

    def check(self, place: Place, probe: str) -> bool:
        """Looks with all ranks for the probe. Returns whether all see it. All raise PlanError if
        directories or `node_local` differ, and have then removed the directories that this save
        has made.
        """
        exchange = self._exchange

        def look() -> _Look:
            is_found = _sees(place.directory, probe)
            made = tuple(filter(None, map(_identity, place.made)))
            own = place.told, exchange.host, place.is_node_local, is_found, place.needs_one, made
            return _Look(*own)

        def judge(looks: list[_Look]) -> tuple[str, frozenset[_Made], bool]:
            made = frozenset(one for rank in looks for one in rank.made)
            apart = [rank for rank, look in enumerate(looks) if not look.is_found]
            refusal = _refusal(exchange.what, looks)
            if apart and not refusal:
                text = _apart(exchange.what, looks, apart[0])
                if place.needs_one:
                    refusal = f"{text}; {_WAYS_OUT}; nothing was written"
                else:
                    logger.warning("%s; a load needs all files together", text)
            if not refusal:
                _seen[self._key(place)] = not apart
                for key in list(_seen)[:-_MAX_SEEN]:
                    _seen.pop(key, None)
            return refusal, made, not apart

        def refuse(_: list[None]) -> None:
            raise PlanError(refusal)

        try:
            refusal, made, are_together = exchange.all_reduce(_STEP, look, judge)
        finally:
            self._remove_probe()
        if refusal:
            # No rank returns before all have cleaned up: the next save may use these directories.
            exchange.all_reduce(_STEP, lambda: self._remove_made(place, made), refuse)
        return are_together

    def _remove_made(self, place: Place, made: frozenset[_Made]) -> None:
        """Removes empty directories that ranks have made on the path of this rank's directory. A
        part that several ranks share is empty for the last one.
        """
        directory = place.directory
        if isinstance(directory, ObjectUrl):
            return  # nothing is made
        if self._exchange.is_coordinator:  # which holds the lock
            _remove_lock(directory, is_made=_identity(directory) in made)
        for path in (directory, *directory.parents):
            try:
                if _identity(path) in made:
                    os.rmdir(path)
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    logger.warning("'%s', made by a refused save, stays: %s", path, str(error))

    def _remove_probe(self) -> None:
        if self._probe is None:
            return
        (path, name), self._probe = self._probe, None
        try:
            with open_place(path) as directory:
                directory.unlink(name)
        except DcpxError as error:
            logger.warning("an empty file stays until the next save here: %s", str(error))

    def __enter__(self) -> SameDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_probe()


def _sees(directory: Location, name: str) -> bool:
    """Returns whether a file is in a directory, also where this node sees it late."""

    def look() -> None:
        with open_place(directory) as place:
            if not place.is_regular(name):
                problem = f"'{directory / name}' is not there"
                raise StorageError(problem, errno=errno.ENOENT, path=str(directory / name))

    try:
        look_until_seen(directory, UNKNOWN_S, look)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True


def _apart(what: str, looks: Sequence[_Look], rank: int) -> str:
    """Returns that one path is another directory on a rank than on the coordinator."""
    first, other = looks[0], looks[rank]
    return (
        f"{what}: '{first.path}' on rank {rank} ({other.host}) is another directory than on rank 0 "
        f"({first.host}): rank {rank} does not see what rank 0 writes there"
    )


def _remove_lock(path: Path, *, is_made: bool) -> None:
    """Removes the lock file if this save has made it; a checkpoint's was there before."""
    try:
        with Directory(path) as directory:
            if is_made or directory.names() == [LOCK_NAME]:
                directory.unlink(LOCK_NAME)
    except DcpxError as error:
        logger.warning("the lock file of a refused save stays: %s", str(error))


def _identity(path: Path) -> _Made | None:
    """Returns what identifies a directory on all ranks; None if it is gone."""
    try:
        return path.name, os.stat(path).st_ino
    except OSError:
        return None


def _refusal(what: str, looks: Sequence[_Look]) -> str:
    """Returns why these ranks cannot save together; "" if all see one directory."""
    local = [rank for rank, look in enumerate(looks) if look.is_node_local]
    other = [rank for rank, look in enumerate(looks) if not look.is_node_local]
    if local and other:
        return (
            f"{what}: WriteOptions(node_local=True) on rank {local[0]}, not on rank {other[0]} "
            f"({len(local)} of {len(looks)} ranks have it): give it on all ranks or on none; "
            "nothing was written"
        )
    first = looks[0]
    elsewhere = [
        rank for rank, look in enumerate(looks) if not look.is_found and look.path != first.path
    ]
    if not elsewhere:
        return ""
    rank = elsewhere[0]
    return (
        f"{what}: rank {rank} ({looks[rank].host}) saves to '{looks[rank].path}', rank 0 "
        f"({first.host}) to '{first.path}', which is another directory ({len(elsewhere)} of "
        f"{len(looks)} ranks save elsewhere than rank 0): no checkpoint would be whole; name one "
        "directory on all ranks, by an absolute path, or give WriteOptions(node_local=True) where "
        "each node is to have its own files; nothing was written"
    )
