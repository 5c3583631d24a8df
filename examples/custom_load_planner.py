"""A load planner of your own: fills names that the checkpoint does not hold.

    python examples/custom_load_planner.py

The model has grown since the save: an adapter, and an average of the weights.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import torch_dcpx as dcpx


class FillingPlanner(dcpx.DcpxLoadPlanner):
    """Fills what is not stored: from another stored name where there is one, else by a function.

    Args:
        sources: prefix of missing names to the prefix under which their values are stored.
        fill: gets each other missing tensor, a DTensor too, and changes it in place.
    """

    def __init__(self, sources: dict[str, str], fill: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(allow_partial_load=True)  # missing names are ours to fill
        self.sources = sources
        self.fill = fill
        self.filled: list[str] = []

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        stored = self.metadata.state_dict_metadata
        items = list(plan.items)
        for fqn, target in self.state_dict.items():
            if fqn in stored or not isinstance(target, torch.Tensor):
                continue
            source = self.source_of(fqn)
            if source in stored:
                items += self.items_from(source, fqn, target)
            else:
                with torch.no_grad():
                    self.fill(target)
            self.filled.append(fqn)
        return dataclasses.replace(plan, items=items)

    def items_from(self, source: str, fqn: str, target: torch.Tensor) -> list[ReadItem]:
        """Returns what reads a stored name into the tensor, or shard, of another name."""
        planner = dcpx.DcpxLoadPlanner()
        planner.set_up_planner({source: target}, self.metadata)
        return [
            dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=fqn))
            for item in planner.create_local_plan().items
        ]

    def source_of(self, fqn: str) -> str | None:
        for prefix, stored in self.sources.items():
            if fqn.startswith(prefix):
                return stored + fqn.removeprefix(prefix)
        return None


def main(path: str) -> None:
    torch.manual_seed(0)
    old = torch.nn.Linear(4, 2)
    dcpx.save({"model": old.state_dict(), "step": 7}, path)

    grown = torch.nn.Linear(4, 2)
    state = {
        "model": {**grown.state_dict(), "adapter": torch.rand(2, 2)},
        "average": torch.nn.Linear(4, 2).state_dict(),
        "step": 0,
    }
    try:
        dcpx.load(state, path)
    except dcpx.MismatchError as error:
        print(f"without the planner: missing {sorted(error.missing)}")

    planner = FillingPlanner({"average.": "model."}, torch.nn.init.zeros_)
    dcpx.load(state, path, planner=planner)
    print(f"filled {sorted(planner.filled)}")
    print(f"average is the stored weight: {torch.equal(state['average']['weight'], old.weight)}")
    print(f"adapter: {state['model']['adapter'].tolist()}, step {state['step']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(f"{folder}/step-7")
