"""The data of a plan's items in memory of their own: a planner that gives nothing else."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem


class StagedItems:
    """The data of a plan's items. `state_dict` has those of whole entries by their names."""

    def __init__(self) -> None:
        self.state_dict: dict[str, Any] = {}
        self.by_index: dict[MetadataIndex, Any] = {}

    def keep(self, item: WriteItem, data: Any) -> None:
        """Takes what the item's data are."""
        if any(item.index.offset or ()):
            self.by_index[item.index] = data
        else:
            self.state_dict[item.index.fqn] = data

    def resolve_data(self, item: WriteItem) -> Any:
        """As a planner's: gives the item's data."""
        return self.by_index.get(item.index, self.state_dict.get(item.index.fqn))
