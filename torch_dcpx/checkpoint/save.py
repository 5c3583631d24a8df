"""`save` and `async_save`, which do more than plug-in classes can.

All ranks agree through the store of their process group, with a deadline, and never by a
collective: a stopped rank holds the others no longer than that, and a save does not disturb the
collectives of a training that goes on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter

from torch_dcpx._answers import BOUND
from torch_dcpx._arguments import check_options, check_part, check_state
from torch_dcpx._gc import paused_gc_of_many
from torch_dcpx.checkpoint import pending as pending_saves
from torch_dcpx.checkpoint.background import BackgroundSave, report_of
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.save_items import ItemsInWaves, stage_items, staged_bytes
from torch_dcpx.checkpoint.save_plan import default_save_planner, forget_default_plans
from torch_dcpx.checkpoint.save_run import SaveRun, named
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.errors import (
    ConcurrentSaveError,
    OptionError,
    StagingError,
    UnsupportedError,
    must_be,
)
from torch_dcpx.events import Operation, begun
from torch_dcpx.options import WriteOptions
from torch_dcpx.planners.save_planner import DcpxSavePlanner
from torch_dcpx.ranks.call_id import CallId, last_component, path_name
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import StagePlan, stage_guarded, staging_workers
from torch_dcpx.storage.paths import AnyPath, checked_location, own_path
from torch_dcpx.writer.items import StagedItems, planned_bytes, split_items
from torch_dcpx.writer.writer import WAY_OUT, DcpxWriter

logger = logging.getLogger("torch_dcpx")

_PLANNER_HOOKS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
)
_NOTED_WAIT_S = 0.001  # a shorter wait is not logged


def save(
    state_dict: dict[str, Any],
    checkpoint_id: AnyPath | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: WriteOptions | None = None,
) -> SaveHandle:
    """Saves a checkpoint; it is committed, and durable on every rank, when this returns.

    Every rank of the group calls it. The checkpoint in `checkpoint_id` stays as it was until the
    commit. The call first waits for saves of this process that go on in the background.

    Args:
        state_dict: as for `torch.distributed.checkpoint.save`, with `Stateful` objects.
        checkpoint_id: directory of the checkpoint. Not needed with a `storage_writer`, which has
            a directory of its own.
        storage_writer: a DcpxWriter, of a subclass for example. Default None: a new one.
        planner: default None, a `DcpxSavePlanner`, which keeps its plans for states of the same
            names, shapes and placements.
        process_group: the ranks that save, of any backend. Default None: all ranks.
        no_dist: this process saves by itself. Default False.
        options: of the new writer. Default None: `WriteOptions()`.

    Returns:
        The finished save; its `result()` is the report.

    Raises:
        DcpxError: any rank failed; nothing was committed. All ranks raise the first error.
        RankLostError: a rank did not come within `options.save_timeout_s` seconds.
        OutcomeUnknownError: the coordinator was lost while it committed.
        UnsupportedError: a `storage_writer` that is no DcpxWriter.
        OptionError: an argument that cannot work, or two that contradict each other.
        DcpxError: of an earlier `async_save`, if nobody has read it from the handle.
    """
    begin = time.monotonic()
    call = _call("save", checkpoint_id, storage_writer)
    given = state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, options
    with (
        begun("dcpx.save", checkpoint_id, storage_writer) as operation,
        _begin(call, *given) as run,
    ):
        with run.timeline.phase("wait"):
            pending_saves.wait_for_room(1)
        run.exchange.restart()
        plan = run.plan(pending_saves.raise_uncollected)
        committed = run.write_and_settle(lambda: (plan, run.planner))
    report = report_of(run, committed, begin)
    operation.saved(report, report.write)
    return SaveHandle.finished(run.path, report)


def async_save(
    state_dict: dict[str, Any],
    checkpoint_id: AnyPath | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: WriteOptions | None = None,
) -> SaveHandle:
    """Saves a checkpoint in the background: returns as soon as `state_dict` may change.

    The ranks agree on the plan and copy their parts of the state before this returns; they write,
    vote and commit afterwards. The checkpoint holds the copies, whatever happens to the state. With
    `WriteOptions(overlap=True)` copies from devices go on afterwards, and `handle.guard` makes
    later work wait for them.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist: as `save`. A
            writer is in use until its save has ended.
        options: also `max_in_flight`, the most saves of this process at one time, and `on_busy`,
            which decides about one more. `host_memory_bytes`, if given, bounds the copy: a larger
            state is copied in waves while it is written, and the call returns later.

    Returns:
        The save. If nobody reads its error, the next save or `torch_dcpx.wait` raises it, or the
        end of the interpreter logs it.

    Raises:
        StagingError: not enough memory for the copy, a device failed, or a current stream is
            capturing a graph; on the other ranks the handle raises.
        ConcurrentSaveError: with `on_busy="error"`, `max_in_flight` saves are under way.
        As `save`: an error while the ranks plan, and an earlier save's error.
    """
    begin = time.monotonic()
    call = _call("async_save", checkpoint_id, storage_writer)
    given = state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, options
    with begun("dcpx.async_save", checkpoint_id, storage_writer) as operation:
        run = _begin(call, *given)
    before = BOUND.set(run.exchange.storage)
    try:
        return _started(run, begin, operation)
    finally:
        BOUND.reset(before)


def _started(run: SaveRun, begin: float, operation: Operation) -> SaveHandle:
    """Plans and copies with all ranks, and starts the thread. Args, Raises: as `async_save`."""
    handle = SaveHandle(run.path, run.cancel, run.leave)
    background: BackgroundSave | None = None
    try:
        with run.timeline.phase("wait"):
            is_admitted = _is_admitted(run)
        if not is_admitted:
            run.timeline.has_file = False
            run.end()
            return SaveHandle.finished(run.path, None)
        plan = run.plan(pending_saves.raise_uncollected)
        run.exchange.note_phase("staging")
        with run.timeline.phase("snapshot"):
            items = _items(run, plan, handle)
        run.planner = None  # lets go of the state that it holds
        background = BackgroundSave(run, plan, items, handle, begin, operation)
        background.start()
        background.wait_until_staged()
    except BaseException as error:  # Ctrl-C as well: the state may change from here on
        try:
            with contextlib.suppress(StagingError):
                handle.guard.finish()
        finally:
            if background is None or background.withdraw():
                run.end(error)
                operation.failed(error)
            else:
                handle.cancel()
        raise
    return handle


def prewarm(state_dict: dict[str, Any], *, options: WriteOptions | None = None) -> None:
    """Takes the memory that `async_save` of this state copies to, so that the first save has it.

    Args:
        state_dict: the state to save. Takes memory for this rank's part of it, and copies nothing.
        options: `host_memory_bytes` bounds the memory, as in `async_save`. Default None: no bound.

    Raises:
        StagingError: there is not so much memory.
        OptionError: an argument that cannot work.
    """
    check_state("prewarm", state_dict)
    check_options("options", options, WriteOptions)
    options = options or WriteOptions()
    planner = DcpxSavePlanner(enable_plan_caching=False)
    planner.set_up_planner(with_state_dicts(state_dict), is_coordinator=True)
    plan = planner.create_local_plan()
    window_bytes = _window_bytes(options)
    if window_bytes is not None and _staged_bytes(plan) > window_bytes:
        return  # waves take no arena
    tensors: list[Any] = [
        planner.resolve_data(item) for item in plan.items if item.type is not WriteItemType.BYTE_IO
    ]
    needs = StagePlan(tensors)
    process_pool().prewarm(
        needs.nbytes,
        budget_bytes=window_bytes,
        workers=staging_workers(),
        device=min(needs.devices, default=-1),
    )


def close() -> None:
    """Waits for saves under way, gives back the memory that they copied to, and drops the plans
    that saves without a planner have kept.

    Raises:
        DcpxError: of a save that failed, if nobody has read it from the handle.
    """
    try:
        pending_saves.wait()
    finally:
        forget_default_plans()
        process_pool().close()


def _call(name: str, checkpoint_id: AnyPath | None, writer: StorageWriter | None) -> CallId:
    target = last_component(checkpoint_id) or path_name(writer)
    return CallId(name, target, is_target_compared=False, is_write=True)


def _begin(
    call: CallId,
    state_dict: dict[str, Any],
    checkpoint_id: AnyPath | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    options: WriteOptions | None,
) -> SaveRun:
    """Begins a save with all ranks. From here on every rank learns of an error of any rank."""
    exchange = exchange_for(process_group, no_dist, WriteOptions.save_timeout_s, call=call)
    try:
        check_state(call.name, state_dict, checkpoint_id)
        check_part("planner", planner, SavePlanner, _PLANNER_HOOKS)
        check_options("options", options, WriteOptions)
        if checkpoint_id is not None:
            checked_location(checkpoint_id, WAY_OUT, "checkpoint_id")
        writer = _writer(storage_writer, checkpoint_id, options)
        exchange.restart(writer.options.save_timeout_s)
        if writer.options.node_local:
            exchange.leave_out_target()
        shared: dict[str, str] = {}
        if writer.options.durability != "full":
            shared["durability"] = writer.options.durability
        if call.name == "async_save":
            shared["on_busy"] = writer.options.on_busy
        exchange.agree_on(**shared)
        exchange.note_phase("planning")
        path = os.fsdecode(checkpoint_id) if checkpoint_id else own_path(writer.path)
        return SaveRun(state_dict, path, writer, planner or default_save_planner(), exchange)
    except BaseException as error:
        exchange.fail(error)
        exchange.close()
        raise


def _is_admitted(run: SaveRun) -> bool:
    """Waits for room, or decides with all ranks whether one more save may begin.
    Raises ConcurrentSaveError: it may not, and `on_busy` is "error".
    """
    options = run.writer.options
    limit = options.max_in_flight
    if options.on_busy == "wait":
        waited_s = pending_saves.wait_for_room(limit)
        run.exchange.restart()
        if waited_s >= _NOTED_WAIT_S:
            logger.info("async_save waited %.3f s for a save under way", waited_s)
        return True
    most: Callable[[list[int]], int] = max  # all ranks decide alike
    if run.exchange.all_reduce("admit", pending_saves.count, most) < limit:
        return True
    if options.on_busy == "error":
        raise ConcurrentSaveError(
            f"save to '{run.path}': max_in_flight={limit} saves are under way on some rank; "
            "wait for them, or use on_busy='wait'",
            errno=errno.EBUSY,
            path=run.path,
        )
    logger.info("skipped the save to '%s': %s under way on some rank", run.path, limit)
    return False


def _writer(
    writer: StorageWriter | None, checkpoint_id: AnyPath | None, options: WriteOptions | None
) -> DcpxWriter:
    if writer is None:
        if checkpoint_id:
            return DcpxWriter(checkpoint_id, options=options)
        wrong = "a path, or there must be a storage_writer, which has one"
        raise must_be("checkpoint_id", checkpoint_id, wrong)
    if not isinstance(writer, DcpxWriter):
        check_part("storage_writer", writer, StorageWriter, ("write_data", "finish"))
        raise UnsupportedError(
            f"storage_writer={type(writer).__name__}: torch_dcpx saves through a DcpxWriter; use "
            "torch.distributed.checkpoint.save for others"
        )
    if options is not None:
        wrong = "options and a storage_writer, which has options of its own; give one of them"
        raise OptionError(wrong, option="options", value=options)
    return writer


def _items(run: SaveRun, plan: SavePlan, handle: SaveHandle) -> StagedItems | ItemsInWaves:
    """Returns the data of the plan's items: copied now, or in waves if they exceed the budget.
    With `overlap` the copies have ended when the handle's guard is done.
    """
    options = run.writer.options
    window_bytes = _window_bytes(options)
    if window_bytes is not None and (needed_bytes := _staged_bytes(plan)) > window_bytes:
        logger.warning(
            "'%s': %s B do not fit host_memory_bytes=%s, so async_save copies them in waves and "
            "returns when the last one is copied",
            run.path,
            needed_bytes,
            options.host_memory_bytes,
        )
        files_per_rank = options.files_per_rank if run.writer.single_file_per_rank else None
        order = split_items(plan.items, files_per_rank).items
        return ItemsInWaves(order, run.planner, window_bytes)

    def stage(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        staged, handle.guard = stage_guarded(
            tensors,
            names=names,
            budget_bytes=window_bytes,
            timeout_s=options.save_timeout_s,
            overlap=options.overlap,
        )
        return staged

    has_extensions = bool(run.writer.transforms.extensions)
    with paused_gc_of_many():
        try:
            return stage_items(plan, run.planner, stage, is_transformed=has_extensions)
        except Exception as error:
            known = named(error)
            if known is error:
                raise
            raise known from error


def _staged_bytes(plan: SavePlan) -> int:
    """Returns how many bytes an arena of the plan's tensors takes at most."""
    return sum(staged_bytes(planned_bytes(item)) for item in plan.items)


def _window_bytes(options: WriteOptions) -> int | None:
    """Returns how many bytes of copies may exist at one time: the budget less the slots."""
    if options.host_memory_bytes is None:
        return None
    slots_bytes = options.resolved_workers() * options.slot_bytes
    return max(options.host_memory_bytes - slots_bytes, options.slot_bytes)
