"""DcpxWriter: the drop-in for `torch.distributed.checkpoint.FileSystemWriter`.

set_up_storage_writer   claims the writer, remembers rank and mode
prepare_local_plan      makes the directory, takes the lock, removes leftovers (coordinator)
write_data              resolves, writes and fsyncs this rank's files, fsyncs the directory
finish                  checks the results of all ranks, commits, removes what was replaced
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_dcpx._answers import or_at_most
from torch_dcpx._compat import planned_entries
from torch_dcpx._gc import PlanningPause
from torch_dcpx._hooks import refuse_bypassed, refuse_changed
from torch_dcpx.errors import DcpxError
from torch_dcpx.events import UNHEARD, Operation
from torch_dcpx.options import WriteOptions, merge_write_options, repr_of
from torch_dcpx.ranks.plan_wire import offered
from torch_dcpx.reports import WriteReport, saved_line
from torch_dcpx.staging.staged_state import note_state_written
from torch_dcpx.staging.stager import DcpxStager
from torch_dcpx.storage.names import FileEntry, is_metadata_name, metadata_name
from torch_dcpx.storage.object_files import set_location
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.paths import (
    AnyPath,
    PathAnchor,
    checked_location,
    refuse_other_metadata_file,
)
from torch_dcpx.storage.place import Place, look_into, make_place, open_place
from torch_dcpx.storage.running_save import RunningSave, WriterUse
from torch_dcpx.tensors.offences import check_plan
from torch_dcpx.timelines import Timeline
from torch_dcpx.writer.commit import (
    WriteResults,
    check_present,
    commit,
    refuse_beside_global,
    remove_unpublished,
    verify_results,
)
from torch_dcpx.writer.files import Written, write_files
from torch_dcpx.writer.items import planned_bytes, split_items
from torch_dcpx.writer.locks import SaveLocks
from torch_dcpx.writer.progress import WriteProgress, reporting
from torch_dcpx.writer.save_ids import save_of, with_save_id, written_id
from torch_dcpx.writer.table import WriteTable, transform_by

logger = logging.getLogger("torch_dcpx")

WAY_OUT = "DcpxWriter writes to file systems, s3:// and az://, torch's FsspecWriter to others"


class DcpxWriter(FileSystemWriter):
    """Writes checkpoints that stock `dcp.load` reads, at the speed of the storage.

    Every save is all or nothing: until the last step the directory's previous checkpoint stays as
    it was. Saves one at a time, from any thread, and refuses a second one meanwhile. Reusable.
    Picklable; a copy has no part in the save under way.

    Its own names begin with two underscores, so that no attribute of a subclass meets them.

    Args:
        path: directory of the checkpoint, made durably with its parents where missing; a relative
            one counts from the current directory of the call that saves. Or an s3:// or az:// URL.
        single_file_per_rank: False writes one file per item. Default True.
        sync_files: False is `durability="none"`, True "full"; None (default): as `options` say.
        thread_count: workers on the rank's file, 1 to 256; without `options`, more slots than
            64 MiB raise `host_memory_bytes` to hold them. None (default) chooses by cores.
        per_thread_copy_ahead: bytes per worker of device tensors, and of what a planner makes, that
            are in host memory before they are written. Default 10,000,000.
        cache_staged_state_dict: no effect: staging memory is always used again. Default False.
        overwrite: False refuses a path that holds a checkpoint. Default True.
        _extensions: stream extensions, applied item by item as stock does. Default None.
        serialization_format: TORCH_SAVE (default); SAFETENSORS is refused.
        options: everything else, see `WriteOptions`. Default None: `WriteOptions()`.

    Raises:
        OptionError: a value that cannot work, or two that contradict each other.
        UnsupportedError: SAFETENSORS, another URL, or a method overridden in vain.
    """

    __opened: Callable[[Location], Place] = staticmethod(open_place)
    __log_level = logging.INFO  # of the line of a commit

    def __init__(
        self,
        path: AnyPath,
        single_file_per_rank: bool = True,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        options: WriteOptions | None = None,
    ) -> None:
        self.options = merge_write_options(options, thread_count, sync_files)
        location = checked_location(path, WAY_OUT)
        super().__init__(
            location,
            single_file_per_rank,
            self.options.durability == "full",
            self.options.resolved_workers(),
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            serialization_format,
        )
        set_location(self, location, self.options.endpoint)
        self.last_report: WriteReport | None = None
        self.__hooks_s = 0.0  # spent in the hooks of the save under way
        self.__is_coordinator = False
        self.__own_files: list[str] = []  # of the save under way
        self.__locks = SaveLocks()
        self.__use = WriterUse()
        self.__anchor = PathAnchor()
        self.__anchor.see(self.__location())
        self.__save: RunningSave | None = None
        self.__pause = PlanningPause()
        refuse_bypassed(self, DcpxWriter)
        refuse_changed(self, self.options)

    def __repr__(self) -> str:
        return repr_of(self)

    def __getstate__(self) -> dict[str, Any]:
        # Locks and the save under way stay with the process that has them.
        return {
            **self.__dict__,
            "_DcpxWriter__locks": SaveLocks(),
            "_DcpxWriter__save": None,
            "_DcpxWriter__pause": PlanningPause(),
            "_DcpxWriter__use": WriterUse(),
        }

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """Starts another save, to `checkpoint_id` where given.

        Raises:
            UnsupportedError, OptionError: as the constructor, for `checkpoint_id`.
            ConcurrentSaveError: a save through this writer is under way.
        """
        target = checked_location(checkpoint_id, WAY_OUT) if checkpoint_id else None
        with self.__use.hold():
            self.__use.check()
            if target:
                self.__use.retarget(target)
            self.__release()
            super().reset(target)
            if target:
                set_location(self, target, self.options.endpoint)
            self.__anchor.see(self.__location())

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies `state_dict` to the host for `dcp.async_save`, as `DcpxStager` does.

        Raises:
            ConcurrentSaveError: a save through this writer is under way.
            StagingError: no memory for it; a forked child.
        """
        self.__use.check()
        self.__anchor.stage(self.__location())
        memory, timeout_s = self.options.host_memory_bytes, self.options.save_timeout_s
        return DcpxStager(host_memory_bytes=memory, timeout_s=timeout_s)._staged(state_dict)[0]

    def close(self) -> None:
        """Gives the memory of `stage` back to the system, once no save uses it."""
        DcpxStager().close()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank before anything else of a save.

        Raises:
            ConcurrentSaveError: another save through this writer is under way.
        """
        with self.__use.hold():
            save = self.__use.begin(self, str(self.path))
            self.__release()
            self.__save = save
            save.directory = self.__anchor.see(self.__location())
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        save.timeline.path, save.timeline.rank = str(self.path), self.rank or 0
        self.__is_coordinator = is_coordinator
        save.save_id = save.save_id if is_coordinator or not self.use_collectives else ""
        self.__own_files, self.__hooks_s, self.last_report = [], 0.0, None
        if not save.is_driven:
            self.__pause.begin(planned_entries(sys._getframe(1)))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory, takes the lock, and removes leftovers of failed saves.

        Raises:
            RuntimeError: it holds a checkpoint and `overwrite` is False (stock's text).
            ConcurrentSaveError: another save is writing here. StorageError: no directory.
            UnsupportedError: a rank-local save over a checkpoint of all ranks; a dtype or layout
                that cannot be kept; what was replaced in vain. OptionError: so for `sync_files`.
        """
        with self.__hook("plan"):
            refuse_bypassed(self, DcpxWriter)
            refuse_changed(self, self.options)
            rank = None if self.use_collectives else self.rank
            refuse_other_metadata_file(self, rank)
            check_plan(plan.items)
            path, is_durable = self.__anchor.directory(self.__location()), self.__is_durable
            made = make_place(path, is_durable=is_durable)
            if self.__save is not None:
                self.__save.made = made
            with self.__opened(path) as place:
                if self.__is_coordinator or rank is not None:
                    self.__locks.take(place, self.__save or RunningSave(self), rank, self.options)
                if not self.use_collectives:
                    refuse_beside_global(place)
                with self.__anchor.applied(self):
                    plan = look_into(path, super().prepare_local_plan, plan)
                if path not in made:
                    self.__locks.tidy(place, self.__metadata_name(), is_durable=is_durable)
            is_paused = self.__is_coordinator and not (self.__save and self.__save.is_driven)
            self.__pause.begin(len(plan.items) if is_paused else 0)
            return offered(plan) if self.use_collectives else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the files of each rank, and the save that they are of."""
        return with_save_id(super().prepare_global_plan(plans), self.__save)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; durable, with the directory's entries, when it returns.

        Returns:
            A finished future of `WriteResults`, which also carry the rank's file table.

        Raises:
            StorageError: no file of this rank stays, the previous checkpoint is untouched.
            UnsupportedError, AssertionError: data that cannot be kept; no byte was written for it.
        """
        self.__pause.end_with(plan)
        with self.__hook("write"):
            try:
                written, results = self.__write(plan, planner)
            except BaseException:
                self.__remove_unpublished()
                raise
        note_state_written(getattr(planner, "state_dict", None))
        self.last_report = written.report(self.options.resolved_workers(), self.__hooks_s)
        if not self.__is_coordinator and self.use_collectives:
            self.__release()  # a follower gets no further call of this save
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint, whole and durable. `metadata.dcpx_report` is then the
        coordinator's `WriteReport`; no file holds it.

        Raises:
            PlanError: results and metadata contradict each other; nothing was published.
            StorageError: nothing was published.
        """
        with self.__hook("commit"):
            try:
                with self.__place() as place:
                    files = self.__commit(place, self.__metadata_name(), metadata, results)
            except BaseException:
                self.__remove_unpublished()
                raise
        last = self.last_report
        self.last_report = report = last and last.committed(self.__hooks_s)
        metadata.dcpx_report = report and report.to_send()  # type: ignore[attr-defined]
        nbytes, path = sum(file.nbytes for file in files), str(self.path)
        operation = self.__release(has_ended_well=True)  # the next save may begin elsewhere
        if report:
            logger.log(self.__log_level, saved_line(report, path, len(results), nbytes))
        operation.saved(None, report)

    def __write(self, plan: SavePlan, planner: SavePlanner) -> tuple[Written, WriteResults]:
        """Writes this rank's files; notes them as soon as nobody else would remove them."""
        transform = transform_by(self.transforms) if self.transforms.extensions else None
        table = WriteTable(planner, plan, transform)
        ahead = self.per_thread_copy_ahead * self.options.resolved_workers()
        ahead = min(max(ahead, self.options.slot_bytes), self.options.resolved_memory_bytes())
        files_per_rank = self.options.files_per_rank if self.single_file_per_rank else None
        split = split_items(plan.items, files_per_rank)
        option, is_coordinator = self.options.progress, self.__is_coordinator
        reports = reporting(option, str(self.path), is_coordinator=is_coordinator)
        with self.__place() as place, reports as shown:
            report = self.__save.watched(shown) if self.__save else shown
            planned = list(map(planned_bytes, split.items)) if shown is not None else ()
            written = write_files(
                place,
                split,
                table,
                self.options,
                WriteProgress(report, planned),
                self.__timeline(),
                prefix=plan.storage_data.prefix,
                rank=self.rank or 0,
                save_id=written_id(self.__save, plan.storage_data),
                window_bytes=getattr(planner, "dcpx_window_bytes", None) or ahead,
            )
            self.__own_files = [file.path for file in written.files]
        return written, WriteResults(written.results, written.files)

    def __commit(
        self, place: Place, name: str, metadata: Metadata, results: list[list[WriteResult]]
    ) -> list[FileEntry]:
        """Checks, publishes under `name`, removes what it replaced; returns the files of all."""
        metadata.storage_data, files = verify_results(metadata, results)
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        check_present(place, self.__own_files, files, self.__save, self.options.visible_s)
        commit(
            place,
            name,
            metadata,
            files,
            save_of(files, self.__save),
            is_durable=self.__is_durable,
            takes_over_rank_local=self.__locks.are_held and self.use_collectives,
            leftovers=self.__locks.leftovers_of(),
            lock=self.__locks.last,
        )
        return files

    def __remove_unpublished(self) -> None:
        if self.__save is not None and self.__save.is_unsure:
            self.__own_files = []  # which the checkpoint may need
        if not self.__own_files:
            return
        try:
            with self.__place() as place:
                remove_unpublished(place, self.__metadata_name(), self.__own_files)
        except DcpxError as error:
            logger.warning("leftovers of a failed save stay: %s", str(error))
        self.__own_files = []

    @property
    def __is_durable(self) -> bool:
        return self.options.durability == "full"

    def __location(self) -> Location:
        return location_of(self.path, self.options.endpoint)

    def __place(self) -> Place:
        return self.__opened(self.__anchor.directory(self.__location()))

    def __metadata_name(self) -> str:
        return metadata_name(None if self.use_collectives else self.rank)

    def __timeline(self) -> Timeline:
        return self.__save.timeline if self.__save is not None else Timeline("save")

    def _metadata_exists(self) -> bool:
        """Whether there is a checkpoint that must stay: one of all ranks takes the place of any."""
        if self.overwrite:
            return False  # stock only warns of what was asked for
        if not self.use_collectives:
            return super()._metadata_exists()
        with self.__place() as place:
            return any(map(is_metadata_name, place.names()))

    def __release(self, *, has_ended_well: bool = False) -> Operation:
        """Ends the save: its locks are free, and so is the writer. Returns what tells its end."""
        (self.__pause.end_soon if has_ended_well else self.__pause.end)()
        self.__locks.release(has_ended_well=has_ended_well)
        save, self.__save = self.__save, None
        return UNHEARD if save is None else save.end()

    @contextmanager
    def __hook(self, phase: str) -> Iterator[None]:
        """Counts the time of a hook; an error in it ends the save."""
        begin, bound = time.perf_counter(), (self.options.save_timeout_s, "save_timeout_s")
        try:
            with or_at_most(*bound), self.__timeline().phase(phase):
                yield
        except BaseException as error:
            self.__timeline().fail(error)
            self.__release().failed(error)
            raise
        self.__hooks_s += time.perf_counter() - begin
