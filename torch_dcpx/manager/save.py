"""One `save` of a manager: the state to write, and the steps around its commit.

1. Each rank describes its call and encodes small values. The coordinator compares the calls and
   numbers the save.
2. `dcpx.save` or `async_save` of the parts calls their `state_dict` while the ranks plan.
3. Before the commit the coordinator removes leftovers of earlier jobs and notes the tag.
4. After it the coordinator points to the checkpoint and begins retention. Then the save is over.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._waiting import Deadline
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.pending import wait_for_callbacks
from torch_dcpx.checkpoint.same_call import Call
from torch_dcpx.checkpoint.save import async_save
from torch_dcpx.checkpoint.save import save as save_now
from torch_dcpx.errors import OptionError
from torch_dcpx.events import Operation, begun
from torch_dcpx.manager.cadence import Cadence
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.content import refuse_stateful_within
from torch_dcpx.manager.pointer import Tag, checked_step, step_of_name, tag_of
from torch_dcpx.manager.root import OF_TIMEOUT
from torch_dcpx.manager.schedulers import SCHEDULER_CLASSES, scheduler_classes
from torch_dcpx.manager.state import Parts, Small
from torch_dcpx.manager.stored import Record, told_step
from torch_dcpx.manager.translate import CLASSES, NAMED_GROUPS, by_name, classes_of, group_digest
from torch_dcpx.metadata.file import committed_save_id
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import told_to_next
from torch_dcpx.reports import SaveReport, saved_in_root_line
from torch_dcpx.storage.object_url import Location
from torch_dcpx.writer.writer import DcpxWriter

logger = logging.getLogger("torch_dcpx")


def _state_of(parts: Parts, small: Small, record: Record, rank: int) -> dict[str, Any]:
    """Returns the state that this rank gives to a save."""
    items: dict[str, Any] = {"manager": record.encoded()}
    if parts.optimizer is not None:
        items[CLASSES] = {name: classes_of(one) for name, one in by_name(parts.optimizer).items()}
    if parts.lr_scheduler is not None:
        items[SCHEDULER_CLASSES] = scheduler_classes(parts.lr_scheduler)
    if rank == 0:  # the same rank each time, of ranks that all have them
        items |= small.shared
    if small.own:
        items["rank"] = {str(rank): small.own}
    return {**parts.stateful(has_named_groups=NAMED_GROUPS in record.parts), "dcpx": items}


def _step_of(tag_or_step: Tag, step: SupportsIndex | None, default: int) -> int:
    """Returns the step of a save. Raises OptionError: this is no step, or there are two."""
    if step is None:
        named = step_of_name(tag_of(tag_or_step))
        return default if named is None else named
    step = checked_step(step)
    if type(tag_or_step) is not str and step_of_name(tag_of(tag_or_step)) != step:
        problem = "give one of them, or a name and its step"
        message = f"save step {tag_or_step} with step={step}: {problem}"
        raise OptionError(message, option="step", value=step)
    return step


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns metrics as floats. Raises OptionError: this is no dict of numbers by name."""
    found: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        _refuse_metric(metrics)
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            _refuse_metric(value)
        if isinstance(value, (str, bytes, bytearray)):  # float() reads texts, too
            _refuse_metric(value)
        if type(name) is not str:
            _refuse_metric(name)
        if not math.isnan(number):
            found[name] = number
    return found


def _refuse_metric(value: Any) -> None:
    wanted = "numbers by name (str), such as {'loss': 0.1}"
    raise OptionError(f"metrics must be {wanted}; got {value!r:.80}", option="metrics")


@dataclass(eq=False)
class Saves:
    """The saves of one manager. Not thread-safe, but for the end of a background save."""

    catalog: CheckpointCatalog
    is_async: bool
    cadence: Cadence
    last_step: int = 0
    last_save_s: float | None = None
    _handles: list[SaveHandle] = field(default_factory=list)

    def save(
        self, tag_or_step: Tag, parts: Parts, metrics: Any, step: SupportsIndex | None
    ) -> SaveHandle:
        catalog, retention = self.catalog, self.catalog.retention

        def local() -> tuple[Small, Call]:
            tag = tag_of(tag_or_step)
            catalog.root.files.check_tag(tag)
            parts.check()
            if not parts.given:
                raise OptionError(
                    f"save '{tag}': no part was given, so there is nothing to save; give model=, "
                    "state= or user_content=, for example",
                    option="model",
                )
            refuse_stateful_within(parts.state or {})
            number = _step_of(tag_or_step, step, self.last_step)
            small = parts.small()
            call = parts.call("save", small.per_rank, tag=tag, step=number, is_async=self.is_async)
            note = _checked_metrics(metrics), group_digest(parts.model, parts.optimizer)
            return small, replace(call, digests=small.digests, note=note)

        with self._begun(catalog.root.path), ExitStack() as undo:

            def reduce(calls: list[Call], _: Small) -> Record:
                tag = calls[0].arguments["tag"]
                retention.reserve(tag)
                undo.callback(retention.free, tag)
                retention.look_at_metrics(tag, calls[0].note[0])
                catalog.root.files.hold(OF_TIMEOUT * catalog.options.save_timeout_s)
                record = parts.record(calls, catalog.root.take_order())
                return record._replace(run=catalog.root.runs.run)

            with catalog.exchange("save", tag_or_step, catalog.options.save_timeout_s) as exchange:
                small, record = catalog.agree(exchange, "agree", local, reduce)
            undo.pop_all()  # the end of the save frees the tag
        return self._write(record, parts, small, exchange.rank)

    def _write(self, record: Record, parts: Parts, small: Small, rank: int) -> SaveHandle:
        catalog, path = self.catalog, self.catalog.root.path / record.tag
        timeout_s = catalog.options.save_timeout_s
        name = "async_save" if self.is_async else "save"
        call = CallId(name, last_component(path), is_target_compared=False, is_write=True)
        try:
            told = told_to_next(**catalog.ranks, timeout_s=timeout_s, what="save", call=call)
            with self._begun(path), told:
                self.note_step(record.step)
                state = _state_of(parts, small, record, rank)
                self._forget_ended()
                writer = _ManagedWriter(path, record, catalog)
            save: Any = async_save if self.is_async else save_now
            handle: SaveHandle = save(state, path, storage_writer=writer, **catalog.ranks)
        except BaseException:
            self._note_end(record.tag, None)
            raise
        self._handles.append(handle)
        handle.add_done_callback(lambda ended: self._note_end(record.tag, ended.report()))
        return handle

    def _begun(self, path: Location) -> Operation:
        """Returns what tells that a save failed before it was one of `dcpx`."""
        return begun("dcpx.async_save" if self.is_async else "dcpx.save", path)

    def note_step(self, step: int) -> None:
        """Notes the step of a save or resume: later saves count from it."""
        self.last_step = step
        self.cadence.note_saved(step)

    def _note_end(self, tag: str, report: SaveReport | None) -> None:
        self.catalog.retention.free(tag)
        if report is not None:
            self.last_save_s = report.total_s

    def _forget_ended(self) -> None:
        """Forgets saves that ended well, or whose error the caller has."""
        for handle in list(self._handles):  # a signal's handler may add one meanwhile
            if handle.done() and not handle.durable.has_uncollected_error:
                self._handles.remove(handle)

    def wait(self, timeout_s: float | None) -> None:
        failed: list[BaseException] = []
        for handle in self._handles:
            if not handle.done() or not handle.durable.is_collected:
                try:
                    handle.result(timeout_s)
                except Exception as error:  # noqa: BLE001 - raised below, or logged
                    failed.append(error)
        self._forget_ended()
        try:
            wait_for_callbacks(Deadline(math.inf if timeout_s is None else timeout_s))
        except TimeoutError as error:
            failed.append(error)
        try:
            self.catalog.retention.wait(timeout_s)
        except TimeoutError as error:
            if timeout_s is None:  # what was saved is committed
                logger.warning("%s: the next commit goes on with it", error)
            else:
                failed.append(error)
        for other in failed[1:]:
            logger.error("another save beneath '%s' failed: %s", self.catalog.root.path, other)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Waits, and gives the root back. Raises: as `wait`."""
        try:
            self.wait(None)
        finally:
            if all(handle.done() for handle in self._handles):  # else an interrupt has ended it
                self.catalog.root.files.lock.give_back()


class _ManagedWriter(DcpxWriter):
    """Writes one checkpoint of a manager; on the coordinator, `finish` also keeps the root."""

    dcpx_needs_one_root = True

    _DcpxWriter__log_level = logging.DEBUG  # the manager's own line says it

    def __init__(self, path: Location, record: Record, catalog: CheckpointCatalog) -> None:
        super().__init__(path, options=catalog.options)
        self.__record, self.__catalog = record, catalog
        self.__began = time.monotonic()
        # Refuses a link that comes behind the coordinator's look, too.
        vars(self)["_DcpxWriter__opened"] = catalog.root.files.open_own

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.__is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raises: as `DcpxWriter` and `begin_save` of the root's files."""
        plan = super().prepare_local_plan(plan)
        if self.__is_coordinator:
            self.__catalog.root.files.begin_save(self.__record.tag)
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, and points to the checkpoint. Raises: as `DcpxWriter` and `committing`."""
        root, retention = self.__catalog.root, self.__catalog.retention
        record, tag = self.__record, self.__record.tag
        with root.one_commit(f"save '{root.path / tag}'"):
            root.files.lock.check()  # before this removes anything, and before it commits
            retention.catch_up()
            files = [file for own in results for file in getattr(own, "files", ())]
            sizes = {file.path: file.nbytes for file in files}
            with root.committing(tag):
                retention.refuse_pinned(tag, "save")  # also since the save began
                root.files.check_save(tag, sizes, time.monotonic() - self.__began)
                root.files.lock.check()
                super().finish(metadata, results)
                root.files.end_save(tag)
                save_id = committed_save_id(root.path / tag)
                if save_id is not None:
                    root.note_committed(tag, record.step, save_id, record.order)
            seconds, what = time.monotonic() - self.__began, told_step(record.tag, record.step)
            nbytes, ranks = sum(sizes.values()), record.ranks
            logger.info(saved_in_root_line(what, root.given, ranks, nbytes, seconds))
            retention.start()
