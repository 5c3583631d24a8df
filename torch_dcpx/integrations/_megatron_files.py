"""What Megatron writes beside a checkpoint: `common.pt` before it, `metadata.json` after it.

A save over a checkpoint must leave the previous one or the new one, whole. Megatron replaces
`common.pt` before it asks a strategy to save, and has one name for it. So:

1. Megatron's `save_common`, ours here, keeps the old one under the digest of its `.metadata`.
2. As the save begins, the new one is put aside, and the old one gets its name back.
3. Just before the commit the new one gets the name. After it the kept one goes.

Where a kill leaves a kept one of the checkpoint that is there, `load_common` reads that.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_dcpx.integrations._framework import needed
from torch_dcpx.storage.directory import fsync_path
from torch_dcpx.storage.names import METADATA_NAME

with needed("torch_dcpx.integrations.megatron", "megatron-core>=0.16"):
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
    from megatron.core.dist_checkpointing.strategies import base, common
    from megatron.core.msc_utils import MultiStorageClientFeature

_COMMON = common.COMMON_STATE_FNAME
_ASIDE = ".dcpx.common.new.pt"  # of the save under way
_KEPT = ".dcpx.common.*.kept.pt"


def _put(path: Path, content: bytes) -> None:
    """Replaces a small file as a whole, durably."""
    beside = path.with_name(f".dcpx.{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _rename(beside, path)


def _rename(old: Path, new: Path) -> None:
    old.replace(new)
    fsync_path(new.parent)


def _kept(folder: Path) -> Path | None:
    """Returns the name of the kept `common.pt` of the checkpoint that is there; None: there is
    none.
    """
    try:
        content = (folder / METADATA_NAME).read_bytes()
    except FileNotFoundError:
        return None
    return folder / _KEPT.replace("*", hashlib.blake2b(content, digest_size=6).hexdigest())


class SavedBeside:
    """What lies beside the checkpoint of one save, on the rank that commits it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._common = folder / _COMMON
        self._is_config_new = False
        self._old = _kept(folder)
        self._is_aside = self._old is not None and self._old.exists()
        if self._old is not None and self._is_aside:
            _rename(self._common, folder / _ASIDE)
            _put(self._common, self._old.read_bytes())

    def publish(self) -> None:
        """Gives the new files their names. REQUIRES: the commit is next."""
        if self._is_aside:
            _rename(self._folder / _ASIDE, self._common)
        self._is_config_new = not (self._folder / CONFIG_FNAME).exists()
        save_config(CheckpointingConfig("torch_dist"), str(self._folder))

    def tidy(self) -> None:
        """Removes what is kept, of a checkpoint that is no more."""
        for path in self._folder.glob(_KEPT):
            path.unlink(missing_ok=True)

    def take_back(self) -> None:
        """Undoes `publish`, unless the save was committed after all."""
        if _kept(self._folder) != self._old:
            return
        if self._old is not None and self._is_aside:
            _put(self._common, self._old.read_bytes())
            for path in (self._folder / _ASIDE, self._old):
                path.unlink(missing_ok=True)
        if self._is_config_new and self._old is None:
            (self._folder / CONFIG_FNAME).unlink(missing_ok=True)


class _SaveCommon(common.TorchCommonSaveStrategy):
    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves `common.pt` durably, and keeps that of a checkpoint that is there."""
        if MultiStorageClientFeature.is_enabled():
            super().save_common(common_state_dict, checkpoint_dir)
        elif dist.get_rank() == 0:
            path = Path(checkpoint_dir) / _COMMON
            kept = _kept(path.parent)
            if kept is not None and path.exists() and not kept.exists():
                _put(kept, path.read_bytes())
            content = io.BytesIO()
            torch.save(common_state_dict, content)
            _put(path, content.getvalue())


class _LoadCommon(common.TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Loads `common.pt`, or that which a save that was killed has kept."""
        folder = Path(checkpoint_dir)
        if any(folder.glob(_KEPT)):
            kept = _kept(folder)
            if kept is not None and kept.exists():
                return torch.load(kept, map_location="cpu", weights_only=True)
        return super().load_common(checkpoint_dir)


def save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    """As Megatron's, durably and as a whole: its own is torn for an instant, each time."""
    path = Path(checkpoint_dir) / CONFIG_FNAME
    content = json.dumps(asdict(config)).encode()
    if not path.exists() or path.read_bytes() != content:
        _put(path, content)


_own_save_config = serialization.save_config


def _save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    save = _own_save_config if MultiStorageClientFeature.is_enabled() else save_config
    save(config, checkpoint_dir)


def use_durable_files() -> None:
    """Makes Megatron write `common.pt` and `metadata.json` as above, for every strategy."""
    register = base.register_default_strategy
    register(base.StrategyAction.SAVE_COMMON, "torch", 1, _SaveCommon("torch", 1))
    register(base.StrategyAction.LOAD_COMMON, "torch", 1, _LoadCommon())
    serialization.save_config = _save_config
