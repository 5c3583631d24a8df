"""Files that a framework has beside a checkpoint, published with it.

`.metadata` makes a checkpoint, and one rename replaces it; a file beside it takes a second one. So
that a save over a checkpoint leaves the previous one or the new one, whole:

1. A save puts its files aside, durably.
2. Just before the commit the old files are kept under the digest of their `.metadata`, and the new
   ones get the names. After the commit the kept ones go.

Where a kill leaves kept files of the `.metadata` that is there, `current` names them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx._answered_os import path_of
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.options import WriteOptions
from torch_dcpx.storage.directory import Directory, make_directory
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.paths import AnyPath
from torch_dcpx.storage.publish import put as put
from torch_dcpx.storage.publish import put_from as put_from
from torch_dcpx.writer.writer import DcpxWriter

# Returns names and contents of the files; called on the coordinator as the ranks plan.
Files: TypeAlias = Callable[[Path], Mapping[str, bytes]]


def kept(path: Path) -> Path | None:
    """Returns where a file is kept for the checkpoint that it lies beside; None: there is none."""
    try:
        content = (path.parent / METADATA_NAME).read_bytes()
    except FileNotFoundError:
        return None
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return path.with_name(f".dcpx.{path.name}.{digest}.kept")


def _kept_of_all(path: Path) -> list[Path]:
    """Returns what is kept of a file, of any checkpoint."""
    return list(path.parent.glob(f".dcpx.{path.name}.*.kept"))


def current(path: Path) -> Path:
    """Returns the file that belongs to the checkpoint that is there: `path`, or the kept one."""
    own = kept(path) if _kept_of_all(path) else None
    return own if own is not None and own.exists() else path


class _Beside:
    """One file of a save."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._aside = path.with_name(f".dcpx.{path.name}.{uuid.uuid4().hex[:12]}.new")
        self._kept = kept(path)
        self._is_published = False
        with Directory(path.parent) as directory:
            directory.create(self._aside.name, [content], is_durable=True)

    def publish(self) -> None:
        """Gives the file its name. REQUIRES: the save's lock is held, the commit is next."""
        if self._kept is not None and self._path.exists() and not self._kept.exists():
            put(self._kept, self._path.read_bytes())
        self._is_published = True
        with Directory(self._path.parent) as directory:
            directory.rename(self._aside.name, self._path.name)
            directory.sync()
        for path in self._path.parent.glob(f".dcpx.{self._path.name}.*.new"):
            path.unlink(missing_ok=True)  # of a save that was killed

    def tidy(self) -> None:
        """Removes what is kept: of a checkpoint that is no more."""
        for path in _kept_of_all(self._path):
            path.unlink(missing_ok=True)

    def take_back(self) -> None:
        """Undoes `publish`, unless the save was committed after all."""
        self._aside.unlink(missing_ok=True)
        if kept(self._path) != self._kept:
            return
        if self._kept is None:
            if self._is_published:
                self._path.unlink(missing_ok=True)
        elif self._kept.exists():
            if self._is_published:
                put(self._path, self._kept.read_bytes())
            if self._path.read_bytes() == self._kept.read_bytes():
                self._kept.unlink()


class WriterWithFiles(DcpxWriter):
    """Publishes files of a framework with the checkpoint.

    Args:
        path, options: as `DcpxWriter`.
        files: what lies beside.
    """

    def __init__(self, path: AnyPath, files: Files, options: WriteOptions) -> None:
        super().__init__(path, options=options)
        self.files = files
        self.beside: list[_Beside] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Puts the files aside, on the coordinator."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            folder = path_of(self.path)
            make_directory(folder, is_durable=True)
            for name, content in self.files(folder).items():
                self.beside.append(_Beside(folder / name, content))

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Commits the checkpoint with its files."""
        for file in self.beside:
            file.publish()
        super().finish(metadata, results)
        for file in self.beside:
            file.tidy()

    def take_back(self) -> None:
        """After a save that failed: files are again of the checkpoint that is there."""
        for file in self.beside:
            file.take_back()

    def saved_by(self, call: Callable[..., SaveHandle], state: Any, **more: Any) -> SaveHandle:
        """Saves a state by `save` or `async_save`, and takes the files back where that fails."""
        try:
            handle = call(state, storage_writer=self, **more)
        except BaseException:
            self.take_back()
            raise
        handle.add_done_callback(self._after)
        return handle

    def _after(self, save: SaveHandle) -> None:
        if save.report() is None:
            self.take_back()


def refuse_unfit(options: WriteOptions, framework: str) -> None:
    """Raises UnsupportedError for options that break what a framework relies on."""
    if options.on_busy == "skip" or options.overlap:
        raise UnsupportedError(
            f"on_busy='skip' and overlap=True: {framework} takes each save for done, and the state "
            "for free, when its call has returned"
        )
