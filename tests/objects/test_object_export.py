"""Exports from a store: of a checkpoint by its URL, and of a manager's tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from object_managers import manager_of
from safetensors.torch import load_file

import torch_dcpx as dcpx
from torch_dcpx import NotCommittedError, StorageError, WriteOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 70))


def check_file(path: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    found, wanted = load_file(path), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_in_a_store_becomes_files(
    object_prefix: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = model_of(1)
    dcpx.save({"model": model.state_dict(), "step": 3}, object_prefix)
    report = dcpx.export(object_prefix, tmp_path / "m.safetensors", dtype=dtype, no_dist=True)
    assert (report.tensors, report.skipped) == (4, ("step",))
    check_file(tmp_path / "m.safetensors", model, dtype)
    dcpx.export(object_prefix, tmp_path / "m.pt", keys=["*"], no_dist=True)
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["step"] == 3 and torch.equal(found["model.1.bias"], model.state_dict()["1.bias"])
    assert dcpx.KeyMap().dry_run(object_prefix).dropped == ()


def test_tag_of_a_manager_becomes_files_by_the_endpoint_of_its_options(
    object_prefix: str,
    object_server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = WriteOptions(endpoint=object_server.url)
    manager, model = manager_of(object_prefix, options=options), model_of(2)
    manager.save(7, model=model)
    manager.export(7, tmp_path / "out")
    check_file(tmp_path / "out" / "model.safetensors", model)
    with pytest.raises(NotCommittedError):
        manager.export(8, tmp_path / "out")


def test_failing_reads_leave_the_old_file(
    object_prefix: str, object_proxy: FaultProxy, tmp_path: Path
) -> None:
    old, new = model_of(3), model_of(4)
    dcpx.export(old, tmp_path / "m.safetensors", no_dist=True)
    dcpx.save({"model": new.state_dict()}, object_prefix)
    object_proxy.fail("get_object", "truncate", key="distcp", times=None)
    with pytest.raises(StorageError, match=r"get .*distcp"):
        dcpx.export(object_prefix, tmp_path / "m.safetensors", no_dist=True)
    check_file(tmp_path / "m.safetensors", old)
    object_proxy.heal()
    dcpx.export(object_prefix, tmp_path / "m.safetensors", no_dist=True)
    check_file(tmp_path / "m.safetensors", new)
    assert [one.name for one in tmp_path.iterdir()] == ["m.safetensors"]
