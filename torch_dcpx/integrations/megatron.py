"""Strategies of Megatron-Core that save and load through us.

    from megatron.core import dist_checkpointing
    from torch_dcpx.integrations.megatron import DcpxLoadStrategy, DcpxSaveStrategy

    dist_checkpointing.save(state, path, DcpxSaveStrategy(), async_sharded_save=True)
    dist_checkpointing.load(state, path, DcpxLoadStrategy())

What they write is a checkpoint of Megatron's "torch_dist", which its own strategies read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torch_dcpx._keywords import telling
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.load import load
from torch_dcpx.checkpoint.save import async_save, save
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.integrations._beside import WriterWithFiles, refuse_unfit
from torch_dcpx.integrations._framework import needed
from torch_dcpx.integrations._megatron_files import files_beside, use_durable_files
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.storage.paths import AnyPath

with needed(__name__, "megatron-core>=0.16"):
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as stock
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.msc_utils import MultiStorageClientFeature

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

_POLL_S = 1.0  # between looks of a waiting process at its parent


class _Planner(stock.MCoreSavePlanner):
    """Megatron's planner; notes the plans of all ranks in the metadata, as Megatron does."""

    keeps_plans = False

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As Megatron's `save_state_dict_async_plan`."""
        plans, metadata = super().create_global_plan(all_plans)
        if self.keeps_plans:
            metadata.all_local_plans = [
                SavePlan(list(plan.items), planner_data=plan.planner_data) for plan in all_plans
            ]
        return plans, metadata


@telling
class DcpxSaveStrategy(stock.TorchDistSaveShardedStrategy):
    """Saves as `TorchDistSaveShardedStrategy` does, through `dcpx.save` and `dcpx.async_save`.

    Works by itself and in Megatron's `FullyParallelSaveStrategyWrapper`. `common.pt` and
    `metadata.json` are durable once the save is, and change with it.

    Args:
        backend: "torch_dist" (default); another has no reader.
        version: of the format. Default 1.
        cached_metadata: keep the plans of all ranks in `.metadata`, for a stock strategy that goes
            on from it with `cached_metadata=True`. Default False. Ours needs none.
        options: see `WriteOptions`. Default None: `WriteOptions()`. The attribute `thread_count`,
            which Megatron may set, is `files_per_rank`.

    Raises:
        UnsupportedError: another backend; Megatron uses its MultiStorageClient. When it saves:
            `separation_hint` or `keep_only_main_replica` were set on it.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        cached_metadata: bool = False,
        options: WriteOptions | None = None,
    ) -> None:
        if backend != "torch_dist":
            raise UnsupportedError(f"backend={backend!r}: DcpxSaveStrategy writes 'torch_dist'")
        self.options = options or WriteOptions()
        files = self.options.files_per_rank
        super().__init__(backend, version, thread_count=files, cached_metadata=cached_metadata)

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: AnyPath,
        async_strategy: str = "mcore",
    ) -> Any:
        """Copies the state and begins to save it in the background.

        Args:
            sharded_state_dict: of Megatron. May change when this returns.
            checkpoint_dir: an existing directory.
            async_strategy: whose request to return: "mcore" (default), or "nvrx", of
                nvidia-resiliency-ext, which newer versions of Megatron ask for.

        Returns:
            A request for the `AsyncCallsQueue` of either, which is done when the checkpoint is
            committed on all ranks. Its finalization raises what failed on any of them.

        Raises:
            UnsupportedError: another `async_strategy`, or its package is missing. As
                `dcpx.async_save`.
        """
        request = _request_class(async_strategy)
        handle = self._save(async_save, sharded_state_dict, checkpoint_dir)
        ended, tell = Pipe(duplex=False)
        handle.add_done_callback(partial(_tell, tell, ended))
        return request(_wait_until, (ended, os.getpid()), [handle.result])

    def save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: AnyPath,
        async_strategy: str = "mcore",
    ) -> None:
        """Saves, and returns when the checkpoint is committed and durable.

        Args:
            sharded_state_dict, checkpoint_dir: as `async_save`.
            async_strategy: what Megatron would save with; changes nothing. Default "mcore".

        Raises:
            As `dcpx.save`.
        """
        self._save(save, sharded_state_dict, checkpoint_dir)

    def _save(
        self, call: Callable[..., SaveHandle], sharded_state_dict: Any, checkpoint_dir: AnyPath
    ) -> SaveHandle:
        self._check()
        by_key, _, _ = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = stock.mcore_to_pyt_state_dict(by_key, False)
        options = replace(self.options, files_per_rank=self.thread_count)
        writer = WriterWithFiles(checkpoint_dir, files_beside, options)
        planner = _Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.keeps_plans = self.use_cached_ckpt_structure
        return writer.saved_by(call, state, planner=planner)

    def _check(self) -> None:
        """Raises UnsupportedError for what was set on the strategy and would not be done."""
        _refuse_storage_client()
        if self.separation_hint is not None:
            raise UnsupportedError(
                f"separation_hint={self.separation_hint!r}: files have no prefix"
            )
        if not self.keep_only_main_replica:
            raise UnsupportedError("keep_only_main_replica=False: main replicas alone are saved")
        refuse_unfit(self.options, "Megatron")


def _request_class(async_strategy: str) -> Any:
    if async_strategy == "mcore":
        return AsyncRequest
    if async_strategy == "nvrx":
        with needed("async_strategy='nvrx'", "nvidia-resiliency-ext"):
            from nvidia_resiliency_ext.checkpointing.async_ckpt import core
        return core.AsyncRequest
    raise UnsupportedError(f"async_strategy={async_strategy!r}: 'mcore' and 'nvrx' are supported")


def _refuse_storage_client() -> None:
    if MultiStorageClientFeature.is_enabled():
        raise UnsupportedError(
            "Megatron's MultiStorageClient is on: the strategies of torch_dcpx use file systems"
        )


def _tell(tell: Connection, _ended: Connection, _save: SaveHandle) -> None:
    """Ends the wait of `_wait_until`; until then both ends of the pipe stay open."""
    tell.send_bytes(b".")


def _wait_until(ended: Connection, saver: int) -> None:
    """Waits in a process of Megatron's until the process `saver` has saved, or is gone."""
    while not ended.poll(_POLL_S) and saver in (os.getpid(), os.getppid()):
        pass


@telling
class DcpxLoadStrategy(stock.TorchDistLoadShardedStrategy):
    """Loads as `TorchDistLoadShardedStrategy` does, by `dcpx.load`: each rank reads the ranges of
    its own shards. Nothing from the checkpoint is executed.

    Args:
        options: see `ReadOptions`. Default None: `ReadOptions()`.
    """

    def __init__(self, *, options: ReadOptions | None = None) -> None:
        super().__init__()
        self.options = options

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: AnyPath, async_strategy: str = "mcore"
    ) -> Any:
        """Loads the shards and objects of a state.

        Args:
            sharded_state_dict: of Megatron. Tensors are filled in place.
            checkpoint_dir: of the checkpoint, stock's or ours.
            async_strategy: what Megatron would load with; changes nothing. Default "mcore".

        Returns:
            The state, with tensors and objects in place of what was asked for.

        Raises:
            As `dcpx.load`; what Megatron finds missing, or of another shape.
        """
        tensors = [
            value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)
        ]
        planner = stock.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
            },
        )
        by_key, paths, names = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = stock.mcore_to_pyt_state_dict(by_key, True)
        reader = self._reader(checkpoint_dir)
        load(state, storage_reader=reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        found = {key: stock._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = stock._replace_sharded_keys_with_state_dict_keys(found, paths, names)
        stock._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: AnyPath, metadata: Metadata | None = None
    ) -> Any:
        """Returns the names, shapes and dtypes of the tensors, as Megatron's `ShardedTensor`s."""
        metadata = metadata or self._reader(checkpoint_dir).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: AnyPath) -> Any:
        """Returns as `load_tensors_metadata`, and Megatron's `ShardedObject`s."""
        metadata = self._reader(checkpoint_dir).read_metadata()
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        ]
        found = {value.unique_key: value for value in objects}
        return found | self.load_tensors_metadata(checkpoint_dir, metadata)

    def _reader(self, checkpoint_dir: AnyPath) -> DcpxReader:
        _refuse_storage_client()
        return DcpxReader(checkpoint_dir, options=self.options)


use_durable_files()
