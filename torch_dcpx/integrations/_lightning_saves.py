"""Saves of Lightning's strategies: in the background, with `meta.pt`, and removals behind them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.save import async_save, save
from torch_dcpx.errors import ConcurrentSaveError, UnsupportedError
from torch_dcpx.integrations._beside import WriterWithFiles, current, refuse_unfit
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
        self._unfinished: list[SaveHandle] = []

    def save(self, state: dict[str, Any], meta: dict[str, Any], path: str) -> None:
        """Saves a checkpoint on all ranks; `meta` is rank 0's.

        Raises:
            UnsupportedError: a URL. As `dcpx.save` and `dcpx.async_save`, and what failed of a save
                before.
        """
        if "://" in path:
            raise UnsupportedError(f"save to '{path}': checkpoints with a meta.pt need a directory")

        def files(_folder: Path) -> dict[str, bytes]:
            content = io.BytesIO()
            torch.save(meta, content)
            return {META_NAME: content.getvalue()}

        writer = WriterWithFiles(path, files, self._options)
        handle = writer.saved_by(async_save if self.is_async else save, state)
        unread = [one for one in self._unfinished if _is_unread(one)]
        self._unfinished = [*unread, handle]  # it may have failed by now

    def path_of_all(self, path: AnyPath) -> str:
        """Returns rank 0's path of a save, on all ranks: some have the time in it.

        Raises:
            RankLostError: a rank does not save.
        """
        return _path_of_rank_0(path, self._options.save_timeout_s, "save", is_write=True)

    def wait(self) -> None:
        """Waits for all saves. Raises what failed of the first that did."""
        handles, self._unfinished = [*filter(_is_unread, self._unfinished)], []
        failed = [handle for handle in handles if handle.exception() is not None]
        for handle in failed[:1]:
            handle.result()

    def remove(self, path: Path, remove: Callable[[], None]) -> None:
        """Removes a checkpoint behind all saves of before, unless one of them fails."""
        _remove_behind([*self._unfinished], path, remove)


def _is_unread(save: SaveHandle) -> bool:
    return not save.done() or save.durable.has_uncollected_error


def path_to_load(path: AnyPath) -> str:
    """Returns rank 0's path of a load, on all ranks. Raises RankLostError: a rank does not load."""
    return _path_of_rank_0(path, ReadOptions().load_timeout_s, "load", is_write=False)


def _path_of_rank_0(path: AnyPath, timeout_s: float, what: str, *, is_write: bool) -> str:
    call = CallId(f"{what}_checkpoint", is_write=is_write)
    with exchange_for(None, False, timeout_s, what, call) as exchange:
        return exchange.all_reduce("path", lambda: os.fsdecode(path), lambda paths: paths[0])


def _remove_behind(saves: list[SaveHandle], path: Path, remove: Callable[[], None]) -> None:
    for one in saves:
        if not one.done():
            one.add_done_callback(lambda _: _remove_behind(saves, path, remove))
            return
    if not all(one.report() for one in saves):
        logger.warning("'%s' stays: a save that was to take its place has failed", str(path))
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
        remove()


def kept_meta(path: Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Returns what a save that was killed has kept of the `meta.pt` of the checkpoint that is
    there; None where `meta.pt` is of that checkpoint.
    """
    file = current(path / META_NAME)
    if file.name == META_NAME:
        return None
    found: dict[str, Any] = torch.load(file, weights_only=weights_only)
    return found
