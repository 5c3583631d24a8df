"""One `save` of a manager: the state to write, and the steps around its commit.

1. Each rank describes its call, and encodes small values. The coordinator compares, and gives
   the save its number.
2. `dcpx.save` or `async_save` of the parts calls their `state_dict` while the ranks plan.
3. Coordinator, before the commit: leftovers of earlier jobs go; the pointer notes the tag.
4. Coordinator, after it: the pointer names the checkpoint; retention begins. Then the save is over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.same_call import Call
from torch_dcpx.checkpoint.save import async_save as save_in_background
from torch_dcpx.checkpoint.save import save as save_now
from torch_dcpx.errors import OptionError, StorageError
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.content import PerRank, encode_content, split_content
from torch_dcpx.manager.optimizer_part import OptimizerPart
from torch_dcpx.manager.pointer import check_step, step_of_name, tag_of
from torch_dcpx.manager.state import (
    ModelPart,
    StatePart,
    by_name,
    check_parts,
    flat,
    kind_of,
    states_of,
)
from torch_dcpx.manager.stored import OwnDirectory, Record
from torch_dcpx.manager.translate import (
    CLASSES,
    NAMED_GROUPS,
    TrainingRules,
    classes_of,
    digest_of_groups,
)
from torch_dcpx.metadata.file import committed_save_id
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import told_to_next
from torch_dcpx.reports import SaveReport
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
        """Raises OptionError for a part of the wrong type."""
        check_parts(self.model, self.optimizer, self.lr_scheduler, self.dataloader, self.state)

    @property
    def per_rank(self) -> dict[str, PerRank]:
        """The values of the state that are each rank's own, by path."""
        state = self.state or {}
        return {f"state.{key}": value for key, value in state.items() if type(value) is PerRank}

    @property
    def given(self) -> dict[str, str]:
        """The sort of each given part, by name."""
        return {
            name: kind_of(part) if name in ("optimizer", "lr_scheduler") else "one"
            for name, part in self._asdict().items()
            if part is not None
        }

    def stateful(
        self,
        *,
        strict: bool = True,
        has_named_groups: bool,
        rules: TrainingRules | None = None,
    ) -> dict[str, Any]:
        """Returns model, optimizer and state for a save or load, as `Stateful` objects."""
        found: dict[str, Any] = {}
        if self.model is not None:
            found["model"] = ModelPart(self.model, strict=strict)
        if self.optimizer is not None:
            found["optimizer"] = OptimizerPart(
                self.model,
                self.optimizer,
                strict=strict,
                has_named_groups=has_named_groups,
                rules=rules,
            )
        if self.state is not None:
            found["state"] = StatePart(self.state)
        return found

    def small(self) -> Small:
        """Returns byte items, encoded: their objects may change. Raises: as `split_content`."""
        values: dict[str, Any] = {}
        if self.lr_scheduler is not None:
            values["lr_scheduler"] = states_of(self.lr_scheduler)
        if self.user_content is not None:
            values["user_content"] = self.user_content
        if self.dataloader is not None:
            values["dataloader"] = PerRank(self.dataloader.state_dict())
        own: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for path, value in (values | self.per_rank).items():
            rest, its_own = split_content(value, path)
            own |= its_own
            if path in ("lr_scheduler", "user_content"):
                shared[path] = rest
        encoded = {name: encode_content(value) for name, value in shared.items()}
        own_bytes = encode_content(own) if own else b""
        return Small(encoded, own_bytes, sorted(own), digests_of(shared))

    def call(self, name: str, per_rank: list[str], **arguments: Any) -> Call:
        """Returns a call as all ranks compare it."""
        return Call(name, {**arguments, **self.given, "per_rank": per_rank})

    def record(self, calls: list[Call], order: int) -> Record:
        """Returns the record of a save; all ranks' calls note their metrics and groups."""
        tag, step, per_rank = (calls[0].arguments[name] for name in ("tag", "step", "per_rank"))
        names = sorted(self.given)
        if len({call.note[1] for call in calls}) > 1:
            names.append(NAMED_GROUPS)
        metrics = calls[0].note[0]
        return Record(tag, step, order, len(calls), metrics, tuple(names), tuple(per_rank))


class Small(NamedTuple):
    """The values of one rank's byte items."""

    shared: dict[str, bytes]  # by part
    own: bytes  # this rank's own, b"" if there is nothing
    per_rank: list[str]  # their paths
    digests: dict[str, bytes]


def _state_of(parts: Parts, small: Small, record: Record, rank: int) -> dict[str, Any]:
    """Returns the state that this rank gives to a save."""
    items: dict[str, Any] = {"manager": record.encoded()}
    if parts.optimizer is not None:
        named = by_name(parts.optimizer)
        items[CLASSES] = {name: classes_of(flat(one)) for name, one in named.items()}
    if rank == 0:  # the same rank each time, of ranks that all have them
        items |= small.shared
    if small.own:
        items["rank"] = {str(rank): small.own}
    return {**parts.stateful(has_named_groups=NAMED_GROUPS in record.parts), "dcpx": items}


def _step_of(tag_or_step: str | int, step: int | None) -> int | None:
    """Returns the step of a save, None if it has none. Raises OptionError: no step, or two."""
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
    """Returns metrics as floats. Raises OptionError: this is no dict of numbers by name."""
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


@dataclass(eq=False)
class Saves:
    """The saves of one manager. Not thread-safe, but for the end of a background save."""

    catalog: CheckpointCatalog
    is_async: bool
    last_step: int = 0
    last_save_s: float | None = None
    _handles: list[SaveHandle] = field(default_factory=list)

    def save(
        self, tag_or_step: str | int, parts: Parts, metrics: Any, step: int | None
    ) -> SaveHandle | SaveReport:
        """Does `CheckpointManager.save`."""
        catalog, retention = self.catalog, self.catalog.retention

        def local() -> tuple[Small, Call]:
            tag = tag_of(tag_or_step)
            parts.check()
            number = _step_of(tag_or_step, step)
            number = self.last_step if number is None else number
            small = parts.small()
            call = parts.call("save", small.per_rank, tag=tag, step=number, is_async=self.is_async)
            found, one = _checked_metrics(metrics), parts.optimizer
            groups = b"" if one is None else digest_of_groups(parts.model, flat(one))
            return small, replace(call, digests=small.digests, note=(found, groups))

        with ExitStack() as undo:

            def reduce(calls: list[Call], _: Small) -> Record:
                tag = calls[0].arguments["tag"]
                retention.reserve(tag)
                undo.callback(retention.free, tag)
                return parts.record(calls, catalog.root.take_order())

            timeout_s = catalog.options.save_timeout_s
            with catalog.exchange("save", tag_or_step, timeout_s) as exchange:
                small, record = catalog.agree(exchange, "agree", local, reduce)
            undo.pop_all()  # the end of the save frees the tag
        return self._write(record, parts, small, exchange.rank)

    def _write(
        self, record: Record, parts: Parts, small: Small, rank: int
    ) -> SaveHandle | SaveReport:
        catalog, path = self.catalog, self.catalog.root.path / record.tag
        timeout_s = catalog.options.save_timeout_s
        name = "async_save" if self.is_async else "save"
        call = CallId(name, last_component(path), is_target_compared=False, is_write=True)
        try:
            with told_to_next(**catalog.ranks, timeout_s=timeout_s, what="save", call=call):
                self.last_step = record.step
                state = _state_of(parts, small, record, rank)
                self._forget_ended()
                writer = _ManagedWriter(path, record, catalog)
            save: Any = save_in_background if self.is_async else save_now
            saved: SaveHandle | SaveReport = save(
                state, path, storage_writer=writer, **catalog.ranks
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
        self.catalog.retention.free(tag)
        if report is not None:
            self.last_save_s = report.total_s

    def _forget_ended(self) -> None:
        """Forgets saves that ended well, or whose error the caller has."""
        self._handles = [
            handle
            for handle in self._handles
            if not handle.done() or (handle.report() is None and not handle.durable.is_collected)
        ]

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
        self.catalog.retention.wait()
        for other in failed[1:]:
            logger.error("another save beneath '%s' failed: %s", self.catalog.root.path, other)
        if failed:
            raise failed[0]


class _ManagedWriter(DcpxWriter):
    """Writes one checkpoint of a manager; on the coordinator, `finish` also keeps the root."""

    # Refuses a link that comes behind the coordinator's look, too.
    _DcpxWriter__opened = OwnDirectory

    def __init__(self, path: Path, record: Record, catalog: CheckpointCatalog) -> None:
        super().__init__(path, options=catalog.options)
        self.__record = record
        self.__root = catalog.root
        self.__retention = catalog.retention

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, and points to the checkpoint. Raises: as `DcpxWriter`, also of the pointer."""
        root, record, path = self.__root, self.__record, Path(self.path)
        with root.commit_guard:
            self.__retention.catch_up()
            self.__retention.refuse_pinned(path.name, "save")  # also since the save began
            with root.committing(path.name):
                super().finish(metadata, results)
                try:
                    make_readers_file(path)
                except StorageError as error:
                    logger.warning("'%s': its readers have no lock: %s", path, error)
                save_id = committed_save_id(path)
                if save_id is not None:
                    root.note_committed(path.name, record.step, save_id, record.order)
            self.__retention.start()
