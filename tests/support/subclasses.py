"""Subclasses of writer, reader and planners, importable by a process that unpickles them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from torch_dcpx import DcpxReader, DcpxWriter


class LabelledWriter(DcpxWriter):
    """Has a field of its own, and says so in the metadata."""

    label = "none"

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(self.checkpoint_id, self.save_id, None, [self.label, str(os.getpid())])


class LabelledReader(DcpxReader):
    label = "none"


class NegatingSavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: Any, value: Any) -> Any:
        return -value if isinstance(value, torch.Tensor) else super().transform_object(write_item, value)  # fmt: skip  # noqa: E501


def seen(plugin: Any, root: Path) -> tuple[Any, ...]:
    """Returns what stock's attributes say, without what differs by run."""
    fields = tuple(
        (name, getattr(plugin, name))
        for name in (
            "rank", "use_collectives", "single_file_per_rank", "sync_files", "overwrite",
            "per_thread_copy_ahead",
        )
        if hasattr(plugin, name)
    )  # fmt: skip
    ids = tuple(
        (name, type(getattr(plugin, name)), len(getattr(plugin, name)))
        for name in ("save_id", "load_id")
        if hasattr(plugin, name)
    )
    paths = plugin.path.relative_to(root), plugin.checkpoint_id == plugin.path
    return fields, ids, paths, type(plugin.fs), type(plugin.transforms)
