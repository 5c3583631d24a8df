"""accelerate under the hook: `save_state`, `load_state`, `merge-weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.frameworks import check_page, check_seen
from support.resume_cases import ResumeCases, Trained
from support.states import assert_same
from torch.distributed.checkpoint._nested_dict import flatten_state_dict


def values_of(merged: Path) -> dict[str, Any]:
    """Returns merged values by name, sorted: stock and we write names in orders of their own."""
    state = load_file(merged) if merged.suffix == ".safetensors" else torch.load(merged)
    return dict(sorted(flatten_state_dict(state)[0].items()))


class TestFsdp2(ResumeCases):
    NAME = "accelerate"
    CHECKPOINT = "step_{}"
    REFUSES_TORN = "NotCommittedError"

    @pytest.mark.parametrize("part", ResumeCases.PARTS)
    def test_merged_weights_equal_those_of_stock(
        self, trained: Trained, tmp_path: Path, part: str
    ) -> None:
        merge = [str(trained.framework.bin / "accelerate"), "merge-weights"]
        if part == "optimizer_0":  # its numbers are no tensors, which safetensors cannot hold
            merge.append("--unsafe_serialization")
        for side, hook in (("ours", True), ("stock", False)):
            checkpoint = trained.framework.folder / side / "step_6" / part
            run = trained.framework.run([*merge, str(checkpoint), str(tmp_path / side)], hook=hook)
            if hook:
                check_seen(run, "reader")
        (ours,) = (tmp_path / "ours").iterdir()
        assert_same(values_of(tmp_path / "stock" / ours.name), values_of(ours))


class TestFsdp1(TestFsdp2):
    ARGUMENTS = ("--fsdp", 1)


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("accelerate", tmp_path)
