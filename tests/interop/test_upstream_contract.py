"""What PyTorch's own distributed-checkpoint tests ask of a FileSystemWriter and -Reader.

Only what they ask beyond our other tests, written anew.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import DcpxReader, DcpxWriter

BOTH_WAYS = pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (DcpxWriter, DcpxReader),
        (DcpxWriter, dcp.FileSystemReader),
        (dcp.FileSystemWriter, DcpxReader),
    ],
)
READERS = pytest.mark.parametrize("reader", [DcpxReader, dcp.FileSystemReader])


class OldPropertiesPlanner(dcp.DefaultSavePlanner):
    """Describes tensors by ShardedTensor's TensorProperties, as torch 2.0 did."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.extra = extra

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for fqn, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            new = entry.properties
            old = ShardProperties(
                new.dtype, new.layout, new.requires_grad, new.memory_format, new.pin_memory
            )
            metadata.state_dict_metadata[fqn] = dataclasses.replace(entry, properties=old)  # type: ignore[arg-type]
        if self.extra is not None:
            metadata.planner_data = {**metadata.planner_data, **self.extra}
        return plans, metadata


@READERS
@pytest.mark.parametrize("extra", [None, {"mine": {"epoch": 3}}], ids=["columns", "pickle"])
def test_tensor_properties_of_sharded_tensor_are_written_as_stocks(
    tmp_path: Path, reader: Any, extra: dict[str, Any] | None
) -> None:
    state = {"a": torch.arange(16.0).view(4, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    planner = OldPropertiesPlanner(extra)
    given = dcp.save(state, storage_writer=DcpxWriter(tmp_path), planner=planner, no_dist=True)
    assert type(given.state_dict_metadata["a"].properties) is ShardProperties  # left as it was
    found = reader(tmp_path).read_metadata().state_dict_metadata
    for fqn, tensor in state.items():
        # Of the five fields that both classes have; torch 2.15's sixth, strides, is not among them.
        assert found[fqn].properties == TensorProperties(tensor.dtype)
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    dcp.load(target, storage_reader=reader(tmp_path), no_dist=True)
    assert all(torch.equal(target[fqn], tensor) for fqn, tensor in state.items())


class LossHistory:
    """A Stateful whose state holds a memory file, as trainers keep their histories."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"step": torch.tensor(len(self.losses)), "losses": file}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"], weights_only=True)


@BOTH_WAYS
def test_a_memory_file_in_a_state_comes_back_without_trust(
    tmp_path: Path, writer: Any, reader: Any
) -> None:
    dcp.save({"train": LossHistory([0.5, 0.25])}, storage_writer=writer(tmp_path), no_dist=True)
    target = LossHistory([])
    dcp.load({"train": target}, storage_reader=reader(tmp_path), no_dist=True)
    assert target.losses == [0.5, 0.25]
