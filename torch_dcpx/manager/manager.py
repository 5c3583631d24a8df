"""CheckpointManager: what a training job calls. Steps, the newest checkpoint, what is kept.

Every rank makes every call, in one order. What ranks must agree on goes through the process group's
store; what lies in the root is looked at, and changed, by the coordinator alone (rank 0).
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch_dcpx.checkpoint.call_agreement import Call, check_same_call, told_rules
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.load import load
from torch_dcpx.checkpoint.save import async_save as save_in_background
from torch_dcpx.checkpoint.save import save as save_now
from torch_dcpx.keys.rules import KeyRules
from torch_dcpx.manager.content import Merge, checked_merge
from torch_dcpx.manager.manager_export import ExportingCatalog
from torch_dcpx.manager.pointer import tag_of
from torch_dcpx.manager.preemption import Preemption
from torch_dcpx.manager.resume import Attempts
from torch_dcpx.manager.retention import KeepRules
from torch_dcpx.manager.save import (
    ManagedWriter,
    Parts,
    Small,
    checked_metrics,
    state_of,
    step_of,
)
from torch_dcpx.manager.stored import Record
from torch_dcpx.manager.translate import checked_translate
from torch_dcpx.manager.wanted import Chosen, ResumeInfo, Wanted
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import keys_for, told_to_next
from torch_dcpx.save_report import SaveReport
from torch_dcpx.storage.paths import AnyPath

logger = logging.getLogger("torch_dcpx")


class CheckpointManager(ExportingCatalog):
    """The checkpoints of one training, each in a directory beneath one root.

    As a context manager, the end of the block waits for what is under way, also when an exception
    leaves it, which is raised then. Not thread-safe; belongs to one process.
    """

    def __init__(
        self,
        root: AnyPath,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        async_save: bool = True,
        process_group: Any = None,
        no_dist: bool = False,
        options: WriteOptions | None = None,
        read_options: ReadOptions | None = None,
        allow_fresh: bool = False,
    ) -> None:
        """Touches nothing yet.

        Args:
            root: directory of the checkpoints; made by the first save. One job at a time.
            keep_last: how many of the last commits are kept. Default None.
            keep_every: checkpoints whose step is a multiple of this are kept. Default None.
            keep_best: (metric, "min" or "max", how many) by `save(metrics=)`. Default None. With
                all three None everything is kept; else what any of them keeps, what is pinned, and
                always the last commit.
            async_save: whether `save` returns before the checkpoint is written. Default True.
            process_group: the ranks of the training. Default None: all.
            no_dist: this process by itself. Default False.
            options: of the writer. Default None: `WriteOptions()`.
            read_options: of readers. Default None: `ReadOptions()`.
            allow_fresh: whether a root that holds something, but no whole checkpoint, is a fresh
                start and no error. Default False.

        Raises:
            OptionError: values that cannot work.
            UnsupportedError: a URL as root.
        """
        super().__init__(
            root,
            KeepRules.of(keep_last, keep_every, keep_best),
            process_group,
            no_dist,
            options or WriteOptions(),
            read_options or ReadOptions(),
        )
        self._is_async = async_save
        self._allow_fresh = allow_fresh
        self._handles: list[SaveHandle] = []
        self._watches: list[Preemption] = []
        self._last_step = 0
        self._last_save_s: float | None = None

    # ---- Saving --------------------------------------------------------------------------------

    def save(
        self,
        tag_or_step: str | int,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        state: dict[str, Any] | None = None,
        user_content: Any = None,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> SaveHandle | SaveReport:
        """Saves a checkpoint.

        Args:
            tag_or_step: the step, saved as "step-N", or a name for the directory. What lies under
                that name is replaced by the commit.
            model: a module; plain, DDP, FSDP2, compiled.
            optimizer: of that model; or a list or a dict of several.
            lr_scheduler: one, or a list or dict of several.
            dataloader: anything with `state_dict` and `load_state_dict`; each rank's own.
            state: more tensors, sharded ones too, Python values and `Stateful` objects, by name.
            user_content: small values (docs/manager.md has the types); rank 0's but for `PerRank`.
            metrics: numbers by name, for `keep_best`; rank 0's.
            step: of a tag that is no step. Default: that of "step-N", else of the last save.

        Returns:
            With `async_save` a SaveHandle: everything may change. Else the report of a checkpoint
            that is there.

        Raises:
            PlanError: ranks made different calls; nothing was written.
            OptionError: a tag or part that cannot work.
            UnsupportedError: small values that could not be loaded without execution; or a link
                lies under the tag's name. Nothing was changed.
            As `dcpx.save` and `dcpx.async_save`, whose earlier errors too.
        """
        parts = Parts(model, optimizer, lr_scheduler, dataloader, state, user_content)
        small: list[Small] = []
        reserved: list[str] = []  # by the coordinator

        def local() -> Call:
            self._check_usable()
            tag = tag_of(tag_or_step)
            parts.check()
            number = step_of(tag_or_step, step)
            number = self._last_step if number is None else number
            small.append(parts.small())
            call = parts.call("save", small[0], tag=tag, step=number, is_async=self._is_async)
            note = checked_metrics(metrics), parts.groups()
            return Call(call.name, call.arguments, call.digests, note)

        def reduce(calls: list[Call]) -> Record:
            tag = check_same_call(calls).arguments["tag"]
            self._retention.reserve(tag)
            reserved.append(tag)
            return parts.record(calls, self._root.take_order())

        try:
            with self._exchange("save", tag_or_step, self._options.save_timeout_s) as exchange:
                rank = exchange.rank
                record = exchange.all_reduce("agree", local, reduce)
        except BaseException:
            for tag in reserved:
                self._retention.free(tag)
            raise
        return self._write(record, lambda: state_of(parts, small[0], record, rank))

    def _write(
        self, record: Record, make_state: Callable[[], dict[str, Any]]
    ) -> SaveHandle | SaveReport:
        path, group, no_dist = self.root / record.tag, self._group, self._no_dist
        name = "async_save" if self._is_async else "save"
        call = CallId(name, last_component(path), is_target_compared=False, is_write=True)
        try:
            with told_to_next(group, no_dist, self._options.save_timeout_s, "save", call):
                self._last_step = record.step
                state = make_state()
                self._collect()
                writer = ManagedWriter(path, self._options, record, self._root, self._retention)
            if not self._is_async:
                report = save_now(
                    state, path, storage_writer=writer, process_group=group, no_dist=no_dist
                )
                self._note_end(record.tag, report)
                return report
            handle = save_in_background(
                state, path, storage_writer=writer, process_group=group, no_dist=no_dist
            )
        except BaseException:
            self._note_end(record.tag, None)
            raise
        self._handles.append(handle)
        handle.durable.add_done_callback(lambda _: self._note_end(record.tag, handle.report()))
        return handle

    def _note_end(self, tag: str, report: SaveReport | None) -> None:
        self._retention.free(tag)
        if report is not None:
            self._last_save_s = report.total_s

    def _collect(self) -> None:
        """Forgets saves that have ended and whose error somebody has, or who had none."""
        self._handles = [
            h for h in self._handles
            if not h.done() or (h.report() is None and not h.durable.is_collected)
        ]  # fmt: skip

    # ---- Resuming ------------------------------------------------------------------------------

    def resume(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        state: dict[str, Any] | None = None,
        tag: str | int | None = None,
        strict: bool = True,
        load_optimizer: bool = True,
        merge: Merge = None,
        translate: KeyRules | Callable[[str], str | None] | None = None,
        fallback: bool = True,
    ) -> ResumeInfo:
        """Loads the newest checkpoint that is whole, on any number of ranks.

        Args:
            model, optimizer, lr_scheduler, dataloader, state: as they were given to `save`, or
                fewer of them; filled in place.
            tag: which checkpoint; a link to one will do. Default None: the newest.
            strict: whether what the checkpoint does not hold is an error. Default True.
            load_optimizer: with False, optimizer and scheduler stay as they are. Default True.
            merge: for what each rank had of its own, where there are more or fewer ranks now:
                function(values_by_rank, rank, world_size), or one a name ("dataloader",
                "user_content.rng"). Default None: an error.
            translate: a KeyMap, or a function of one name, from stored names of the model (without
                "model.") to the model's; optimizers' states follow their parameters. Default None.
            fallback: whether the commit before takes a damaged newest one's place. Default True.

        Returns:
            What was resumed. A fresh start has no tag: the root is missing or empty, or holds
            nothing whole and `allow_fresh` says so.

        Raises:
            NotCommittedError: nothing whole is there, or not the tag.
            MismatchError: what was asked for was not saved; nothing was changed. Or parameters that
                are one group now were saved with different settings, or were in no optimizer that
                was saved, which is seen behind the read.
            RankError: what is the caller's (`merge`, a `load_state_dict`) raised on a rank: on all.
            PlanError: ranks made different calls, or `translate` does not fit what is stored.
            CorruptionError: what is there is damaged, or what was to take its place does not fit.
            UnsupportedError: `translate` splits, merges or transposes a tensor of which the
                optimizer is to be loaded.
            As `dcpx.load`.
        """
        if not load_optimizer:
            optimizer = lr_scheduler = None
        parts = Parts(model, optimizer, lr_scheduler, dataloader, state)
        attempts = Attempts(self._root, tag, fallback)
        return attempts.until_read(lambda: self._attempt(parts, attempts, strict, merge, translate))

    def _attempt(
        self, parts: Parts, attempts: Attempts, strict: bool, merge: Merge, translate: Any
    ) -> ResumeInfo | None:
        """Resumes from one checkpoint; None: it is damaged, and older ones may be tried."""
        key_maps: list[KeyRules | None] = []
        with ExitStack() as stack:

            def local() -> Call:
                self._check_usable()
                parts.check()
                key_maps.append(checked_translate(translate, parts.model))
                named = None if attempts.tag is None else tag_of(attempts.tag)
                return parts.call(
                    "resume", None, tag=named, strict=strict, merge=checked_merge(merge),
                    translate=told_rules(key_maps[0]), **attempts.told,
                )  # fmt: skip

            def reduce(calls: list[Call]) -> Chosen:
                tag = check_same_call(calls).arguments["tag"]
                attempts.tell_damaged()
                return self._choose(tag, stack, attempts, allow_fresh=self._allow_fresh)

            with self._exchange("resume", attempts.tag) as exchange:
                rank, world_size = exchange.rank, exchange.world_size
                chosen = exchange.all_reduce("choose", local, reduce)
            if attempts.is_fresh(chosen):
                return ResumeInfo(skipped=chosen.skipped)
            group, no_dist, options = self._group, self._no_dist, self._read_options
            call = CallId("load", last_component(chosen.path))
            with told_to_next(group, no_dist, options.load_timeout_s, "load", call):
                wanted = Wanted(
                    parts, chosen, rank, world_size, strict=strict, merge=merge,
                    translate=key_maps[0], options=options,
                )  # fmt: skip
                target = wanted.target()
            try:
                report = load(
                    target, chosen.path, process_group=group, no_dist=no_dist, options=options,
                    strict=strict, key_map=wanted.rules,
                )  # fmt: skip
            except BaseException as error:
                if attempts.passes_over(chosen, error, logs=rank == 0):
                    return None
                raise
            if attempts.passed_over and not strict:
                attempts.check_filled(report.missing, wanted, self._exchange("resume"))
        self._last_step = chosen.step or 0
        return attempts.resumed(chosen, wanted.content, report)

    # ---- The end, and what may bring it --------------------------------------------------------

    def save_on_signal(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        time_left_s: float | None = None,
    ) -> Preemption:
        """Takes over signals that announce the end of the job; ask `.requested(step)` each step.

        Args:
            signals: whose handlers are replaced, until `close`.
            time_left_s: seconds from the signal until the job is ended. Default None: unknown. A
                save that would take longer, as the last one took, is not asked for.

        Raises:
            OptionError: not on the main thread; no signals, or one that cannot be handled.
            PlanError: ranks made different calls.
        """
        name = self._on_coordinator("save_on_signal", None, lambda _: f"signals/{uuid.uuid4().hex}")
        keys, rank, world_size = keys_for(self._group, self._no_dist, "save on a signal", name)
        watch = Preemption(
            keys, rank, world_size, timeout_s=self._options.save_timeout_s,
            time_left_s=time_left_s, last_save_s=lambda: self._last_save_s,
        )  # fmt: skip
        watch.watch(signals)
        self._watches.append(watch)
        return watch

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the saves of this manager, and for the removal of what is not kept.

        Args:
            timeout_s: seconds for each save. Default None: as long as they may take.

        Raises:
            DcpxError: what failed and nobody had asked for; of several the first, others logged.
            TimeoutError: a save is still under way.
        """
        failed: list[BaseException] = []
        for handle in self._handles:
            if not handle.done() or not handle.durable.is_collected:
                try:
                    handle.result(timeout_s)
                except Exception as error:  # noqa: BLE001 - raised below, or logged
                    failed.append(error)
        self._collect()
        self._retention.wait()
        for other in failed[1:]:
            logger.error("another save beneath '%s' failed: %s", self.root, other)
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Waits as `wait` does, and puts signals' handlers back; safe to call twice."""
        if os.getpid() != self._pid:
            return  # of the parent
        self._is_closed = True
        try:
            while self._watches:
                self._watches.pop().close()
        finally:
            self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            logger.error("a save beneath '%s' failed besides: %s", self.root, failed)
