"""Folders of several DCP checkpoints and other files, as one commit: of accelerate and the Trainer.

A save of a folder
1. makes an empty folder beside its place, `.dcpx.saving.NAME/ID/NAME`, on all ranks (`begin`);
2. lets the framework write its files there, and notes each `dcp.save` of it (`noted`);
3. saves what was noted in the background (`commit`). The commit of the last part comes when the
   others are durable, so that all ranks have written all files. Behind it the coordinator renames
   the folder to its place: before that it is not there, or the one before is. Of that one goes what
   its record names (`_folder_record`); all else is carried over (`_folder_contents`).

What is killed leaves a folder that nothing takes for a checkpoint; the next save of that name
removes it, or gives back what is the user's. It leaves it alone where locks do not tell whether
that save still runs.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._answered_os import os, path_of
from torch_dcpx._arguments import check_options
from torch_dcpx._descriptors import open_file
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.same_call import Call, check_same_call
from torch_dcpx.checkpoint.save import async_save
from torch_dcpx.errors import (
    DcpxError,
    OptionError,
    UnsupportedError,
)
from torch_dcpx.integrations._dcp_calls import Part, parts_of
from torch_dcpx.integrations._folder_contents import (
    Replacement,
    check_room,
    refuse_pinned,
    remove_folder,
)
from torch_dcpx.integrations._folder_place import FolderPlace
from torch_dcpx.integrations._folder_record import record_of, write_record
from torch_dcpx.integrity.contents import open_checkpoint
from torch_dcpx.manager.removal import suppress_and_log
from torch_dcpx.manager.stored import examine
from torch_dcpx.options import WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.members import exchange_for, told_to_next
from torch_dcpx.storage.directory import fsync_path, rename_path, storage_errors
from torch_dcpx.storage.reader_lock import make_readers_file
from torch_dcpx.writer.writer import DcpxWriter

logger = logging.getLogger("torch_dcpx")


def is_whole(part: Path) -> bool:
    """Returns whether a checkpoint of DCP is whole; the log says why not."""
    try:
        with open_checkpoint(part) as place:
            examine(place)
    except DcpxError as error:
        logger.warning("skipped '%s': %s", part, error)
        return False
    return True


class FolderSaves:
    """Saves folders, one at a time. Every rank makes every call. Belongs to one process."""

    def __init__(self, name: str, options: WriteOptions | None) -> None:
        """`name`: of the call that saves, for messages. `options`: of all parts.

        Raises:
            UnsupportedError: `overlap`, `node_local`, `max_in_flight` or `on_busy` is set.
        """
        check_options("write_options", options, WriteOptions)
        self._name = name
        self._call = CallId(name, is_write=True)
        self._options = options or WriteOptions()
        for option in ("overlap", "node_local", "max_in_flight", "on_busy"):
            value = getattr(self._options, option)
            if value != getattr(WriteOptions, option):
                raise UnsupportedError(f"{name}: {option}={value!r} of the write options")
        self._handles: list[SaveHandle] = []
        self._place: FolderPlace | None = None  # on the coordinator, of the save under way
        self._folder = self._target = Path()
        self._figures: dict[str, float] = {}

    def begin(self, folder: Callable[[], Path], *, may_replace: bool = True) -> Path:
        """Waits for the save before, and returns the empty folder to write into.

        Args:
            folder: returns the place; what it raises is raised on all ranks.
            may_replace: whether a folder may lie there. Default True.

        Raises:
            PlanError: ranks save to other folders.
            OptionError: a folder lies there.
            UnsupportedError: a link or a file lies there, or the folder is pinned.
            ConcurrentSaveError: another job saves there.
            StorageError: the folder cannot be made.
            DcpxError: of the save before, which failed.
        """
        concurrent.futures.wait([handle.durable for handle in self._handles])

        def local() -> Call:
            self.wait()  # here, so that all ranks raise what only some of them have not read
            if self._place is not None:  # of a save that never came to its commit
                self._place.close()
            return Call(self._name, {"folder": str(folder().absolute())})

        def make(calls: list[Call]) -> str:
            own = path_of(check_same_call(calls, of="a training").arguments["folder"])
            if own.is_symlink() or (own.exists() and not own.is_dir()):
                raise UnsupportedError(f"save '{own}': a link or a file lies there")
            if own.exists() and not may_replace:
                problem = "it is there already; set the iteration of the next one"
                raise OptionError(f"save '{own}': {problem}", option="iteration")
            refuse_pinned(own, ())
            self._place = FolderPlace(own, is_durable=self._is_durable)
            return str(self._place.make())

        timeout_s = self._options.save_timeout_s
        with exchange_for(None, False, timeout_s, "save", self._call) as exchange:
            self._target = path_of(exchange.all_reduce("begin", local, make))
        self._folder = self._target.parents[2] / self._target.name
        return self._target

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raises an error of the block on all ranks: the block writes the framework's files."""
        # The others are, or will be, in the first step of `commit`.
        with told_to_next(None, False, self._options.save_timeout_s, "save", self._call):
            yield

    def commit(self, parts: list[Part], condemned: Callable[[], Iterable[Path]]) -> SaveHandle:
        """Saves the parts in the background; returns the save of the last, which publishes all.

        Args:
            parts: of `noted`.
            condemned: returns the folders to remove behind the commit, on the coordinator.

        Raises:
            UnsupportedError: there are no parts, or one is pinned.
            PlanError: ranks have other parts.
            As `dcpx.async_save`.
        """

        def local() -> Call:
            if not parts:
                raise UnsupportedError(
                    f"{self._name} '{self._folder}': the framework saved nothing by DCP; it does "
                    "under FSDP with state_dict_type='SHARDED_STATE_DICT'"
                )
            if self._is_durable:
                _sync_files(self._target)
            return Call(self._name, {"parts": [part.path.name for part in parts]})

        def compare(calls: list[Call]) -> None:
            check_same_call(calls, of="a training")
            own = [str(part.path.absolute().relative_to(self._target)) for part in parts]
            refuse_pinned(self._folder, own)
            with storage_errors("look into", self._folder, is_read=True):
                check_room(self._folder, self._target, own)

        timeout_s = self._options.save_timeout_s
        with exchange_for(None, False, timeout_s, "save", self._call) as exchange:
            exchange.all_reduce("parts", local, compare)
        options = replace(self._options, max_in_flight=len(parts), on_busy="wait")
        try:
            for at, part in enumerate(parts, 1):
                writer = _PartWriter(part.path, options=options)
                if at == len(parts):
                    writer.publish_behind(self._handles, lambda: self._publish(condemned))
                self._handles.append(async_save(part.state_dict, storage_writer=writer))
        except BaseException:
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.cancel()
                handle.exception()  # which nobody needs besides
            raise
        return self._handles[-1]

    def wait(self) -> None:
        """Waits for the save under way. Raises DcpxError, once: it failed."""
        handles, self._handles = self._handles, []
        # The caller has the last one, which fails where another part does.
        is_known = bool(handles) and handles[-1].done() and handles[-1].durable.is_collected
        errors = [error for handle in handles if (error := handle.exception()) is not None]
        if errors and not is_known:
            raise errors[0]
        reports = [report for handle in handles if (report := handle.report()) is not None]
        if reports:
            self._figures = {
                "save_bytes": sum(report.file_bytes for report in reports),
                "save_s": max(report.total_s for report in reports),
                "save_blocked_s": sum(report.blocked_s for report in reports),
            }

    def take_figures(self) -> dict[str, float]:
        """Returns, once, what the last save took that `wait` has seen: bytes and seconds."""
        figures, self._figures = self._figures, {}
        return figures

    @property
    def has_ended_well(self) -> bool:
        """Whether `wait` has something to tell and would neither wait nor raise."""
        return bool(self._handles) and None not in [handle.report() for handle in self._handles]

    @property
    def _is_durable(self) -> bool:
        return self._options.durability == "full"

    def _publish(self, condemned: Callable[[], Iterable[Path]]) -> None:
        """Renames the folder to its place, then removes older ones. Raises: StorageError."""
        target, folder = self._target, self._folder
        for part in parts_of(target):
            make_readers_file(part)
        record = record_of(target, target.parent.name)
        write_record(target, record, is_durable=self._is_durable)
        if os.path.lexists(folder):
            refuse_pinned(folder, record.parts)  # also since the save began
            check_room(folder, target, [])
            old = Replacement(folder, target, record, is_durable=self._is_durable)
            old.carry()
            with storage_errors(f"exchange '{folder}' with", target):
                old.exchange()
            old.settle()
        else:
            rename_path(target, folder)
            if self._is_durable:
                fsync_path(folder.parent)
        if self._place is not None:
            self._place.close(is_published=True)
        logger.info("saved '%s'", folder)
        with suppress_and_log(f"remove what is older than '{folder}'"):
            with storage_errors("look into", folder.parent, is_read=True):
                old_folders = [*condemned()]
            for old_folder in old_folders:
                with suppress_and_log(f"remove '{old_folder}'"):
                    remove_folder(old_folder)


class _PartWriter(DcpxWriter):
    """Writes one part of a folder; the last one publishes it."""

    _DcpxWriter__log_level = logging.DEBUG  # the folder's own line says it

    def publish_behind(self, others: list[SaveHandle], publish: Callable[[], None]) -> None:
        """Makes this the last part: its commit waits for others, and publishes the folder."""
        self.__others, self.__publish = list(others), publish

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits. Raises: as `DcpxWriter`; of another part; where the folder is not published."""
        for other in vars(self).get("_PartWriter__others", ()):
            other.result()
        super().finish(metadata, results)
        if "_PartWriter__publish" in vars(self):
            self.__publish()


def _sync_files(folder: Path) -> None:
    """Makes durable what the framework wrote. Raises: StorageError."""
    for path in folder.rglob("*"):
        with storage_errors("fsync", path):
            if path.is_dir():
                fsync_path(path)
            elif path.is_file():
                fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
