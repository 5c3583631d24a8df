"""Options of the writer and the reader: frozen, validated once, each with its unit and default."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from torch_dcpx._arguments import (
    check_bool,
    check_choice,
    check_options,
    check_seconds,
    check_type,
    checked_globals,
    checked_int,
)
from torch_dcpx._environment import options_from_environment, threads_of_rank
from torch_dcpx._integers import set_plain_ints
from torch_dcpx.errors import OptionError, must_be

ProgressFunction: TypeAlias = Callable[[int, int], object]  # (done bytes, total bytes)

KIB = 1 << 10
MIB = 1 << 20
_MIN_SLOT_BYTES = 256 * KIB
_MAX_SLOT_BYTES = 1 << 30
_DEFAULT_MEMORY_BYTES = 64 * MIB
_DEFAULT_UPLOAD_BYTES = 192 * MIB  # 16 parts of 8 MiB in three quarters, and what fills the next
_INTEGERS = ("host_memory_bytes", "workers", "slot_bytes")  # of both classes


def _check_memory(host_memory_bytes: Any, slot_bytes: Any, workers: Any) -> None:
    checked_int("slot_bytes", slot_bytes, _MIN_SLOT_BYTES, _MAX_SLOT_BYTES)
    if slot_bytes % (64 * KIB) != 0:
        raise must_be("slot_bytes", slot_bytes, "a multiple of 65536")
    checked_int("host_memory_bytes", host_memory_bytes, slot_bytes, 1 << 60)
    if workers is None:
        return
    checked_int("workers", workers, 1, 256)
    if workers * slot_bytes > host_memory_bytes:
        raise OptionError(
            f"workers={workers} with slots of {slot_bytes} B need {workers * slot_bytes} B, more "
            f"than host_memory_bytes={host_memory_bytes}: raise it, or lower workers or slot_bytes",
            option="workers",
            value=workers,
        )


def _check_endpoint(endpoint: Any) -> None:
    if endpoint is None:
        return
    check_type("endpoint", endpoint, str, "a URL")
    for marks, what in (("@", "holds a user or a password"), ("?#", "has a query or a fragment")):
        if any(mark in endpoint for mark in marks):  # its text may be a secret
            raise OptionError(f"endpoint {what}", option="endpoint", value=None)
    rest = endpoint.removeprefix("http://").removeprefix("https://")
    if rest == endpoint or not rest:
        raise must_be("endpoint", endpoint, "a URL that begins with http:// or https://")


_WORKERS_A_CORE = 4  # they wait for the disk more than for a core


def _usable_workers(workers: int | None, host_memory_bytes: int, slot_bytes: int) -> int:
    """Returns `workers`, or several for each of this rank's cores, within the budget."""
    if workers is not None:
        return workers
    return max(1, min(threads_of_rank(_WORKERS_A_CORE), 16, host_memory_bytes // slot_bytes))


def repr_of(plugin: Any) -> str:
    """Returns a writer or reader as text: its path, and its options if any is not the default."""
    options = repr(getattr(plugin, "options", None))
    more = "" if options.endswith("()") else f", options={options}"
    path = os.fspath(getattr(plugin, "path", ""))
    return f"{type(plugin).__name__}({path!r}{more})"


class _Told:
    """Shows options by what is not their default."""

    def __repr__(self) -> str:
        own: Any = self
        shown = [
            f"{field.name}={getattr(own, field.name)!r}"
            for field in fields(own)
            if getattr(own, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return self  # frozen; a copy of `progress` would be one of what it is bound to


@options_from_environment
@dataclass(frozen=True, repr=False)
class WriteOptions(_Told):
    """The options of a save.

    An option that is not given comes from the environment variable DCPX_<NAME>, such as
    DCPX_SAVE_TIMEOUT_S, or else has its default.

    Attributes:
        durability: "full" (default): a save that returned survives a power cut. "none": no fsync at
            all; a crash of the machine, not of the process, may lose or tear a checkpoint.
        host_memory_bytes: bound, in bytes, on the host memory of a save besides the state: on all
            slots together, and separately on what is serialised or copied to the host at one time.
            One larger item still passes, alone. A value bounds the snapshots of asynchronous saves
            as well. Default None: 64 MiB for slots and for temporaries, 192 MiB for the slots of an
            upload to a store; a snapshot takes as much as the state.
        workers: threads that write, 1 to 256. Default None: four times this rank's share of the
            usable cores (LOCAL_WORLD_SIZE ranks share them), from 2 to 16, within
            `host_memory_bytes`.
        slot_bytes: memory of one worker and the most it writes at once from there, in bytes; a
            multiple of 64 KiB, from 256 KiB to 1 GiB. Default 2 MiB.
        direct_io: write with O_DIRECT where the file system takes it, elsewhere through the page
            cache. Default True.
        files_per_rank: spread a rank's items over so many files, by their bytes, and write these at
            the same time; for file systems where one file serialises. 1 to 256. Refused together
            with `single_file_per_rank=False`. Default 1.
        progress: a callable gets (done bytes, total bytes) of this rank's payload about ten times a
            second, on the thread that saves; its errors fail the save. True: a tqdm bar on the
            coordinator's stderr, if that is a terminal and tqdm is installed. Default False.
        in_place: which dense CPU tensors of 15/16 of a slot and more are written from their own
            memory, up to 8 MiB at once, without a copy to a slot. "auto" (default): those on huge
            pages, which Linux names since 6.7; all with `direct_io=False`. "always", "never".
            Items have the same bytes, in other places of the file.
        save_timeout_s: deadline, in seconds, of everything that one save waits for from other
            ranks, and from storage that does not answer; for `dcpx.save`, `dcpx.async_save` and
            stagers. Default 1800. Through `dcp.*` DCP's own collectives wait, without it.
        max_in_flight: asynchronous saves of this process that may be under way at one time, each
            with a snapshot of its own; 1 to 16. For `dcpx.async_save` only. Default 1.
        on_busy: what `dcpx.async_save` does while `max_in_flight` saves are under way: "wait"
            (default) for one of them to end, "skip" this save, or raise an "error".
        overlap: `dcpx.async_save` returns once the copies from devices are queued there; they run
            beside the caller's next work. Whatever overwrites saved tensors must then come after
            `handle.guard.wait()`; `guard_optimizer` does that for an optimizer's steps, but not for
            those that a CUDA graph replays: wait before each `replay`. Default False: it returns
            when all is copied. For `dcpx.async_save` only.
        node_local: ranks may name different directories, each with files of its own; a load needs
            them all together. The same on all ranks. Default False: one directory, under one name
            or several; ranks that save elsewhere are refused. One path that is another directory on
            each node needs no option. For `dcpx.*` and the manager; through `dcp.*` nothing is
            compared.
        check_visible: whether one rank of each node looks, before the save returns, until it sees
            the commit and all files. "auto" (default): where other nodes mount the file system, by
            its type (NFS, FUSE, Lustre, GPFS, Ceph, ...). For `dcpx.*` and the manager.
        visible_s: for how long, in seconds, a node looks for what was saved, where its view of a
            file system is late; then an error names it. Default 30.
        endpoint: URL of the store of an `s3://` or `az://` path, such as "http://minio:9000".
            Default None: as obstore finds it (AWS_ENDPOINT_URL, AZURE_STORAGE_ENDPOINT, or else
            Amazon's or Azure's).
        conditional_commit: in a store: commit only if nobody else has since the save began;
            a store that cannot do that is refused. False: of two saves to one URL at a time the
            later one wins without a word, and may be incomplete. Default True.

    Raises:
        OptionError: a value that cannot work, or two that contradict each other.
    """

    durability: Literal["full", "none"] = "full"
    host_memory_bytes: int | None = None
    workers: int | None = None
    slot_bytes: int = 2 * MIB
    direct_io: bool = True
    files_per_rank: int = 1
    progress: bool | ProgressFunction = False
    in_place: Literal["auto", "always", "never"] = "auto"
    save_timeout_s: float = 1800.0
    max_in_flight: int = 1
    on_busy: Literal["wait", "skip", "error"] = "wait"
    overlap: bool = False
    node_local: bool = False
    check_visible: bool | Literal["auto"] = "auto"
    visible_s: float = 30.0
    endpoint: str | None = None
    conditional_commit: bool = True

    def __post_init__(self) -> None:
        set_plain_ints(
            self, *_INTEGERS, "files_per_rank", "max_in_flight", "save_timeout_s", "visible_s"
        )
        check_choice("durability", self.durability, ("full", "none"))
        _check_memory(self.resolved_memory_bytes(), self.slot_bytes, self.workers)
        check_bool("direct_io", self.direct_io)
        checked_int("files_per_rank", self.files_per_rank, 1, 256)
        if type(self.progress) is not bool and not callable(self.progress):
            raise must_be("progress", self.progress, "True, False or a callable")
        check_choice("in_place", self.in_place, ("auto", "always", "never"))
        check_seconds("save_timeout_s", self.save_timeout_s)
        checked_int("max_in_flight", self.max_in_flight, 1, 16)
        check_choice("on_busy", self.on_busy, ("wait", "skip", "error"))
        check_bool("overlap", self.overlap)
        check_bool("node_local", self.node_local)
        if self.check_visible != "auto":
            check_bool("check_visible", self.check_visible)
        check_seconds("visible_s", self.visible_s)
        _check_endpoint(self.endpoint)
        check_bool("conditional_commit", self.conditional_commit)

    def resolved_memory_bytes(self) -> int:
        """Returns the bound on slots, and on temporaries, in bytes."""
        return _DEFAULT_MEMORY_BYTES if self.host_memory_bytes is None else self.host_memory_bytes

    def resolved_upload_bytes(self) -> int:
        """Returns the bound on the slots of uploads to a store, in bytes."""
        return _DEFAULT_UPLOAD_BYTES if self.host_memory_bytes is None else self.host_memory_bytes

    def resolved_workers(self) -> int:
        """Returns the number of threads that a save starts."""
        return _usable_workers(self.workers, self.resolved_memory_bytes(), self.slot_bytes)


@options_from_environment
@dataclass(frozen=True, repr=False)
class ReadOptions(_Told):
    """The options of a load.

    Environment variables count as in `WriteOptions`, but none can set `trusted=True`.

    Attributes:
        verify: "blocks" (default): every byte that stays in a tensor was checked against the
            file's checksums, in whole blocks of 64 KiB; "none": reads only the wanted ranges and
            short gaps between neighbours: up to 8 KiB through the page cache, 64 KiB by O_DIRECT,
            between runs of 4 KiB and more no more than half a run. Files of stock DCP hold no
            checksums.
        trusted: hand pickles of the checkpoint to Python as stock does, which executes anything in
            them. Default False: nothing from a checkpoint is executed.
        safe_globals: classes and functions, or their dotted names, that byte items, and tensors of
            other classes than torch's own, may name besides the documented plain ones; for this
            reader only. A name is imported when a pickle names it. Default ().
        host_memory_bytes: bound, in bytes, on the host memory of a load besides its tensors: on all
            slots together, and separately on what is converted, decoded or copied to a device at
            one time. One larger item still passes, alone. Default 64 MiB.
        workers: threads that read, 1 to 256. Default None: as in `WriteOptions`.
        slot_bytes: memory of one worker and the most it reads at once, in bytes; a multiple of
            64 KiB, from 256 KiB to 1 GiB. Default 2 MiB.
        direct_io: read files with O_DIRECT that are not in the page cache, where the file system
            takes it. Default True.
        load_timeout_s: deadline, in seconds, of everything that one load waits for from other
            ranks, and from storage that does not answer. Calls without options, such as `dcpx.ls`,
            and commands have that of the environment. Default 1800.
        node_local: the path's last component may differ over the ranks, where each node has its own
            directory; the same on all ranks. For `dcpx.load` only. Default False.
        visible_s: for how long, in seconds, a load looks for what this job has saved, as in
            `WriteOptions`; for what others have, 5 s at most. Default 30.
        endpoint: as in `WriteOptions`. Default None.

    Raises:
        OptionError: a value that cannot work, or two that contradict each other.
    """

    verify: Literal["blocks", "none"] = "blocks"
    trusted: bool = False
    safe_globals: tuple[type | Callable[..., Any], ...] = ()
    host_memory_bytes: int = _DEFAULT_MEMORY_BYTES
    workers: int | None = None
    slot_bytes: int = 2 * MIB
    direct_io: bool = True
    load_timeout_s: float = 1800.0
    node_local: bool = False
    visible_s: float = 30.0
    endpoint: str | None = None

    def __post_init__(self) -> None:
        set_plain_ints(self, *_INTEGERS, "load_timeout_s", "visible_s")
        check_choice("verify", self.verify, ("blocks", "none"))
        check_bool("trusted", self.trusted)
        _check_memory(self.host_memory_bytes, self.slot_bytes, self.workers)
        check_bool("direct_io", self.direct_io)
        check_seconds("load_timeout_s", self.load_timeout_s)
        check_bool("node_local", self.node_local)
        check_seconds("visible_s", self.visible_s)
        _check_endpoint(self.endpoint)
        object.__setattr__(self, "safe_globals", checked_globals(self.safe_globals))

    def resolved_workers(self) -> int:
        """Returns the number of threads that a load starts."""
        return _usable_workers(self.workers, self.host_memory_bytes, self.slot_bytes)


def merge_write_options(
    options: WriteOptions | None, thread_count: int | None, sync_files: bool | None
) -> WriteOptions:
    """Returns the options with `FileSystemWriter`'s arguments merged in.

    Raises OptionError: two of them contradict each other.
    """
    check_options("options", options, WriteOptions)
    thread_count = checked_int("thread_count", thread_count, 1, 256, or_none=True)
    if sync_files is not None:
        check_type("sync_files", sync_files, int, "True, False or None")  # as stock, 0 and 1, too
    if options is not None:
        if sync_files is not None and sync_files != (options.durability == "full"):
            raise _contradiction("sync_files", sync_files, f"durability={options.durability!r}")
        if thread_count is not None and thread_count != options.workers:
            raise _contradiction("thread_count", thread_count, f"workers={options.workers}")
        return options
    given: dict[str, Any] = {}
    if sync_files is not None:
        given["durability"] = "full" if sync_files else "none"
    if thread_count is None:
        return WriteOptions(**given)
    own = WriteOptions(workers=None, **given)
    memory_bytes, slots = own.host_memory_bytes, thread_count * own.slot_bytes
    if memory_bytes is None and slots > own.resolved_memory_bytes():
        memory_bytes = slots
    return replace(own, workers=thread_count, host_memory_bytes=memory_bytes)


def _contradiction(name: str, value: object, option: str) -> OptionError:
    text = f"{name}={value} contradicts options.{option}; give one of them"
    return OptionError(text, option=name, value=value)
