"""DcpxReader: the drop-in for `torch.distributed.checkpoint.FileSystemReader`.

read_metadata           reads and vets `.metadata`, without executing anything of it
set_up_storage_reader   raises the error that read_metadata had to keep from DCP
prepare_local_plan      opens the files and finds the payloads
prepare_global_plan     compares which save the ranks read (coordinator)
read_data               reads the wanted ranges, hands them to the planner

Every rank holds its files open before any rank reads: when the checkpoint is replaced meanwhile,
the load fails before it touches a tensor, or gets the old one whole.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torch_dcpx._answers import or_at_most
from torch_dcpx._arguments import check_options, check_part
from torch_dcpx._compat import is_in_stock_load, is_load, loaded_through
from torch_dcpx._gc import PlanningPause, bounded_pause, paused_gc
from torch_dcpx._hooks import is_own, refuse_bypassed
from torch_dcpx.errors import CorruptionError, DcpxError, NotCommittedError, StorageError
from torch_dcpx.events import UNHEARD, begun, is_anybody_listening
from torch_dcpx.metadata.file import CheckpointMetadata, decode_metadata
from torch_dcpx.options import ReadOptions, repr_of
from torch_dcpx.reader.coverage import check_coverage, meeting_targets
from torch_dcpx.reader.files import read_items
from torch_dcpx.reader.generation import Generation, check_same_generation, note_lost, replaced
from torch_dcpx.reader.hints import absent, add_repair, add_verify, not_committed
from torch_dcpx.reader.locate import Found, locate_items, refuse_foreign_places
from torch_dcpx.reports import ReadReport, loaded_line
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.object_files import set_location
from torch_dcpx.storage.object_url import location_of
from torch_dcpx.storage.paths import (
    AnyPath,
    absolute_text,
    checked_location,
    metadata_file,
)
from torch_dcpx.storage.place import Place, open_place
from torch_dcpx.storage.reader_lock import ReadersHold
from torch_dcpx.storage.visibility import is_late_look, look_until_seen, refuse_older
from torch_dcpx.timelines import Timeline

_T = TypeVar("_T")

logger = logging.getLogger("torch_dcpx")

WAY_OUT = "DcpxReader reads mounted file systems, s3:// and az://. Use torch's FsspecReader"
_REGISTRY_HOOKS = ("from_descriptor_list",)
# With these a subclass can change the planner's plan.
_PLAN_HOOKS = ("prepare_local_plan", "prepare_global_plan", "read_data")


class DcpxReader(FileSystemReader):
    """Loads checkpoints of torch-dcpx and of stock DCP, reading only what is asked for.

    Nothing from a checkpoint is executed unless `ReadOptions(trusted=True)`. Reusable for many
    loads. Not thread-safe. Picklable. As in `DcpxWriter`, its own names meet no subclass's.

    Args:
        path: directory of the checkpoint, or "s3://bucket/prefix", "az://container/prefix"
            with an extra, torch-dcpx[s3] or [azure] (docs/howto/object_stores.md).
        _extension_registry: undoes the extensions of a writer, as stock's. Default None.
        options: see `ReadOptions`. Default None: `ReadOptions()`.

    Raises:
        OptionError: a path that no system call takes, or another wrong argument.
        UnsupportedError: another URL, an extra that is missing, or a method overridden in vain.
    """

    __log_level = logging.INFO  # of the line of a load

    def __init__(
        self,
        path: AnyPath,
        _extension_registry: ExtensionRegistry | None = None,
        *,
        options: ReadOptions | None = None,
    ) -> None:
        check_part("_extension_registry", _extension_registry, ExtensionRegistry, _REGISTRY_HOOKS)
        check_options("options", options, ReadOptions)
        text = checked_location(path, WAY_OUT)
        super().__init__(text, _extension_registry)
        self.options = options if options is not None else ReadOptions()
        set_location(self, text, self.options.endpoint)
        self.last_report: ReadReport | None = None
        self.__checkpoint: CheckpointMetadata | None = None
        self.__generation: Generation | None = None
        self.__kept_error: DcpxError | None = None
        self.__found: Found | None = None  # by prepare_local_plan, for read_data
        self.__is_coordinator = False
        self.__metadata_s = self.__hooks_s = 0.0  # in read_metadata, and in the hooks after it
        self.__pause = PlanningPause()
        self.__timeline = Timeline("load")
        self.__operation = UNHEARD  # of a load through DCP
        self.__hold = ReadersHold()  # from the metadata to the last byte, of a load through DCP
        refuse_bypassed(self, DcpxReader)

    def __repr__(self) -> str:
        return repr_of(self)

    def __getstate__(self) -> dict[str, Any]:
        # Open files, a lock and a pause stay with the process.
        own = {"found": None, "pause": PlanningPause(), "hold": ReadersHold(), "operation": UNHEARD}
        return self.__dict__ | {f"_DcpxReader__{name}": value for name, value in own.items()}

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """Starts another load, of `checkpoint_id` where given. Raises: as the constructor."""
        target = checked_location(checkpoint_id, WAY_OUT) if checkpoint_id else None
        super().reset(target)
        if target:
            set_location(self, target, self.options.endpoint)
        self.__checkpoint = self.__generation = None
        self.__kept_error = None
        self.__pause.end()
        self.__take_found()
        self.__hold.release()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads `.metadata`, or `__{rank}.metadata` with `rank=`.

        DCP takes any error of the first call as a reason to try the second, and turns an error of
        both into an AssertionError without it. So that a damaged `.metadata` is neither passed over
        nor hidden, the second call returns empty metadata and `set_up_storage_reader` raises.

        Raises:
            NotCommittedError: there is none.
            CorruptionError, UnsafePickleError, UnsupportedError, StorageError: see
                docs/reference/errors.md.
        """
        rank = kwargs.get("rank")
        is_fallback = rank is not None and self.__kept_error is not None
        if not is_fallback:
            is_stock = is_anybody_listening() and is_in_stock_load(sys._getframe(1))
            self.__operation = begun("dcp.load", self) if is_stock else UNHEARD
        if is_fallback and not isinstance(self.__kept_error, NotCommittedError):
            return _empty_metadata()
        began, bound = time.perf_counter(), (self.options.load_timeout_s, "load_timeout_s")
        if self.__timeline.has_ended or not self.__timeline.is_of_call:
            self.__timeline = Timeline("load", path=self.path)
        # The next pause begins before this one ends: no collection between them.
        with or_at_most(*bound), self.__timeline.phase("metadata"), paused_gc():
            if loaded_through(sys._getframe(1)) is not None:
                self.__hold.take(self.path)
            try:
                checkpoint = self.__seen(partial(self.__read_checkpoint, rank))
            except DcpxError as error:
                self.__kept_error = error
                if is_fallback:
                    return _empty_metadata()
                raise
            if is_load(sys._getframe(1)):
                self.__pause.begin(len(checkpoint.metadata.state_dict_metadata))
        self.__kept_error, self.__checkpoint = None, checkpoint
        save_id = checkpoint.save_id if rank is None else "rank-local"
        self.__generation = Generation(absolute_text(self.path), save_id)
        self.__timeline.operation_id = self.__timeline.operation_id or save_id
        metadata = checkpoint.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self.__metadata_s = time.perf_counter() - began
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Called by DCP on every rank. Raises: the error that `read_metadata` kept."""
        error, self.__kept_error = self.__kept_error, None
        if error is not None:
            self.__operation.failed(error)
            raise error
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.__is_coordinator = is_coordinator
        self.__timeline.rank = self.rank or 0
        self.__hooks_s = 0.0
        self.last_report = None
        self.__take_found()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Opens every file that the plan needs, and notes which save it belongs to.

        Where `read_data` is a subclass's own, what cannot be found is left to it.

        Raises:
            CorruptionError, StorageError: a file cannot be read, or is none of this checkpoint.
            UnsupportedError: entries of `storage_data` that are not DCP's.
        """
        with self.__hook("locate"), bounded_pause(len(plan.items)):
            self.__pause.end()
            plan = super().prepare_local_plan(plan)
            try:
                self.__found = self.__find(plan.items)
            except DcpxError as error:
                # Where ranks see different files, the final plan may do without what is missing.
                is_missing = isinstance(error, StorageError) and error.errno == errno.ENOENT
                if not is_missing and is_own(self, DcpxReader, "read_data"):
                    raise
        if plan.storage_data is None and self.__generation is not None:
            plan = dataclasses.replace(plan, storage_data=self.__generation)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by DCP on the coordinator.

        Raises:
            StorageError: ranks read the metadata of different saves; no tensor was touched.
        """
        check_same_generation(plan.storage_data for plan in plans)
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for into the planner's tensors.

        Raises:
            CorruptionError: bytes are not what was written, or what is wanted is not stored once;
                `touched` lists the tensors that may hold new bytes.
            UnsafePickleError: a byte item names a global that is not allowed.
            StorageError, ShortReadError: a file is missing, unreadable or too short.
        """
        self.__pause.end()
        with self.__hook("read"):
            refuse_bypassed(self, DcpxReader)
            found = self.__take_found(plan.items)
            is_tiled = False
            try:
                if found is not None and is_own(self, DcpxReader, *_PLAN_HOOKS):
                    name = metadata_file(self, None if self.use_collectives else self.rank)
                    path = str(location_of(self.path) / name)
                    is_tiled = check_coverage(plan.items, planner, path, type(self).__name__)
                found = found or self.__find(plan.items)
                own = self.__checkpoint
                counts = read_items(
                    found,
                    planner,
                    self.transforms,
                    self.options,
                    stored=own.metadata.state_dict_metadata if own else {},
                    meeting=frozenset() if is_tiled else meeting_targets(plan.items),
                )
            except StorageError as error:
                self.__check_not_replaced(error)
                note_lost(location_of(self.path), error, was_open=found is not None)
                raise
            finally:
                if found is not None:
                    found.job.close()  # a traceback may keep the job alive, and with it its files
                    counters = found.job.report(spans=True)
                    self.__timeline.add_spans(counters)
                self.__hold.release()
        self.last_report = counts.report(
            counters,
            metadata_s=self.__metadata_s,
            total_s=self.__metadata_s + self.__hooks_s,
            timeline=self.__timeline,
        )
        self.__timeline.end_hooks()
        if self.__is_coordinator or not self.use_collectives:
            logger.log(self.__log_level, loaded_line(self.last_report, str(self.path)))
        self.__operation.loaded(None, self.last_report)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def generation(self) -> Generation | None:
        """Returns the save whose metadata was read. None: none yet."""
        return self.__generation

    @property
    def is_of_ours(self) -> bool:
        """Returns whether the metadata that was read vouches for its data files."""
        return self.__checkpoint is not None and self.__checkpoint.files is not None

    @contextmanager
    def __hook(self, phase: str) -> Iterator[None]:
        """Counts the time of a hook; an error in it ends the load."""
        began, bound = time.perf_counter(), (self.options.load_timeout_s, "load_timeout_s")
        try:
            with or_at_most(*bound), self.__timeline.phase(phase):
                yield
        except BaseException as error:
            self.__timeline.fail(error)
            self.__timeline.end_hooks()
            self.__operation.failed(error)
            raise
        self.__hooks_s += time.perf_counter() - began

    def __seen(self, look: Callable[[], _T], *check: Callable[[DcpxError], None]) -> _T:
        location = location_of(self.path, self.options.endpoint)
        return look_until_seen(location, self.options.visible_s, look, *check)

    def __find(self, items: Sequence[ReadItem]) -> Found:
        """Opens the files of all items, and finds each item in its file."""
        return self.__seen(partial(self.__find_now, items), self.__check_not_replaced)

    def __find_now(self, items: Sequence[ReadItem]) -> Found:
        table = self.__checkpoint.files if self.__checkpoint else None
        with self.__open() as place:
            path = str(place.path)
            job = place.read_job(self.options)
            try:
                return locate_items(job, items, self.storage_data, table, path)
            except BaseException as error:
                job.close()
                if self.__checkpoint is not None:
                    add_verify(error, path)
                if isinstance(error, (AttributeError, TypeError)):
                    refuse_foreign_places(items, self.storage_data, path)
                raise

    def __take_found(self, items: Sequence[ReadItem] | None = None) -> Found | None:
        """Returns the files and places of `__find` if they serve these items, else closes them."""
        found, self.__found = self.__found, None
        serving = None
        if found is not None and items is not None:
            serving = found.serving(items, str(location_of(self.path)), self.storage_data)
        if found is not None and serving is None:
            found.job.close()
        return serving

    def __open(self) -> Place:
        try:
            return open_place(location_of(self.path, self.options.endpoint))
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            path = str(self.path)
            raise NotCommittedError(absent(path), errno=error.errno, path=path) from error

    def __read_checkpoint(self, rank: int | None) -> CheckpointMetadata:
        refuse_bypassed(self, DcpxReader)
        name = metadata_file(self, rank)
        with self.__open() as place:
            try:
                with place.open_small(name) as file:
                    found = decode_metadata(
                        file,
                        str(place.path / name),
                        safe_globals=self.options.safe_globals,
                        trusted=self.options.trusted,
                    )
                if rank is None:
                    refuse_older(place.path, found.save_id)
                return found
            except CorruptionError as error:
                add_repair(error, place.path, place.names())
                raise
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                wanted = (name,) if rank is None else (METADATA_NAME, name)
                is_second = self.__kept_error is not None
                raise not_committed(place.path, place.names(), wanted, is_second) from error

    def __check_not_replaced(self, error: DcpxError) -> None:
        """Raises StorageError if a data file is gone because a save replaced the checkpoint."""
        if not is_late_look(error) or self.__checkpoint is None:
            return
        try:
            current = self.__read_checkpoint(None if self.use_collectives else self.rank)
        except DcpxError:
            return  # the whole directory is gone, perhaps: the first error says more
        if current.save_id != self.__checkpoint.save_id:
            raise replaced(self.path, current.save_id, error) from error


def _empty_metadata() -> Metadata:
    return Metadata(state_dict_metadata={}, planner_data={}, storage_data={})


def share_timeline(reader: DcpxReader, timeline: Timeline) -> None:
    """Has a reader note its next load in a timeline of the call that makes the load."""
    timeline.path = str(reader.path)
    vars(reader)["_DcpxReader__timeline"] = timeline


def quiet_reader(path: AnyPath, options: ReadOptions | None) -> DcpxReader:
    """Returns a reader whose loads are logged as DEBUG: the call that needs them has a line of its
    own.
    """
    reader = DcpxReader(path, options=options)
    vars(reader)["_DcpxReader__log_level"] = logging.DEBUG
    return reader
