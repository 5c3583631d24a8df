"""Plain tensors whose instances have DCP's hooks: what these give is what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import no_save_is_left
from support.machine import seconds
from support.tensor_bits import bits
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import torch_dcpx
from torch_dcpx import DcpxSavePlanner, DcpxWriter, WriteOptions

__all__ = ["no_save_is_left"]
pytestmark = pytest.mark.usefixtures("no_save_is_left")


def _hooked() -> torch.Tensor:
    """Returns a plain tensor that says itself, by hooks of its own, what is to be saved."""
    tensor = torch.arange(8.0)
    about = TensorWriteData(
        ChunkStorageMetadata(torch.Size([0]), torch.Size([8])),
        TensorProperties.create_from_tensor(tensor),
        torch.Size([8]),
    )
    told: Any = tensor
    told.__create_write_items__ = lambda fqn, _: [
        WriteItem(MetadataIndex(fqn, torch.Size([0])), WriteItemType.SHARD, tensor_data=about)
    ]
    told.__get_tensor_shard__ = lambda _: torch.full((8,), 7.0)
    return tensor


@pytest.mark.parametrize("path", ["save", "async_save", "waves", "dcp.save", "stock planner"])
def test_data_that_a_tensors_own_hook_gives_are_stored(path: str, tmp_path: Path) -> None:
    state = {"hooked": _hooked(), "plain": torch.ones(2)}
    if path == "save":
        torch_dcpx.save(state, tmp_path)
    elif path == "async_save":
        torch_dcpx.async_save(state, tmp_path).result(seconds(60))
    elif path == "waves":
        options = WriteOptions(host_memory_bytes=1 << 19, workers=1, slot_bytes=1 << 18)
        torch_dcpx.async_save({**state, "large": torch.ones(1 << 19)}, tmp_path, options=options)
        torch_dcpx.wait()
    else:
        planner = DefaultSavePlanner() if path == "stock planner" else DcpxSavePlanner()
        dcp.save(state, storage_writer=DcpxWriter(tmp_path), planner=planner, no_dist=True)
    found = {"hooked": torch.zeros(8), "plain": torch.zeros(2)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert bits(found) == bits({"hooked": torch.full((8,), 7.0), "plain": torch.ones(2)})
