"""Every call of DCP's interface: on several ranks in calls_worker.py, on one rank here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_cases
from support.saves import assert_loads, assert_whole, load, save
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_dcpx import DcpxReader, DcpxWriter

WORKER = Path(__file__).with_name("calls_worker.py")


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_on_several_ranks(tmp_path: Path, ranks: int) -> None:
    run_cases(WORKER, ranks, "all", tmp_path)


def test_converters_of_stock_read_and_write_our_checkpoints(tmp_path: Path) -> None:
    state = mixed_state(3)
    save(state, tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "whole.pt")
    assert_same(state, torch.load(tmp_path / "whole.pt", weights_only=True))
    torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "again")
    assert_same(state, load(state, tmp_path / "again"))


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize(
    "keys", [None, {"weights"}, {"weights.layer1", "scalar"}, {"optimizer.state"}]
)
def test_keys_alone_load_the_same_with_both_readers(tmp_path: Path, keys: set[str] | None) -> None:
    save(mixed_state(3), tmp_path)
    found = [
        _load_state_dict_from_keys(keys, storage_reader=reader(tmp_path))
        for reader in (DcpxReader, dcp.FileSystemReader)
    ]
    assert_same(found[1], found[0])
    assert found[0]


def test_part_of_a_state_loads_and_the_rest_is_not_read(tmp_path: Path) -> None:
    state = mixed_state(3)
    save(state, tmp_path)
    part = {"bf16": state["bf16"], "optimizer": state["optimizer"]}
    reader = DcpxReader(tmp_path)
    target = blank_like(part)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same(part, target)
    assert reader.last_report is not None
    assert reader.last_report.needed_bytes < state["bf16"].nbytes + 4096


def test_cached_plans_of_stock_save_what_the_state_holds_now(tmp_path: Path) -> None:
    state = {"a": torch.zeros(100), "b": {"c": torch.zeros(7, 9)}, "step": 0}
    for step in range(4):
        state["a"].fill_(step)
        state["step"] = step
        if step == 2:
            state["b"]["c"] = torch.full((3, 3), 2.0)  # type: ignore[index]
        dcp.save(
            state,
            storage_writer=DcpxWriter(tmp_path / str(step % 3)),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            no_dist=True,
        )
        assert_loads(state, tmp_path / str(step % 3))


@pytest.mark.parametrize("kwargs", [{}, {"single_file_per_rank": False}])
def test_save_without_a_tensor_or_without_anything(tmp_path: Path, kwargs: Any) -> None:
    for number, state in enumerate(({"step": 3}, {}, {"empty": torch.zeros(0)}, {"a": {}})):
        save(state, tmp_path / str(number), **kwargs)
        assert_whole(state, tmp_path / str(number))
