"""torchtitan's checkpoint manager over ours: background saves, the newest whole one, retention.

torchtitan says when to save, what is in it and how its parts are named, so that its own manager
reads these checkpoints. Beneath it a `CheckpointManager` of ours commits, points to the last
commit, removes older ones and finds the one to go on with.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_dcpx._keywords import telling
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.load import load
from torch_dcpx.errors import CorruptionError, NotCommittedError
from torch_dcpx.integrations._framework import needed
from torch_dcpx.manager.manager import CheckpointManager
from torch_dcpx.manager.pointer import step_of_name
from torch_dcpx.manager.resume import is_damage
from torch_dcpx.manager.state import Parts
from torch_dcpx.options import WriteOptions

with needed(__name__, "torchtitan>=0.3"):
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
    from torchtitan.components.checkpointer import CheckpointManager as TitanManager
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode
    from torchtitan.tools.utils import GarbageCollection

logger = logging.getLogger("torch_dcpx")


@telling
class DcpxCheckpointManager(TitanManager):
    """torchtitan's `CheckpointManager`, which saves, loads and removes by torch-dcpx.

    Give `DcpxCheckpointManager.Config(...)` as `checkpoint=` of the trainer's configuration. Its
    options are torchtitan's. Those of saves come from the environment (DCPX_SAVE_TIMEOUT_S ...).

    Raises:
        UnsupportedError: `folder` is a URL that is neither s3:// nor az://.
    """

    folder: str
    staging_future: Any
    save_future: Any

    @telling
    @dataclass(kw_only=True, slots=True)
    class Config(TitanManager.Config):
        """The configuration of torchtitan's manager, for ours.

        Attributes:
            async_mode: "disabled" (default): `save` returns when the checkpoint is durable.
                "async": when it is copied to host memory. "async_with_pinned_mem": when the copies
                are queued on the devices; the next step of the optimizer runs behind them.
            keep_latest_k: so many commits stay, and the save under way. Default 10; 0 keeps all.
        """

    def __init__(self, config: Any, **parts: Any) -> None:
        """Touches no checkpoint. Args: as torchtitan's."""
        # Without a number of its own, torchtitan starts no thread that removes folders.
        super().__init__(replace(config, keep_latest_k=0), **parts)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        is_overlapped = self.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
        self.stager = _NoStager()  # torchtitan makes one of its own where there is none
        self._handle: SaveHandle | None = None
        self._newest_step = -1
        self._checkpoints = _Checkpoints(
            self.folder,
            keep_last=config.keep_latest_k or None,
            options=WriteOptions(overlap=is_overlapped),
        )
        self.folder = str(self._checkpoints.root)  # absolute

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves a checkpoint of a step; `to_hf` writes torchtitan's own safetensors files.

        Returns:
            As torchtitan's: None, a future, or two in an `AsyncSaveResponse`.

        Raises:
            As `CheckpointManager.save`, also of an earlier save.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        tag = checkpoint_id.rpartition("/")[2]
        is_async = async_mode is not AsyncMode.DISABLED
        self._handle = self._checkpoints.save_states(tag, state_dict, is_async=is_async)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        if async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            durable: Any = self._handle.durable
            return AsyncSaveResponse(self._handle.staged, durable)
        return self._handle.durable if is_async else None

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads a checkpoint, ours or stock's; `from_hf` reads safetensors as torchtitan does.

        Raises:
            As `dcpx.load`.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            load(state_dict, checkpoint_id, cast="allow")
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        """Loads a step, or on all ranks the newest one that rank 0 finds whole.

        Where checksums say that this one is damaged, it loads the one before it.
        """
        if step != -1:
            return bool(super()._load(step))
        damage: CorruptionError | None = None
        while True:
            self._newest_step = step = self._checkpoints.newest_step()
            if step == -1 and damage is not None:
                raise damage
            try:
                return bool(super()._load(step))
            except CorruptionError as error:
                if step == -1 or not self._checkpoints.passes_over(step, error):
                    raise
                damage = damage or error

    def _find_load_step(self, folder: str = "") -> int:
        return self._newest_step

    def _maybe_wait_for_staging(self) -> None:
        """Orders the optimizer's step behind the copies; the host does not wait."""
        if self.staging_future is not None and self._handle is not None:
            self._handle.guard.wait()
            self.staging_future = None

    def _wait_for_saving(self) -> None:
        """Waits for the save under way. Raises DcpxError, once: it failed."""
        future, self.save_future = self.save_future, None
        future.result()

    def _purge_stale_checkpoints(self) -> None:
        """Does nothing: behind each commit ours removes what `keep_latest_k` does not keep."""

    def _close(self) -> None:
        """Waits for the save under way. Raises DcpxError: it failed, and nobody knows yet."""
        if hasattr(self, "_checkpoints"):  # else its own __init__ has raised
            self._checkpoints.close()


class _NoStager:
    """Stands where torchtitan keeps a stager of its pinned mode; our saves need none."""

    def close(self) -> None:
        """Does nothing."""


class _States(Parts):
    """torchtitan's states, at the top of the checkpoint under torchtitan's own names."""

    def stateful(self, **_rules: Any) -> dict[str, Any]:
        """Returns them as they are."""
        return dict(self.state)


class _Checkpoints(CheckpointManager):
    """The checkpoints of torchtitan's folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Args: as `CheckpointManager`."""
        super().__init__(*args, **kwargs)
        self._passed: set[str] = set()  # tags of this run

    def save_states(self, tag: str, states: dict[str, Any], *, is_async: bool) -> SaveHandle:
        """Saves torchtitan's states. Raises: as `save`."""
        self._saves.is_async = is_async
        return self._saves.save(tag, _States(state=dict(states)), None, None)

    def newest_step(self) -> int:
        """Returns on all ranks the step of the newest whole checkpoint, -1 where there is none.

        Those that were passed over do not count.

        Raises:
            NotCommittedError: checkpoints are there that were committed, and none is whole.
        """
        step: int = self._catalog.on_coordinator("latest", None, lambda _: self._newest_step())
        return step

    def _newest_step(self) -> int:
        self._root.newest_but(())  # logs what is not whole
        whole, skipped = self._root.listed()
        broken = [each for each in skipped if not each[1].startswith(NotCommittedError.__name__)]
        if broken and not whole:  # else torchtitan would begin anew
            path = str(self._root.path)
            told = "; ".join(f"'{tag}': {reason}" for tag, reason in broken)
            raise NotCommittedError(f"load from '{path}': nothing is whole: {told}", path=path)
        found = [
            (step_of_name(each.tag), each.record) for each in whole if each.tag not in self._passed
        ]
        last_commit = [step for step, record in found if step is not None and record][:1]
        # Stock numbers no commits: of its checkpoints, which may be later ones, the step decides.
        stocks = [step for step, record in found if step is not None and not record]
        return max((*last_commit, *stocks), default=-1)

    def passes_over(self, step: int, error: CorruptionError) -> bool:
        """Notes that a checkpoint is damaged. Returns False: the error is of something else."""
        tag = f"step-{step}"
        if not is_damage(error, self._root.path / tag):
            return False
        logger.warning("passed over '%s', which is damaged: %s", self._root.path / tag, error)
        self._passed.add(tag)
        self._root.note_damaged(tag)  # on the coordinator: its retention keeps a good one
        return True
