"""A save planner of your own, object by object: other values, another dtype, a name left out.

    python examples/custom_save_planner.py

`set_up_planner`    what is planned at all
`lookup_object`     which object is saved under a name
`transform_object`  what of it is written

Hooks that only see the data leave the planning, and the plans that are kept, as they are.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import torch_dcpx as dcpx


class SmallPlanner(dcpx.DcpxSavePlanner):
    """Saves averages in place of weights, large tensors as bfloat16, and no scratch."""

    def __init__(self, averages: dict[str, torch.Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.averages = averages  # by fqn: the names of the flattened state, with dots

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for fqn in [fqn for fqn in self.state_dict if fqn.startswith("scratch.")]:
            del self.state_dict[fqn]
            del self.mappings[fqn]

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return self.averages.get(index.fqn, found)

    def transform_object(self, write_item: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() >= 1000:
            return value.bfloat16()  # stored so; converted back where it is loaded
        return super().transform_object(write_item, value)  # serialises Python objects


def main(folder: str) -> None:
    state = {
        "model": {"weight": torch.full((1000, 100), 1 / 3), "bias": torch.zeros(3)},
        "scratch": {"buffer": torch.rand(1000, 100)},
        "step": 5,
    }
    planner = SmallPlanner({"model.bias": torch.full((3,), 0.5)})
    sizes = []
    for name, chosen in (("whole", None), ("small", planner)):
        report = dcpx.save(state, f"{folder}/{name}", planner=chosen).result()
        sizes.append(report.file_bytes)
    print(f"whole: {sizes[0]} B; with the planner {sizes[1] / sizes[0]:.1f} of them")

    loaded = {"model": {"weight": torch.zeros(1000, 100), "bias": torch.ones(3)}, "step": 0}
    report = dcpx.load(loaded, f"{folder}/small")
    weight, bias = loaded["model"].values()
    print(f"step {loaded['step']}, names that nobody asked for: {report.unexpected}")
    print(f"weight {weight.dtype}, rounded to bfloat16: {weight[0, 0].item()}")
    print(f"bias, the average: {bias.tolist()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
