"""One `save` of a manager: what is written, and what happens around its commit.

1. Each rank says what it was given, and encodes what is small. The coordinator compares, and gives
   the save its number.
2. `dcpx.save` or `async_save` of the parts; their `state_dict` is asked while the ranks plan.
3. Coordinator, before the commit: what earlier jobs left to remove goes; the pointer notes the tag.
4. Coordinator, after it: the pointer names the checkpoint; retention begins. Then the save is over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx.checkpoint.call_agreement import Call
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.save import async_save as save_in_background
from torch_dcpx.checkpoint.save import save as save_now
from torch_dcpx.errors import OptionError, StorageError
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.content import PerRank, encode_content, split_content
from torch_dcpx.manager.optimizer_part import OptimizerPart, by_name
from torch_dcpx.manager.pointer import check_step, step_of_name, tag_of
from torch_dcpx.manager.retention import Retention
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.state import (
    ModelPart,
    StatePart,
    check_parts,
    flat,
    kind_of,
    states_of,
)
from torch_dcpx.manager.stored import OwnDirectory, Record
from torch_dcpx.manager.translate import CLASSES, NAMED_GROUPS, classes_of, digest_of_groups
from torch_dcpx.metadata.committed import committed_save_id
from torch_dcpx.options import WriteOptions
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import told_to_next
from torch_dcpx.save_report import SaveReport
from torch_dcpx.storage.reader_lock import make_readers_file
from torch_dcpx.tensors.digests import digests_of
from torch_dcpx.writer.writer import DcpxWriter

logger = logging.getLogger("torch_dcpx")


class Parts(NamedTuple):
    """The parts that `save` or `resume` was given."""

    model: Any = None
    optimizer: Any = None
    lr_scheduler: Any = None
    dataloader: Any = None
    state: Any = None
    user_content: Any = None

    def check(self) -> None:
        """Raises OptionError for parts that are not what they are given as."""
        check_parts(self.model, self.optimizer, self.lr_scheduler, self.dataloader, self.state)

    @property
    def given(self) -> dict[str, str]:
        """The sort of each given part, by name."""
        return {
            name: kind_of(part) if name in ("optimizer", "lr_scheduler") else "one"
            for name, part in self._asdict().items()
            if part is not None
        }

    def small(self) -> Small:
        """Returns the values of byte items, encoded: their objects may change afterwards.

        Raises:
            UnsupportedError: something that would not load again without execution.
        """
        own: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        if self.lr_scheduler is not None:
            states = states_of(self.lr_scheduler)
            shared["lr_scheduler"], found = split_content(states, "lr_scheduler")
            own |= found
        if self.user_content is not None:
            shared["user_content"], found = split_content(self.user_content, "user_content")
            own |= found
        if self.dataloader is not None:
            state = PerRank(self.dataloader.state_dict())
            own |= split_content(state, "dataloader")[1]
        for key, value in (self.state or {}).items():
            if type(value) is PerRank:
                own |= split_content(value, f"state.{key}")[1]
        digests = digests_of(shared)
        encoded = {name: encode_content(value) for name, value in shared.items()}
        return Small(encoded, encode_content(own) if own else b"", sorted(own), digests)

    def groups(self) -> bytes:
        """Returns a digest that tells this rank's groups of optimizers from other ranks'."""
        none = self.optimizer is None
        return b"" if none else digest_of_groups(self.model, flat(self.optimizer))

    def call(self, name: str, small: Small | None, **arguments: Any) -> Call:
        """Returns a call as all ranks compare it."""
        kinds = self.given
        names = [k for k, v in (self.state or {}).items() if type(v) is PerRank]
        per_rank = sorted(f"state.{k}" for k in names) if small is None else small.per_rank
        digests = {} if small is None else small.digests
        return Call(name, {**arguments, **kinds, "per_rank": per_rank}, digests)

    def record(self, calls: list[Call], order: int) -> Record:
        """Returns the record that a save keeps beside its parts.

        Args:
            calls: of all ranks, the same; each notes its metrics and its groups.
            order: number of the commit.
        """
        arguments, metrics = calls[0].arguments, calls[0].note[0]
        names = sorted(self.given)
        if len({call.note[1] for call in calls}) > 1:
            names.append(NAMED_GROUPS)
        return Record(
            arguments["tag"], arguments["step"], order, len(calls), metrics, tuple(names),
            tuple(arguments["per_rank"]),
        )  # fmt: skip


class Small(NamedTuple):
    """The values of one rank's byte items."""

    shared: dict[str, bytes]  # by part
    own: bytes  # this rank's own, b"" if there is nothing
    per_rank: list[str]  # their paths
    digests: dict[str, bytes]


def _state_of(parts: Parts, small: Small, record: Record, rank: int) -> dict[str, Any]:
    """Returns the state that this rank gives to a save."""
    state: dict[str, Any] = {}
    if parts.model is not None:
        state["model"] = ModelPart(parts.model)
    if parts.optimizer is not None:
        state["optimizer"] = OptimizerPart(
            parts.model, parts.optimizer, has_named_groups=NAMED_GROUPS in record.parts
        )
    if parts.state is not None:
        state["state"] = StatePart(parts.state)
    items: dict[str, Any] = {"manager": record.encoded()}
    if parts.optimizer is not None:
        named = by_name(parts.optimizer)
        items[CLASSES] = {name: classes_of(flat(one)) for name, one in named.items()}
    if rank == 0:  # one of them is kept: the same one each time
        items |= small.shared
    if small.own:
        items["rank"] = {str(rank): small.own}
    state["dcpx"] = items
    return state


def _step_of(tag_or_step: str | int, step: int | None) -> int | None:
    """Returns the step of a save; None where neither of its arguments says one.

    Raises:
        OptionError: what is no step, or two different ones.
    """
    if step is not None:
        check_step(step)
        if type(tag_or_step) is int and step != tag_or_step:
            raise OptionError(
                f"save step {tag_or_step} with step={step}: give one of them, or a name and its "
                "step",
                option="step",
                value=step,
            )
    number = tag_or_step if type(tag_or_step) is int else step
    return step_of_name(tag_of(tag_or_step)) if number is None else number


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns metrics as floats. Raises OptionError: what is no dict of numbers by name."""
    found: dict[str, float] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        _refuse_metric(metrics)
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            _refuse_metric(value)
        if type(name) is not str:
            _refuse_metric(name)
        if not math.isnan(number):
            found[name] = number
    return found


def _refuse_metric(value: Any) -> None:
    raise OptionError(
        f"metrics must be numbers by name (str), such as {{'loss': 0.1}}; got {value!r:.80}",
        option="metrics",
        value=None,
    )


class Saves:
    """The saves of one manager: those under way, and what the next one takes from the last.

    Not thread-safe, but for the end of a background save.
    """

    def __init__(self, catalog: CheckpointCatalog, *, is_async: bool) -> None:
        self._catalog = catalog
        self._is_async = is_async
        self._handles: list[SaveHandle] = []
        self.last_step = 0
        self.last_save_s: float | None = None

    def save(
        self, tag_or_step: str | int, parts: Parts, metrics: Any, step: int | None
    ) -> SaveHandle | SaveReport:
        """Does `CheckpointManager.save`."""
        catalog, retention = self._catalog, self._catalog.retention

        def local() -> tuple[Small, Call]:
            tag = tag_of(tag_or_step)
            parts.check()
            number = _step_of(tag_or_step, step)
            number = self.last_step if number is None else number
            small = parts.small()
            call = parts.call("save", small, tag=tag, step=number, is_async=self._is_async)
            return small, replace(call, note=(_checked_metrics(metrics), parts.groups()))

        with ExitStack() as undo:

            def reduce(calls: list[Call], _: Small) -> Record:
                tag = calls[0].arguments["tag"]
                retention.reserve(tag)
                undo.callback(retention.free, tag)
                return parts.record(calls, catalog.root.take_order())

            timeout_s = catalog.options.save_timeout_s
            with catalog.exchange("save", tag_or_step, timeout_s) as exchange:
                rank = exchange.rank
                small, record = catalog.agree(exchange, "agree", local, reduce)
            undo.pop_all()  # what was reserved is free when the save has ended
        return self._write(record, parts, small, rank)

    def _write(
        self, record: Record, parts: Parts, small: Small, rank: int
    ) -> SaveHandle | SaveReport:
        catalog, options = self._catalog, self._catalog.options
        path, group, no_dist = catalog.root.path / record.tag, catalog.group, catalog.no_dist
        name = "async_save" if self._is_async else "save"
        call = CallId(name, last_component(path), is_target_compared=False, is_write=True)
        try:
            with told_to_next(group, no_dist, options.save_timeout_s, "save", call):
                self.last_step = record.step
                state = _state_of(parts, small, record, rank)
                self._forget_ended()
                writer = _ManagedWriter(path, options, record, catalog.root, catalog.retention)
            save: Any = save_in_background if self._is_async else save_now
            saved: SaveHandle | SaveReport = save(
                state, path, storage_writer=writer, process_group=group, no_dist=no_dist
            )
        except BaseException:
            self._note_end(record.tag, None)
            raise
        if isinstance(saved, SaveReport):
            self._note_end(record.tag, saved)
        else:
            handle = saved
            self._handles.append(handle)
            handle.durable.add_done_callback(lambda _: self._note_end(record.tag, handle.report()))
        return saved

    def _note_end(self, tag: str, report: SaveReport | None) -> None:
        self._catalog.retention.free(tag)
        if report is not None:
            self.last_save_s = report.total_s

    def _forget_ended(self) -> None:
        """Forgets saves that ended well, or whose error the caller has."""
        self._handles = [
            h for h in self._handles
            if not h.done() or (h.report() is None and not h.durable.is_collected)
        ]  # fmt: skip

    def wait(self, timeout_s: float | None) -> None:
        """Does `CheckpointManager.wait`."""
        failed: list[BaseException] = []
        for handle in self._handles:
            if not handle.done() or not handle.durable.is_collected:
                try:
                    handle.result(timeout_s)
                except Exception as error:  # noqa: BLE001 - raised below, or logged
                    failed.append(error)
        self._forget_ended()
        self._catalog.retention.wait()
        for other in failed[1:]:
            logger.error("another save beneath '%s' failed: %s", self._catalog.root.path, other)
        if failed:
            raise failed[0]


class _ManagedWriter(DcpxWriter):
    """Writes one checkpoint of a manager; on the coordinator, `finish` also keeps the root."""

    # A link that comes behind the coordinator's look is refused, too.
    _DcpxWriter__opened = OwnDirectory

    def __init__(
        self,
        path: Path,
        options: WriteOptions | None,
        record: Record,
        root: ManagerRoot,
        retention: Retention,
    ) -> None:
        super().__init__(path, options=options)
        self.__record = record
        self.__root = root
        self.__retention = retention

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, and points to what was committed.

        Raises:
            StorageError: as `DcpxWriter`, or the pointer could not be written: nothing was
                published.
        """
        root, record = self.__root, self.__record
        tag = Path(self.path).name
        with root.commit_guard:
            self.__retention.catch_up()
            with root.committing(tag):
                super().finish(metadata, results)
                self.__note(tag, record)
            self.__retention.start()

    def __note(self, tag: str, record: Record) -> None:
        path = Path(self.path)
        try:
            make_readers_file(path)
        except StorageError as error:
            logger.warning("'%s': its readers have no lock: %s", path, error)
        save_id = committed_save_id(path)
        if save_id is not None:
            self.__root.note_committed(tag, record.step, save_id, record.order)
