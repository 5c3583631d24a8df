"""Objects of ours in place of DCP's, made with the arguments that DCP's callers give.

Where an argument of the caller's and an option of `install` say two things, the option counts: its
user cannot change the caller. Only with `durability="caller"` the caller's `sync_files` counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torch_dcpx._integers import plain_int
from torch_dcpx.hook.settings import Settings
from torch_dcpx.options import WriteOptions
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.planners.save_planner import DcpxSavePlanner
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.staging.stager import DcpxStager
from torch_dcpx.writer.writer import DcpxWriter

logger = logging.getLogger("torch_dcpx")


class HookedWriter(DcpxWriter):
    """A DcpxWriter while `FileSystemWriter(...)` makes it; afterwards its class is DcpxWriter."""

    dcpx_settings: Settings

    def __init__(
        self,
        path: Any,
        single_file_per_rank: bool = True,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        options = _write_options(self.__dict__.pop("dcpx_settings"), sync_files, thread_count)
        super().__init__(
            path,
            single_file_per_rank or options.files_per_rank > 1,
            None,
            None,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            serialization_format,
            options=options,
        )
        self.__class__ = DcpxWriter  # type: ignore[assignment]


def _write_options(
    settings: Settings, sync_files: bool | None, thread_count: int | None
) -> WriteOptions:
    """Returns the options of a writer whose caller gave these arguments of stock's."""
    options = settings.write_options
    if settings.durability == "caller" and sync_files is not None:
        options = replace(options, durability="full" if sync_files else "none")
        if not sync_files:
            _tell_not_durable()
    threads = plain_int(thread_count)
    if options.workers is None and type(threads) is int and threads > 0:
        most = options.resolved_memory_bytes() // options.slot_bytes
        options = replace(options, workers=min(threads, most, 256))
    return options


@cache
def _tell_not_durable() -> None:
    logger.info(
        "a caller of FileSystemWriter gives sync_files=False: its saves survive no power cut; "
        'install(durability="full") or DCPX_INSTALL_DURABILITY=full overrides it'
    )


class HookedReader(DcpxReader):
    """A DcpxReader while `FileSystemReader(...)` makes it; afterwards its class is DcpxReader."""

    dcpx_settings: Settings

    def __init__(self, path: Any, _extension_registry: Any = None) -> None:
        options = self.__dict__.pop("dcpx_settings").read_options
        super().__init__(path, _extension_registry, options=options)
        self.__class__ = DcpxReader  # type: ignore[assignment]


class HookedUrlWriter(DcpxWriter):
    """As HookedWriter, made by `FsspecWriter(...)` with an `s3://` URL."""

    dcpx_settings: Settings

    def __init__(
        self,
        path: Any,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        options = _write_options(self.__dict__.pop("dcpx_settings"), None, thread_count)
        super().__init__(
            path,
            single_file_per_rank or options.files_per_rank > 1,
            per_thread_copy_ahead=per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
            options=options,
        )
        self.__class__ = DcpxWriter  # type: ignore[assignment]


class HookedStager(DcpxStager, DefaultStager):
    """A DcpxStager that is a DefaultStager to those who ask."""

    dcpx_memory: tuple[int | None, float]  # its bound in bytes, and seconds to wait for it

    def __init__(self, config: StagingOptions | None = None) -> None:
        host_memory_bytes, timeout_s = self.dcpx_memory
        DcpxStager.__init__(
            self,
            StagingOptions() if config is None else config,
            host_memory_bytes=host_memory_bytes,
            timeout_s=timeout_s,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        config = state.get("_config")  # of a copy of torch's own stager, made before `install`
        if config is None:
            vars(self).update(state)
        else:
            self.__init__(config)  # type: ignore[misc]

    def stage(self, state_dict: dict[str, Any], **_kwargs: Any) -> Any:
        """As `DcpxStager.stage`. `DefaultStager` takes, and ignores, what else is given."""
        return super().stage(state_dict)

    def synchronize_staging(self) -> None:
        """Waits until all is copied."""
        self.guard.finish()


OURS: dict[type, type] = {
    FileSystemWriter: HookedWriter,
    FileSystemReader: HookedReader,
    DefaultSavePlanner: DcpxSavePlanner,
    DefaultLoadPlanner: DcpxLoadPlanner,
    DefaultStager: HookedStager,
}
URL_CLASSES: dict[str, type] = {"FsspecWriter": HookedUrlWriter, "FsspecReader": HookedReader}


def ours_of(stock: type) -> type:
    """Returns the class that takes the place of one of DCP's."""
    return OURS.get(stock) or URL_CLASSES[stock.__name__]
