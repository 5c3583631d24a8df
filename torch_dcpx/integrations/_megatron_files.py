"""Publishes with a checkpoint what Megatron writes beside it: `common.pt`, `metadata.json`.

Megatron 0.16 replaces `common.pt` before it asks a strategy to save. So its `save_common`, ours
here, keeps the old one, and as the save begins that gets its name back. Newer versions keep what
was in `common.pt` in the checkpoint itself.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_dcpx._answered_os import path_of
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.integrations._beside import current, kept, put
from torch_dcpx.integrations._framework import needed

with needed("torch_dcpx.integrations.megatron", "megatron-core>=0.16"):
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.msc_utils import MultiStorageClientFeature

_COMMON = common.COMMON_STATE_FNAME
_WRITES_COMMON = hasattr(common, "TorchCommonSaveStrategy")


def files_beside(folder: Path) -> Mapping[str, bytes]:
    """Returns what to publish with a checkpoint, after Megatron's `save_common`.

    Raises:
        UnsupportedError: a `common.pt` of an older version would be taken for the checkpoint's.
    """
    files = {CONFIG_FNAME: _encoded(CheckpointingConfig("torch_dist"))}
    path = folder / _COMMON
    if path.exists():
        if not _WRITES_COMMON:
            raise UnsupportedError(
                f"save '{folder}': it holds '{_COMMON}' of an older version of Megatron, which "
                "this version would load with the new checkpoint: save to another folder"
            )
        files[_COMMON] = path.read_bytes()
        old = kept(path)
        if old is not None and old.exists():
            put(path, old.read_bytes())
    return files


def _encoded(config: CheckpointingConfig) -> bytes:
    return json.dumps(asdict(config)).encode()


_own_save_config = serialization.save_config


def _save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    """As Megatron's, durably and as a whole: its own is torn for an instant, each time."""
    if MultiStorageClientFeature.is_enabled():
        _own_save_config(config, checkpoint_dir)
        return
    path, content = path_of(checkpoint_dir) / CONFIG_FNAME, _encoded(config)
    if not path.exists() or path.read_bytes() != content:
        put(path, content)


def use_durable_files() -> None:
    """Makes Megatron write `common.pt` and `metadata.json` as above, for every strategy."""
    serialization.save_config = _save_config
    if _WRITES_COMMON:
        _use_durable_common()


def _use_durable_common() -> None:
    from megatron.core.dist_checkpointing.strategies import base  # newer versions have none

    class SaveCommon(common.TorchCommonSaveStrategy):
        def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
            """Saves `common.pt` durably, and keeps that of a checkpoint that is there."""
            if MultiStorageClientFeature.is_enabled():
                super().save_common(common_state_dict, checkpoint_dir)
            elif dist.get_rank() == 0:
                path = path_of(checkpoint_dir) / _COMMON
                old = kept(path)
                if old is not None and path.exists() and not old.exists():
                    put(old, path.read_bytes())
                content = io.BytesIO()
                torch.save(common_state_dict, content)
                put(path, content.getvalue())

    class LoadCommon(common.TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            """Loads `common.pt`, or that which a save that was killed has kept."""
            path = current(path_of(checkpoint_dir) / _COMMON)
            if path.name == _COMMON:
                return super().load_common(checkpoint_dir)
            return torch.load(path, map_location="cpu", weights_only=True)

    register = base.register_default_strategy
    register(base.StrategyAction.SAVE_COMMON, "torch", 1, SaveCommon("torch", 1))
    register(base.StrategyAction.LOAD_COMMON, "torch", 1, LoadCommon())
