"""What a manager's root holds: asked and changed by the coordinator, in the name of all ranks."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch_dcpx.checkpoint.call_agreement import Call, check_same_call
from torch_dcpx.errors import (
    ConcurrentSaveError,
    NotCommittedError,
    OptionError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.manager.pointer import tag_of, tag_or_none
from torch_dcpx.manager.removal import PIN_NAME, remove_checkpoint
from torch_dcpx.manager.resume import Attempts
from torch_dcpx.manager.retention import KeepRules, Retention
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.stored import OwnDirectory, identity_of, lies_there
from torch_dcpx.manager.wanted import Chosen
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.storage.paths import AnyPath, checked_path
from torch_dcpx.storage.reader_lock import being_read, make_readers_file

_T = TypeVar("_T")
_WAY_OUT = "a CheckpointManager's root is a directory of a mounted file system"

logger = logging.getLogger("torch_dcpx")

_MAX_CHOICES = 8  # while others delete what is chosen


class CheckpointCatalog:
    """The checkpoints beneath one root. Every rank makes every call. Belongs to one process."""

    def __init__(
        self,
        root: AnyPath,
        rules: KeepRules,
        process_group: Any,
        no_dist: bool,
        options: WriteOptions,
        read_options: ReadOptions,
    ) -> None:
        """Touches nothing yet; the arguments are those of CheckpointManager."""
        self.root = Path(checked_path(root, _WAY_OUT)).absolute()
        self._group = process_group
        self._no_dist = no_dist
        self._options = options
        self._read_options = read_options
        is_durable = options.durability == "full"
        self._root = ManagerRoot(self.root, read_options, is_durable=is_durable)
        self._retention = Retention(self._root, rules)
        self._is_closed = False
        self._pid = os.getpid()

    def latest(self) -> str | None:
        """Returns the tag that `resume` would try first; None where there is none."""

        def look() -> str | None:
            stored = self._root.newest().stored
            return None if stored is None else stored.tag

        return self._on_coordinator("latest", None, lambda _: look())

    def tags(self) -> list[str]:
        """Returns the tags of all whole checkpoints, the oldest first: what no manager saved, by
        step, then the others in the order of their commits.
        """

        def look() -> list[str]:
            return [stored.tag for stored in reversed(self._root.listed()[0])]

        return self._on_coordinator("tags", None, lambda _: look())

    def pin(self, tag: str | int) -> None:
        """Keeps a checkpoint from retention and `delete`, until `unpin`, beyond this job.

        Raises:
            UnsupportedError: it is a link.
            NotCommittedError, and others: it is not there, or not whole.
            ConcurrentSaveError: it is being deleted at this moment.
        """

        def mark(name: str) -> None:
            lies_there(self.root / name, "pin")
            path = self._root.examined(name).path
            with OwnDirectory(path, "pin") as directory:
                try:
                    make_readers_file(path, dir_fd=directory.fd)
                except StorageError as error:
                    logger.debug("%s: pinned without a lock", error)
                with being_read(path) as is_left_alone:
                    # Who deletes looks for the mark under the same lock.
                    if not is_left_alone or identity_of(path) is None:
                        raise ConcurrentSaveError(
                            f"pin '{path}': it is being deleted", errno=errno.EBUSY, path=str(path)
                        )
                    if not directory.is_regular(PIN_NAME):
                        directory.create(PIN_NAME, [], is_durable=self._root.is_durable)
                        directory.sync()

        self._on_coordinator("pin", tag, mark)

    def unpin(self, tag: str | int) -> None:
        """Takes the mark of `pin` away; none is fine.

        Raises:
            UnsupportedError: it is a link.
            StorageError: no such checkpoint.
        """

        def unmark(name: str) -> None:
            with OwnDirectory(self.root / name, "unpin") as directory:
                directory.unlink(PIN_NAME)
                directory.sync()

        self._on_coordinator("unpin", tag, unmark)

    def delete(self, tag: str | int) -> None:
        """Deletes a checkpoint now.

        Raises:
            UnsupportedError: it is pinned, or a link, or the last one that is whole and not known
                to be damaged: links to it are no others.
            ConcurrentSaveError: somebody saves or reads there.
            NotCommittedError, and others: it is not there, or not whole.
        """

        def remove(name: str) -> None:
            self._retention.wait()
            root = self._root
            lies_there(root.path / name, "delete")
            root.examined(name)
            if self._retention.is_pinned(name):
                raise UnsupportedError(f"delete '{root.path / name}': it is pinned; unpin it first")
            if name in self._retention.busy:
                raise ConcurrentSaveError(
                    f"delete '{root.path / name}': a save to it is under way; wait for it",
                    errno=errno.EBUSY,
                    path=str(root.path / name),
                )
            newest = root.newest().stored  # anew: what lies there now
            stored = root.listed()[0]
            good = {each.tag for each in stored if each.save_id not in root.damaged}
            others = [each for each in stored if each.tag != name]
            if not others or good == {name}:
                raise UnsupportedError(
                    f"delete '{root.path / name}': it is the last whole checkpoint beneath "
                    f"'{root.path}'{' that is not damaged' if others else ''}; remove the "
                    "directory by hand"
                )
            remove_checkpoint(root, name)
            if newest is not None and newest.tag == name:
                root.point_away(name, next((o for o in others if o.tag in good), others[0]))

        self._on_coordinator("delete", tag, remove)

    def _choose(
        self,
        tag: str | None,
        stack: ExitStack,
        attempts: Attempts | None = None,
        *,
        allow_fresh: bool,
    ) -> Chosen:
        """Returns what is resumed, and keeps it from deletion until the stack ends.

        Args:
            tag: that was asked for. None: the newest.
            stack: holds the lock.
            attempts: of this resume; what it has passed over is not chosen again. Default None.
            allow_fresh: whether nothing is chosen where nothing is whole.
        """
        passed = () if attempts is None else attempts.passed_tags
        self._retention.wait()  # what it removes is not to be chosen
        for _ in range(_MAX_CHOICES):
            skipped: tuple[tuple[str, str], ...] = ()
            if tag is not None:
                stored = self._root.examined(tag)
            else:
                root = self._root
                newest = root.newest_but(passed) if passed else root.newest()
                skipped = newest.skipped
                if newest.stored is None:
                    if not allow_fresh and not passed:
                        self._root.check_fresh(newest)
                    return Chosen(None, "", None, None, skipped)
                stored = newest.stored
            try:
                make_readers_file(stored.path)
            except StorageError as error:
                logger.debug("%s: read without a lock", error)
            stack.enter_context(being_read(stored.path))
            if identity_of(stored.path) is not None:
                path = str(stored.path)
                return Chosen(stored.tag, path, stored.step, stored.record, skipped)
        raise NotCommittedError(
            f"resume from '{self.root}': checkpoints are deleted faster than one can be chosen",
            errno=errno.ESTALE,
            path=str(self.root),
        )

    # ---- With all ranks ------------------------------------------------------------------------

    def _exchange(self, what: str, tag: Any = None, timeout_s: float | None = None) -> Exchange:
        name = self.root.name if tag is None else tag_or_none(tag)
        call = CallId(f"CheckpointManager.{what}", name, is_write=what in ("save", "export"))
        seconds = self._read_options.load_timeout_s if timeout_s is None else timeout_s
        return exchange_for(self._group, self._no_dist, seconds, what, call)

    def _on_coordinator(self, name: str, tag: Any, work: Callable[[Any], _T]) -> _T:
        """Has the coordinator do something that all ranks ask for; all get the answer or error."""

        def local() -> Call:
            self._check_usable()
            return Call(name, {} if tag is None else {"tag": tag_of(tag)})

        def reduce(calls: list[Call]) -> _T:
            return work(check_same_call(calls).arguments.get("tag"))

        with self._exchange(name, tag) as exchange:
            answer: _T = exchange.all_reduce(name, local, reduce)
        return answer

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"this manager belongs to process {self._pid}, which process {os.getpid()} was "
                "forked from: only the parent can use it"
            )
        if self._is_closed:
            raise OptionError("this manager is closed: make a new one", option=None, value=None)
