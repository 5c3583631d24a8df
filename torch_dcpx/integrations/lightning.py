"""Strategies of Lightning that save through us, for its Trainer and for Fabric, and a CheckpointIO.

    from torch_dcpx.integrations.lightning import DcpxFSDPStrategy, DcpxModelParallelStrategy

    trainer = Trainer(strategy=DcpxModelParallelStrategy(), callbacks=[ModelCheckpoint(...)])

What they write is a sharded checkpoint of Lightning's, which its own strategies read.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import signature
from typing import Any

import torch

from torch_dcpx._answered_os import path_of
from torch_dcpx._keywords import telling
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.integrations._beside import put_from
from torch_dcpx.integrations._framework import needed
from torch_dcpx.integrations._lightning_saves import (
    Saves,
    kept_meta,
    raise_first,
    refuse_link,
)
from torch_dcpx.manager.state import ModelPart
from torch_dcpx.options import WriteOptions
from torch_dcpx.staging.stager import DcpxStager
from torch_dcpx.storage.paths import AnyPath

with needed(__name__, "lightning>=2.6"):
    from lightning.fabric import strategies as fabric
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.fabric.strategies.fsdp import (
        _get_sharded_state_dict_context,
        _has_fsdp_modules,
    )
    from lightning.fabric.strategies.model_parallel import _has_dtensor_modules
    from lightning.pytorch import strategies as pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

logger = logging.getLogger("torch_dcpx")


def _refuse_whole(is_sharded: bool, named: str) -> None:
    if not is_sharded:
        raise UnsupportedError(
            f"{named} writes one file, through a CheckpointIO: use Lightning's own strategy, and "
            "DcpxCheckpointIO to save in the background"
        )


@telling
class _ModelParallel:
    """Takes our arguments beside those of Lightning's `ModelParallelStrategy`."""

    _save_distributed_checkpoint: bool

    def __init__(
        self,
        *args: Any,
        async_save: bool = True,
        options: WriteOptions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse_whole(self._save_distributed_checkpoint, "save_distributed_checkpoint=False")
        self._saves = Saves(options, is_async=async_save)


@telling
class _Fsdp:
    """Takes our arguments beside those of Lightning's `FSDPStrategy`."""

    def __init__(
        self,
        *args: Any,
        async_save: bool = True,
        options: WriteOptions | None = None,
        state_dict_type: str = "sharded",
        **kwargs: Any,
    ) -> None:
        taken = signature(super().__init__).parameters
        rest = {name: one for name, one in kwargs.items() if name not in taken}
        signature(FullyShardedDataParallel).bind_partial(**rest)  # which would refuse later
        kwargs["state_dict_type"] = state_dict_type
        super().__init__(*args, **kwargs)
        _refuse_whole(state_dict_type == "sharded", f"state_dict_type={state_dict_type!r}")
        self._saves = Saves(options, is_async=async_save)


class _TrainerStrategy(pytorch.Strategy):
    """Saves, loads and removes by us, for both strategies of the Trainer."""

    _saves: Saves
    _model_key: str  # of the model in a checkpoint, as Lightning has it

    def setup(self, trainer: Any) -> None:
        """As Lightning's. Raises: UnsupportedError: a link to what is not there yet."""
        if self._saves.is_async:
            refuse_link(trainer.checkpoint_callbacks)
        super().setup(trainer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: AnyPath, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint on all ranks; in the background unless `async_save=False`.

        Raises:
            UnsupportedError: with `storage_options`. As `dcpx.async_save`, which also raises what
                failed of the save before.
        """
        if storage_options is not None:
            raise UnsupportedError(
                f"storage_options={storage_options!r}: give the strategy options"
            )
        path = self._saves.path_of_all(filepath)
        state = {self._model_key: checkpoint.pop("state_dict")}
        for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer
        self._saves.save(state, checkpoint, path)

    def load_checkpoint(self, checkpoint_path: AnyPath, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, behind saves under way, and never a `meta.pt` of another save."""
        path = path_of(self._saves.path_to_load(checkpoint_path))
        found = super().load_checkpoint(path, *args, **kwargs)
        kept = kept_meta(path, kwargs.get("weights_only"))
        return found if kept is None else kept

    def remove_checkpoint(self, filepath: AnyPath) -> None:
        """Removes a checkpoint behind the saves under way, unless one of them fails."""
        if self.is_global_zero:
            remove = super().remove_checkpoint
            self._saves.remove(path_of(os.fsdecode(filepath)), lambda: remove(filepath))

    def on_train_end(self) -> None:
        """Waits for saves under way. Raises: what failed of them, on every rank."""
        self._saves.wait()
        super().on_train_end()

    def teardown(self) -> None:
        """As `on_train_end`, where the training ended otherwise."""
        try:
            self._saves.wait()
        finally:
            super().teardown()


class DcpxModelParallelStrategy(_TrainerStrategy, _ModelParallel, pytorch.ModelParallelStrategy):
    """Trains as the Trainer's `ModelParallelStrategy` (FSDP2, tensor parallelism); saves by us.

    `meta.pt` is part of the commit. A save returns once the state is copied; what failed is raised
    by the next one, or at the end of the training.

    Args:
        *args: as Lightning's.
        async_save: save in the background. Default True.
        options: see `WriteOptions`. Default None: `WriteOptions()`.
        **kwargs: as Lightning's.

    Raises:
        UnsupportedError: `save_distributed_checkpoint=False`; `on_busy="skip"`, `overlap=True`.
    """

    _model_key = "state_dict"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the model, where it is: a save copies it to the host once."""
        return ModelPart(self.model).state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As `lightning_module_state_dict`, of an optimizer."""
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))


class DcpxFSDPStrategy(_TrainerStrategy, _Fsdp, pytorch.FSDPStrategy):
    """Trains as the Trainer's `FSDPStrategy` (FSDP1); saves by us, as `DcpxModelParallelStrategy`.

    Args:
        *args: as Lightning's.
        async_save, options: as `DcpxModelParallelStrategy`.
        state_dict_type: "sharded" (default).
        **kwargs: as Lightning's.

    Raises:
        UnsupportedError: `state_dict_type="full"`; `on_busy="skip"`, `overlap=True`.
    """

    _model_key = "model"


class _FabricStrategy(fabric.Strategy):
    """Saves and loads by us, for both strategies of Fabric."""

    _saves: Saves

    def _converted(self, module: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dicts of modules and optimizers, by their keys."""
        raise NotImplementedError

    def _is_sharded_module(self, value: object) -> bool:
        raise NotImplementedError

    def save_checkpoint(
        self,
        path: AnyPath,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002  (Lightning's name)
    ) -> None:
        """Saves a checkpoint on all ranks; in the background unless `async_save=False`.

        Raises:
            UnsupportedError: with `storage_options` or `filter`. As `dcpx.async_save`, which also
                raises what failed of the save before. What Lightning's own raises without exactly
                one sharded module.
        """
        if storage_options is not None or filter is not None:
            raise UnsupportedError("storage_options and filter: not for sharded checkpoints")
        modules = [value for value in state.values() if self._is_sharded_module(value)]
        if len(modules) != 1:
            super().save_checkpoint(path, state)  # says what is wrong
            return
        parts = self._converted(modules[0], state)
        meta = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if key not in parts
        }
        self._saves.save(parts, meta, self._saves.path_of_all(path))

    def load_checkpoint(self, path: AnyPath, state: Any = None, **kwargs: Any) -> Any:
        """As Lightning's, behind saves under way, and never a `meta.pt` of another save."""
        path = path_of(self._saves.path_to_load(path))
        found = super().load_checkpoint(path, state, **kwargs)
        kept = kept_meta(path, kwargs.get("weights_only"))
        if kept is None or not isinstance(state, dict):
            return found
        state.update({key: kept.pop(key) for key in [*kept] if key in state})
        return kept

    def wait(self) -> None:
        """Waits for saves under way: Fabric has no end. Raises: what failed of them."""
        self._saves.wait()


class DcpxFabricModelParallelStrategy(
    _FabricStrategy, _ModelParallel, fabric.ModelParallelStrategy
):
    """Trains as Fabric's `ModelParallelStrategy`; saves by us, as `DcpxModelParallelStrategy`.

    Call `fabric.strategy.wait()` at the end of a training: it raises what failed of the last save.

    Args, Raises:
        As `DcpxModelParallelStrategy`.
    """

    def _converted(self, module: Any, state: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                found[key] = ModelPart(value).state_dict()
            elif isinstance(value, torch.optim.Optimizer):
                found[key] = get_optimizer_state_dict(module, value)
        return found

    def _is_sharded_module(self, value: object) -> bool:
        return bool(_has_dtensor_modules(value))


class DcpxFabricFSDPStrategy(_FabricStrategy, _Fsdp, fabric.FSDPStrategy):
    """Trains as Fabric's `FSDPStrategy`; saves by us, as `DcpxFabricModelParallelStrategy`.

    Args, Raises:
        As `DcpxFSDPStrategy`.
    """

    def _converted(self, module: Any, state: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with _get_sharded_state_dict_context(module):
            for key, value in state.items():
                if isinstance(value, torch.nn.Module):
                    found[key] = value.state_dict()
                elif isinstance(value, torch.optim.Optimizer):
                    found[key] = FullyShardedDataParallel.optim_state_dict(module, value)
        return found

    def _is_sharded_module(self, value: object) -> bool:
        return bool(_has_fsdp_modules(value))


class DcpxCheckpointIO(TorchCheckpointIO):
    """Saves plain checkpoints (one file of `torch.save`) in the background, durably.

    A save copies tensors and all else of the checkpoint before it returns: what changes afterwards
    does not get into the file. One at a time: the next one waits, and raises what failed. A file
    that is saved again stays as it was until the new one is whole. A removal comes behind the saves
    of before, and is left out if one has failed. `ModelCheckpoint(save_last="link")` is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dcpx-lightning")
        self._tasks: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None
    ) -> None:
        """Copies a checkpoint and begins to save it.

        Raises:
            UnsupportedError: with `storage_options`. StagingError: no memory for the copy.
            What failed of the save before.
        """
        if storage_options is not None:
            raise UnsupportedError(f"storage_options={storage_options!r}: torch.save takes none")
        self.wait()
        staged = DcpxStager(is_shared=False).stage(checkpoint)
        _dress(staged, checkpoint)
        self._tasks.append(self._thread.submit(self._write, staged, os.fsdecode(path)))

    def _write(self, staged: dict[str, Any], path: str) -> None:
        if "://" in path:
            super().save_checkpoint(dict(staged), path)
        else:
            put_from(path_of(path), lambda file: torch.save(dict(staged), file))

    def load_checkpoint(self, path: AnyPath, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, behind the save under way."""
        self.wait()
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """As Lightning's, behind the save under way, unless that fails."""
        before, remove = list(self._tasks), super().remove_checkpoint

        def behind() -> None:
            if all(task.exception() is None for task in before):
                remove(path)
            else:
                logger.warning("'%s' stays: a save or a removal before has failed", str(path))

        self._tasks.append(self._thread.submit(behind))

    def wait(self) -> None:
        """Waits for the save and the removals under way.

        Raises:
            What failed of the first that did; the others are logged.
        """
        tasks, self._tasks = self._tasks, []
        raise_first([error for task in tasks if (error := task.exception()) is not None])

    def teardown(self) -> None:
        """As `wait`."""
        self.wait()


_setup_of_lightning = ModelCheckpoint.setup


def _setup(self: ModelCheckpoint, trainer: Any, pl_module: Any, stage: str) -> None:
    """As Lightning's; refuses a link to a file that a DcpxCheckpointIO is still to write."""
    plugin = trainer.strategy.checkpoint_io
    while plugin is not None and stage == "fit":
        if isinstance(plugin, DcpxCheckpointIO):
            refuse_link([self])
        plugin = getattr(plugin, "checkpoint_io", None)  # of one that wraps another
    _setup_of_lightning(self, trainer, pl_module, stage)


ModelCheckpoint.setup = _setup


def _dress(staged: Any, checkpoint: Any) -> None:
    """Gives staged containers what `torch.save` keeps besides: parameters, and the versions of
    modules, which are an attribute of their state dict.
    """
    todo, seen = [(staged, checkpoint)], {id(checkpoint)}
    while todo:
        into, values = todo.pop()
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, torch.nn.Parameter) and type(into[key]) is torch.Tensor:
                into[key] = torch.nn.Parameter(into[key], value.requires_grad)
            elif isinstance(value, (dict, list)) and id(value) not in seen:
                seen.add(id(value))
                todo.append((into[key], value))
                if isinstance(into[key], OrderedDict) and hasattr(value, "_metadata"):
                    vars(into[key])["_metadata"] = copy.deepcopy(value._metadata)
