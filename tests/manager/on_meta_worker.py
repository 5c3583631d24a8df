"""Models on meta on two ranks: `test_on_meta.py` starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.states import assert_same
from support.worker import rank_case
from torch import nn
from torch.distributed.fsdp import fully_shard
from trainings import manager_of

import torch_dcpx as dcpx
from torch_dcpx import UnsupportedError


def sharded(device: str) -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def parts_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def shards_on_meta_are_refused_and_filled_once_they_have_memory(root: Path) -> None:
    saved = parts_of(sharded("cpu"))
    saved["model"](torch.ones(2, 8)).sum().backward()
    saved["optimizer"].step()
    manager_of(root / "sharded").save(1, **saved)
    model = sharded("meta")
    manager = manager_of(root / "sharded")
    for parts in ({"model": model}, parts_of(model)):
        with pytest.raises(UnsupportedError, match=r"'model\.0\.weight'.*to_empty"):
            manager.resume(**parts)
    assert all(one.is_meta for one in model.parameters())
    model.to_empty(device="cpu")
    parts = parts_of(model)
    assert manager.resume(**parts).tag == "step-1"
    assert_same(model.state_dict(), saved["model"].state_dict())
    assert len(parts["optimizer"].state) == 4
    other = sharded("meta")
    dcpx.load_pretrained(other, str(root / "sharded" / "step-1"))
    assert_same(other.state_dict(), saved["model"].state_dict())


def meta_on_one_rank_is_an_error_on_all(root: Path) -> None:
    model = nn.Linear(3, 3)
    manager = manager_of(root / "one")
    manager.save(1, model=model, state={"m": model})
    dcpx.save({"m": model}, root / "plain")
    with torch.device("meta" if dist.get_rank() == 1 else "cpu"):
        own = nn.Linear(3, 3)
    for state in ({"m": own}, {"m": own.state_dict()}):
        with pytest.raises(UnsupportedError, match=r"^rank 1 .* on meta.*'state\.m\.weight'"):
            manager.resume(state=state)
    with pytest.raises(UnsupportedError, match=r"^rank 1 .* on meta.*'model\.weight'"):
        manager.resume(model=own)
    with pytest.raises(UnsupportedError, match=r"^rank 1 .* on meta.*'m\.weight'"):
        dcpx.load({"m": own}, root / "plain")


def tensors_in_a_dict_get_memory_as_with_stock(root: Path) -> None:
    dcpx.save({"w": torch.ones(3), "n": [torch.ones(2)]}, root / "dict")
    state = {"w": torch.empty(3, device="meta"), "n": [torch.empty(2, device="meta")]}
    dcpx.load(state, root / "dict")
    assert_same(state, {"w": torch.ones(3), "n": [torch.ones(2)]})


@rank_case()
def main(root: Path) -> None:
    shards_on_meta_are_refused_and_filled_once_they_have_memory(root)
    meta_on_one_rank_is_an_error_on_all(root)
    tensors_in_a_dict_get_memory_as_with_stock(root)
