"""CheckpointManager: a training job saves, resumes, lists, removes and exports checkpoints.

Every rank makes every call, in one order. Ranks agree through the process group's store. Only the
coordinator (rank 0) reads and changes the root.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch
from torch import nn

from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx._arguments import check_bools, check_wait, named_arguments
from torch_dcpx.artifacts.export import ExportReport
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.keys.key_map import DryRun, KeyMap
from torch_dcpx.manager.cadence import Cadence
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.content import Merge
from torch_dcpx.manager.pointer import Tag
from torch_dcpx.manager.preemption import Preemption
from torch_dcpx.manager.resume import Resume, ResumeInfo
from torch_dcpx.manager.retention import KeepRules, Retention
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.root_files import checked_options, files_at
from torch_dcpx.manager.save import Saves
from torch_dcpx.manager.state import Parts
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.members import check_ranks
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.paths import AnyPath

logger = logging.getLogger("torch_dcpx")


@named_arguments("__init__", "save", "resume")
class CheckpointManager:
    """The checkpoints of one training, each in a directory beneath one root.

    As a context manager it waits for its saves at the end of the block (`close`); an exception of
    the block goes on. Not thread-safe; belongs to one process.
    """

    def __init__(
        self,
        root: AnyPath,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        save_every: int | None = None,
        save_every_s: float | None = None,
        async_save: bool = True,
        process_group: Any = None,
        no_dist: bool = False,
        options: WriteOptions | None = None,
        read_options: ReadOptions | None = None,
        allow_fresh: bool = False,
        allow_older: bool = False,
        grace_s: float | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Keeps the rules. It reads and writes nothing before the first call.

        Args:
            root: their directory, made by the first save, or a prefix's URL; for one job at a time.
            keep_last: keeps that many of the last commits. Default None.
            keep_every: keeps checkpoints whose step is a multiple of this. Default None.
            keep_best: (metric, "min" or "max", how many) by `save(metrics=)`. Default None. All
                three None keep every checkpoint. Else the last commit and pinned ones stay, too.
            save_every: `should_save` is True at multiples of so many steps. Default None.
            save_every_s: seconds from a save or resume until `should_save` is True. Default None.
            async_save: whether `save` returns before the checkpoint is written. Default True.
            process_group: the ranks of the training. Default None: all.
            no_dist: this process by itself. Default False.
            options, read_options: of the writer, and of readers. Default None: all defaults.
            allow_fresh: starts fresh where saves began, none committed. Default False: an error.
            allow_older: goes on without a known commit that is not found. Default False: an error.
            grace_s: of a store's root: seconds for which data of removed checkpoints, and of saves
                that did not end, stay. Default None: 3600, or `2 * save_timeout_s` if that is more.
            trainable_only: leaves frozen parameters out (docs/howto/lora.md). Default False.

        Raises:
            OptionError: values that cannot work.
            UnsupportedError: another URL as root, or no obstore for this one; `node_local`.
        """
        check_ranks(process_group, no_dist)
        check_bools(async_save=async_save, allow_fresh=allow_fresh)
        check_bools(allow_older=allow_older, trainable_only=trainable_only)
        options, read_options = checked_options(options, read_options)
        self._rules = KeepRules.of(keep_last, keep_every, keep_best)
        files = files_at(root, options, read_options, grace_s)
        self.root: Location = files.path
        self._root = ManagerRoot(files, read_options, os.fsdecode(root), options.save_timeout_s)
        self._root.allow_older = allow_older
        self._retention = Retention(self._root, self._rules)
        ranks = {"process_group": process_group, "no_dist": no_dist}
        self._catalog = CheckpointCatalog(self._root, self._retention, ranks, options, read_options)
        self._cadence = Cadence(self._catalog, save_every, save_every_s)
        self._saves = Saves(self._catalog, async_save, self._cadence)
        self._allow_fresh, self._trainable_only = allow_fresh, trainable_only
        self._watches: list[Preemption] = []

    def save(
        self,
        tag_or_step: Tag,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        state: dict[str, Any] | None = None,
        user_content: Any = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        step: SupportsIndex | None = None,
    ) -> SaveHandle:
        """Saves a checkpoint.

        Args:
            tag_or_step: the step, saved as "step-N", or a name for the directory. The commit
                replaces a checkpoint of that name, unless it is pinned.
            model: a module; plain, DDP, FSDP2, compiled.
            optimizer, lr_scheduler: of that model; one, or a list or a dict of several.
            dataloader: anything with `state_dict` and `load_state_dict`; each rank's own.
            state: more tensors, sharded ones too, Python values and `Stateful` objects, by name.
            user_content: small values (docs/howto/per_rank_state.md); rank 0's but for `PerRank`.
            metrics: numbers by name, for `keep_best`; rank 0's.
            step: of a tag that is no step. Default: that of "step-N", else of the last save.

        Returns:
            The save; all parts may change. With `async_save=False` it is finished.

        Raises:
            PlanError: ranks made different calls; nothing was written.
            OptionError: a tag, part or metric that cannot work; or no part at all.
            UnsupportedError: a small value needs execution to load; or the tag is a link or pinned.
            DcpxError: as `dcpx.save` and `dcpx.async_save`, also of an earlier save.
        """
        parts = Parts(model, optimizer, lr_scheduler, dataloader, state, user_content)
        parts = parts._replace(trainable_only=self._trainable_only)
        return self._saves.save(tag_or_step, parts, metrics, step)

    def resume(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        state: dict[str, Any] | None = None,
        tag: Tag | None = None,
        strict: bool = True,
        allow_missing: Iterable[str] = (),
        cast: Literal["error", "allow"] = "error",
        load_optimizer: bool = True,
        merge: Merge = None,
        translate: KeyMap | Callable[[str], str | None] | None = None,
        fallback: bool = True,
    ) -> ResumeInfo:
        """Loads the newest whole checkpoint, on any number of ranks.

        Args:
            model, optimizer, lr_scheduler, dataloader, state: as in `save`, or fewer of them;
                filled in place.
            tag: which checkpoint; a link to one will do. Default None: the newest.
            strict: whether a name that only one side holds is an error. Default True.
            allow_missing: globs (`fnmatch`) of names that one side may lack, with their part:
                "model.head.*", "lr_scheduler". Default ().
            cast: as `dcpx.load`: "error" (default) or "allow" where stored dtypes differ.
            load_optimizer: with False, optimizer and scheduler stay as they are. Default True.
            merge: for each rank's own values, after a change of the number of ranks:
                function(values_by_rank, rank, world_size), or one a name ("dataloader",
                "user_content.rng"). Default None: an error.
            translate: a KeyMap, or a function of one name, from stored names of the model (without
                "model.") to the model's; optimizers' states follow their parameters. Default None.
            fallback: with False a damaged newest one is an error. Default True: the one before it.

        Returns:
            The resumed checkpoint. A fresh start has no tag: nothing in the root is of a save, or
            none was committed and `allow_fresh` is set.

        Raises:
            NotCommittedError: no whole checkpoint is there, or not the tag.
            StorageError: what is known to be committed is not found, or storage does not answer.
            MismatchError: a part was not saved; nothing was changed. Or, behind the read: one group
                has parameters of different saved settings, or of no saved optimizer.
            RankError: code of the caller (`merge`, a `load_state_dict`) raised on a rank: on all.
            PlanError: ranks made different calls, or `translate` does not fit the stored names.
            OptionError: a tag, part or other argument that cannot work.
            CorruptionError: the checkpoint is damaged, or the one before it does not fit.
            UnsupportedError: a tensor to fill is on `meta`; `translate` reshapes an optimizer's.
            DcpxError: as `dcpx.load`.
        """
        if load_optimizer is False:  # another value is refused where all ranks learn of it
            optimizer = lr_scheduler = None
        only = self._trainable_only
        parts = Parts(model, optimizer, lr_scheduler, dataloader, state, trainable_only=only)
        loads = load_optimizer, allow_missing, cast
        choices = tag, strict, merge, translate, fallback, self._allow_fresh, *loads
        info = Resume(self._catalog, parts, *choices).run()
        self._saves.note_step(self._saves.last_step if info.is_fresh else info.step or 0)
        return info

    def should_save(self, step: SupportsIndex) -> bool:
        """Returns whether to save now: the same at the same step on every rank.

        True from the first step that passes a multiple of `save_every`, or that comes
        `save_every_s` after the last save or resume (or the first call), or that a signal of
        `save_on_signal` asks for; until a save. Every rank calls it with the same steps, ascending.

        Args:
            step: the last one that was trained.

        Raises:
            OptionError: this is no step; or the manager has no rule and watches no signal.
            PlanError: ranks made different calls, or have managers of other rules.
            RankLostError: a rank did not make the call within `save_timeout_s`.
        """
        return self._cadence.should_save(step, self._watches)

    def latest(self) -> str | None:
        """Returns the tag that `resume` would try first; None where there is none.

        Raises:
            StorageError: as `resume`, where a part of a file system that nodes share is hidden.
        """
        return self._catalog.on_coordinator(
            "latest", None, lambda _: getattr(self._catalog.newest(), "tag", None)
        )

    def tags(self) -> list[str]:
        """Returns the tags of all whole checkpoints, the oldest commit first.

        First come copies and renamed ones, then what no manager saved, by the numbers in the names.
        Where nodes share the file system, a WARNING names what is not found whole.
        """
        return self._catalog.on_coordinator("tags", None, lambda _: self._catalog.tags())

    def pin(self, tag: Tag) -> None:
        """Keeps a checkpoint from retention, `delete` and a `save` to its tag, until `unpin`.

        The pin outlives this job. A save to the tag that is under way commits nothing.

        Raises:
            UnsupportedError: it is a link.
            NotCommittedError, and others: it is not there, or not whole.
            ConcurrentSaveError: it is being deleted at this moment.
        """
        self._catalog.on_coordinator("pin", tag, self._catalog.pin)

    def unpin(self, tag: Tag) -> None:
        """Removes the mark of `pin`, if there is one.

        Raises:
            UnsupportedError: it is a link.
            StorageError: no such checkpoint.
        """
        self._catalog.on_coordinator("unpin", tag, self._catalog.unpin)

    def delete(self, tag: Tag) -> None:
        """Deletes a checkpoint now.

        Raises:
            UnsupportedError: it is pinned, or a link, or the last whole one without known damage;
                links to it do not count.
            ConcurrentSaveError: a save or a reader is there.
            NotCommittedError, and others: it is not there, or not whole.
        """
        self._catalog.on_coordinator("delete", tag, self._catalog.delete)

    def export(
        self,
        tag_or_model: Tag | nn.Module,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "torch"] | None = None,  # noqa: A002 - as `dcpx.export`
        keys: Iterable[str] | None = None,
        key_map: KeyMap | None = None,
        max_shard_bytes: int | str = "5GB",
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        config: str | os.PathLike[str] | None = None,
        merge_lora: str | os.PathLike[str] | None = None,
        options: WriteOptions | None = None,
    ) -> ExportReport:
        """Writes one artifact for inference, by all ranks at once, and returns its report.

        Args:
            tag_or_model: a checkpoint by tag or step, which stays meanwhile; or a module as it is
                now, by the names in a checkpoint of it.
            path: directory, or the file in it, of the artifact; the same on every rank.
            format, keys, key_map, max_shard_bytes, dtype, metadata: as `torch_dcpx.export`.
                Default: the model only, as safetensors. Of a tag, `keys` are names with "model.",
                "optimizer." and so on.
            overwrite, config, merge_lora: as `torch_dcpx.export`.
            options: of the export. Default None: those of the manager.

        Raises:
            NotCommittedError, and others: the tag is not there, or not whole.
            MismatchError: the checkpoint holds no model, and `keys` is None.
            DcpxError: as `torch_dcpx.export`.
        """
        own = path, format, keys, key_map, max_shard_bytes, dtype, metadata
        return self._catalog.export(tag_or_model, (*own, overwrite, config, merge_lora), options)

    def dry_run(
        self, translate: KeyMap | Callable[[str], str | None], tag: Tag | None = None
    ) -> DryRun:
        """Returns the model's names as `resume(translate=)` would make them. Loads nothing.

        Stored and new names come without "model."; `print()` shows them.

        Args:
            translate: as in `resume`.
            tag: which checkpoint. Default None: the newest.

        Raises:
            PlanError: the rules do not fit the stored names, or ranks made different calls.
            NotCommittedError, and others: no whole checkpoint is there, or not the tag.
            OptionError: `translate` is no KeyMap and no function.
        """
        return self._catalog.dry_run(translate, tag)

    def save_on_signal(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        time_left_s: float | None = None,
    ) -> Preemption:
        """Takes over signals that announce the end of the job; ask `should_save` each step.

        The result's `.requested(step)` says whether a signal is the reason.

        Args:
            signals: it replaces their handlers, until `close`.
            time_left_s: seconds from the signal to the end of the job; the answer is no where the
                last save took longer. Default None: unknown.

        Raises:
            OptionError: on any rank not the main thread, no signals, or one that nobody can handle.
            PlanError: ranks made different calls.
        """
        watch = self._catalog.watch(signals, time_left_s, lambda: self._saves.last_save_s)
        self._watches.append(watch)
        return watch

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the saves of this manager, and for the removal of old checkpoints.

        Args:
            timeout_s: seconds for each save. Default None: as long as they may take.

        Raises:
            DcpxError: of a save that failed, once; of several the first, others are logged.
            TimeoutError: a save, or the removal, is still under way after `timeout_s`.
            OptionError: no number of seconds.
        """
        check_wait("timeout_s", timeout_s)
        self._saves.wait(timeout_s)

    def close(self) -> None:
        """Calls `wait`, puts signals' handlers back, frees the root; safe to call twice."""
        if not self._catalog.close():
            return  # the parent's
        timeout_s = self._catalog.options.save_timeout_s
        with wait_at_most(StorageTimeout(timeout_s, "save_timeout_s")):
            try:
                while self._watches:
                    self._watches.pop().close()
            finally:
                self._saves.close()

    def __repr__(self) -> str:
        rules = {f"keep_{name}": value for name, value in self._rules._asdict().items()}
        rules |= {"save_every": self._cadence.every, "save_every_s": self._cadence.every_s}
        told = [f"{name}={value!r}" for name, value in rules.items() if value is not None]
        told += [] if self._saves.is_async else ["async_save=False"]
        told += ["trainable_only=True"] if self._trainable_only else []
        return f"CheckpointManager({', '.join([repr(self._root.given), *told])})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            logger.error("a save beneath '%s' failed besides: %s", self.root, failed)
