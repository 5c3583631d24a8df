"""Saves of Lightning's strategies: in the background, with `meta.pt`, and removals behind them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from torch_dcpx._answered_os import path_of
from torch_dcpx._text import shown_url
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.save import async_save, save
from torch_dcpx.errors import ConcurrentSaveError, StorageError, UnsupportedError
from torch_dcpx.integrations._beside import WriterWithFiles, current, kept, refuse_unfit
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.storage.directory import fsync_path
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.paths import AnyPath
from torch_dcpx.storage.reader_lock import being_deleted

META_NAME = "meta.pt"

logger = logging.getLogger("torch_dcpx")


class Saves:
    """The saves of one strategy.

    Args:
        options: of each; None: the defaults.
        is_async: whether `save` returns once the state is copied.
    """

    def __init__(self, options: WriteOptions | None, *, is_async: bool) -> None:
        self.is_async = is_async
        self._options = options or WriteOptions()
        refuse_unfit(self._options, "Lightning")
        self._unfinished: list[_Save] = []
        self._removals: list[_Removal] = []  # on rank 0

    def save(self, state: dict[str, Any], meta: dict[str, Any], path: str) -> None:
        """Saves a checkpoint on all ranks; `meta` is rank 0's.

        A removal of this path that has not begun is called off: the save replaces what is there.
        Waits for one that has, and for a save to this path.

        Raises:
            UnsupportedError: a URL. StorageError: what it waits for does not end. As `dcpx.save`
                and `dcpx.async_save`, and what failed of a save before.
        """
        if "://" in path:
            raise UnsupportedError(
                f"save to '{shown_url(path)}': checkpoints with a meta.pt need a directory"
            )

        def files(_folder: Path) -> dict[str, bytes]:
            content = io.BytesIO()
            torch.save(meta, content)
            return {META_NAME: content.getvalue()}

        places = _places(path)
        self._make_way(places)
        self._end([one.ended for one in self._unfinished if one.places & places], path)
        writer = WriterWithFiles(path, files, self._options)
        handle = writer.saved_by(async_save if self.is_async else save, state)
        unread = [one for one in self._unfinished if one.is_unread]
        self._unfinished = [*unread, _Save(handle, places)]  # it may have failed by now

    def path_of_all(self, path: AnyPath) -> str:
        """Returns rank 0's path of a save, on all ranks: some have the time in it.

        Raises:
            RankLostError: a rank does not save. What failed of a removal before.
        """

        def own() -> str:
            text = os.fsdecode(path)
            self._make_way(_places(text))
            raise_first(self._failed_removals())
            return text

        return _path_of_rank_0(own, self._options.save_timeout_s, "save", is_write=True)

    def path_to_load(self, path: AnyPath) -> str:
        """Returns rank 0's path of a load, on all ranks, behind all saves and removals.

        Raises:
            RankLostError: a rank does not load. As `wait`, on all ranks.
        """
        concurrent.futures.wait([save.ended for save in self._unfinished])

        def own() -> str:
            self.wait()
            return os.fsdecode(path)

        return _path_of_rank_0(own, ReadOptions().load_timeout_s, "load", is_write=False)

    def wait(self) -> None:
        """Waits for all saves and removals.

        Raises:
            What failed of the first that did; the others are logged. A removal fails on rank 0.
            StorageError: a removal does not end.
        """
        saves, self._unfinished = [one for one in self._unfinished if one.is_unread], []
        errors = [error for save in saves if (error := save.handle.exception()) is not None]
        try:
            self._end([removal.ended for removal in self._removals], "a checkpoint")
        finally:
            raise_first([*errors, *self._failed_removals()])

    def remove(self, path: Path, remove: Callable[[], None]) -> None:
        """Removes a checkpoint behind all saves of before, unless one of them fails.

        What fails of it is raised by the next `path_of_all` or `wait`.
        """
        removal = _Removal(path, remove, self._unfinished)
        self._removals.append(removal)
        removal.run_behind([save.handle for save in self._unfinished])

    def _make_way(self, places: frozenset[str]) -> None:
        """Calls off removals of what is saved again, or waits for them. Raises: StorageError."""
        for removal in list(self._removals):
            if removal.place in places and removal.ended.cancel():
                self._removals.remove(removal)
                logger.info("'%s' is not removed: it is saved again", removal.path)
            elif any(Path(place).is_relative_to(removal.place) for place in places):
                self._end([removal.ended], str(removal.path))

    def _end(self, futures: list[Future[None]], path: str) -> None:
        timeout_s = self._options.save_timeout_s
        if concurrent.futures.wait(futures, timeout_s).not_done:
            problem = f"a save or a removal of {path!r} has not ended in {timeout_s} s"
            raise StorageError(f"wait: {problem}", errno=errno.ETIMEDOUT, path=path)

    def _failed_removals(self) -> list[BaseException]:
        """Returns, once, the errors of removals that have ended."""
        ended = [one.ended for one in self._removals if one.ended.done()]
        self._removals = [one for one in self._removals if one.ended not in ended]
        errors = [None if one.cancelled() else one.exception() for one in ended]
        return [error for error in errors if error is not None]


class _Save:
    """One save, and where it writes."""

    def __init__(self, handle: SaveHandle, places: frozenset[str]) -> None:
        self.handle, self.places = handle, places
        self.ended: Future[None] = Future()  # behind what else waits for its end
        handle.add_done_callback(lambda _: self.ended.set_result(None))

    @property
    def is_unread(self) -> bool:
        return not self.handle.done() or self.handle.durable.has_uncollected_error


class _Removal:
    """One removal: it waits for saves, or was called off, or runs, or has ended."""

    def __init__(self, path: Path, remove: Callable[[], None], saves: list[_Save]) -> None:
        self.path, self._remove = path, remove
        self.place = _place(os.fspath(path))
        self.ended: Future[None] = Future()
        is_saved = any(self.place in save.places for save in saves)
        # What nobody has saved when it was asked for must be there still when it runs.
        self._is_expected = _is_like(path) if not is_saved else lambda: True

    def run_behind(self, saves: list[SaveHandle]) -> None:
        """Removes it once these have ended, unless one has failed."""
        for one in saves:
            if not one.done():
                one.add_done_callback(lambda _: self.run_behind(saves))
                return
        if not self.ended.set_running_or_notify_cancel():
            return
        try:
            if all(one.report() for one in saves):
                self._run()
            else:
                problem = "a save that was to take its place has failed"
                logger.warning("'%s' stays: %s", str(self.path), problem)
        except BaseException as error:
            self.ended.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.ended.set_result(None)

    def _run(self) -> None:
        path = self.path
        if not self._is_expected():
            logger.warning("'%s' stays: it was saved again by something else", str(path))
            return
        with contextlib.ExitStack() as held:
            if not path.is_symlink() and (path / METADATA_NAME).exists():
                try:
                    held.enter_context(being_deleted(path))
                except ConcurrentSaveError as error:
                    logger.warning("'%s' stays: %s", str(path), str(error))
                    return
                (path / METADATA_NAME).unlink()  # no checkpoint any more, wherever a kill comes
                fsync_path(path)
            self._remove()


def _is_like(path: Path) -> Callable[[], bool]:
    """Returns a function that says whether the checkpoint is there that is there now."""

    def commit() -> Path | None:
        with contextlib.suppress(NotADirectoryError):  # one file
            return kept(path / META_NAME)
        return None

    before = commit()
    return lambda: commit() == before


def _place(path: str) -> str:
    """Returns what a removal of a path removes: a link itself, not where it leads."""
    whole = path_of(path).absolute()
    return str(whole.parent.resolve() / whole.name)


def _places(path: str) -> frozenset[str]:
    """Returns what a save to a path needs: its name, and where that leads."""
    return frozenset((_place(path), str(path_of(path).resolve())))


def raise_first(errors: list[BaseException]) -> None:
    """Raises the first of several errors, and logs the others."""
    for error in errors[1:]:
        logger.error("a save or a removal has failed as well: %s", str(error))
    if errors:
        raise errors[0]


def refuse_link(callbacks: Iterable[Any]) -> None:
    """Raises UnsupportedError for a callback that links to what is still being saved."""
    for callback in callbacks:
        if getattr(callback, "save_last", None) == "link":
            raise UnsupportedError(
                "ModelCheckpoint(save_last='link') links to a checkpoint that is still being "
                "saved, and may never be: use save_last=True; or save in the foreground, by a "
                "strategy with async_save=False or without DcpxCheckpointIO"
            )


def _path_of_rank_0(own: Callable[[], str], timeout_s: float, what: str, *, is_write: bool) -> str:
    call = CallId(f"{what}_checkpoint", is_write=is_write)
    with exchange_for(None, False, timeout_s, what, call) as exchange:
        return exchange.all_reduce("path", own, lambda paths: paths[0])


def kept_meta(path: Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Returns what a save that was killed has kept of the `meta.pt` of the checkpoint that is
    there; None where `meta.pt` is of that checkpoint.
    """
    file = current(path / META_NAME)
    if file.name == META_NAME:
        return None
    found: dict[str, Any] = torch.load(file, weights_only=weights_only)
    return found
