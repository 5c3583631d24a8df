"""Exports from a store and to a store: bit for bit, over one that is there, with faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from object_exports import (
    INDEX,
    KINDS,
    MEMORY_BYTES,
    SINGLE,
    assert_equal,
    exported,
    names_at,
    tensors_of,
)
from object_managers import manager_of
from safetensors.torch import load_file

import torch_dcpx as dcpx
from torch_dcpx import NotCommittedError, StorageError, WriteOptions
from torch_dcpx.artifacts.writing import _Streams
from torch_dcpx.storage.object_store import Bucket

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
    object_prefix: str, object_endpoint: str, tmp_path: Path
) -> None:
    options = WriteOptions(endpoint=object_endpoint)
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
        dcpx.export(object_prefix, tmp_path / "m.safetensors", no_dist=True, overwrite=True)
    check_file(tmp_path / "m.safetensors", old)
    object_proxy.heal()
    dcpx.export(object_prefix, tmp_path / "m.safetensors", no_dist=True, overwrite=True)
    check_file(tmp_path / "m.safetensors", new)
    assert [one.name for one in tmp_path.iterdir()] == ["m.safetensors"]


# ---- To a store ----------------------------------------------------------------------------------


def fetched(server: ObjectServer, url: str, into: Path) -> set[str]:
    """Writes the objects beneath a URL to a folder; returns their names."""
    into.mkdir()
    keys = server.keys(url)
    for key in keys:
        (into / key.rpartition("/")[2]).write_bytes(server.get(f"{server.root}/{key}"))
    return {key.rpartition("/")[2] for key in keys}


@pytest.mark.parametrize("source", ["model", "checkpoint", "url"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_one_file_goes_to_a_store_and_comes_back(
    object_prefix: str,
    object_server: ObjectServer,
    tmp_path: Path,
    source: str,
    dtype: torch.dtype | None,
) -> None:
    model = model_of(5)
    given: Any = model
    if source != "model":
        given = str(tmp_path / "ckpt") if source == "checkpoint" else f"{object_prefix}/ckpt"
        dcpx.save({"model": model.state_dict(), "step": 3}, given)
    url = f"{object_prefix}/out"
    report = dcpx.export(given, url, dtype=dtype, no_dist=True)
    assert report.files == ("model.safetensors",) and report.path == url
    assert fetched(object_server, url, tmp_path / "got") == {"model.safetensors"}
    check_file(tmp_path / "got" / "model.safetensors", model, dtype or torch.float32)
    assert (tmp_path / "got" / "model.safetensors").stat().st_size == report.nbytes


def test_shards_replace_an_older_artifact_and_are_replaced(
    object_prefix: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    url = f"{object_prefix}/out"
    object_server.put(f"{url}/README.md", b"the user's own")
    dcpx.export(model_of(1), url, no_dist=True)
    for seed in (2, 3):
        model = model_of(seed)
        report = dcpx.export(model, url, max_shard_bytes=150_000, no_dist=True, overwrite=True)
        folder = tmp_path / str(seed)
        assert len(report.files) == 2
        index = "model.safetensors.index.json"
        assert fetched(object_server, url, folder) == {*report.files, index, "README.md"}
        found = {}
        for file in report.files:
            found |= load_file(folder / file)
        weight_map = json.loads((folder / index).read_bytes())["weight_map"]
        assert weight_map.keys() == found.keys() and {*weight_map.values()} == {*report.files}
        assert all(torch.equal(found[name], one) for name, one in model.state_dict().items())
    dcpx.export(model_of(4), f"{url}/model.safetensors", no_dist=True, overwrite=True)
    assert fetched(object_server, url, tmp_path / "4") == {"model.safetensors", "README.md"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_meanwhile_is_not_replaced_unasked(
    object_prefix: str, object_server: ObjectServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, shard_bytes = KINDS[kind]
    url, name = f"{object_prefix}/out", INDEX if kind == "shards" else SINGLE
    others = b"another export's"
    real = Bucket.put_if

    def meanwhile(*args: Any) -> None:
        object_server.put(f"{url}/{name}", others)
        real(*args)

    def pieces(*args: Any) -> Any:
        object_server.put(f"{url}/{name}", others)
        return filled(*args)

    filled = _Streams._filled
    options = WriteOptions(host_memory_bytes=MEMORY_BYTES)
    given: Any = {"max_shard_bytes": shard_bytes, "options": options, "no_dist": True}
    with monkeypatch.context() as patch:
        if kind == "parts":
            patch.setattr(_Streams, "_filled", pieces)
        else:
            patch.setattr(Bucket, "put_if", meanwhile)
        with pytest.raises(dcpx.OptionError, match=f"{name}' is there; name another file"):
            dcpx.export(tensors_of(1, numel), url, **given)
    assert object_server.get(f"{url}/{name}") == others
    assert names_at(object_server, url) == {name}
    object_server.delete(f"{url}/{name}")
    dcpx.export(tensors_of(1, numel), url, **given)
    assert_equal(exported(object_server, url)[0], tensors_of(1, numel))


def test_files_beside_that_are_there_are_not_replaced_unasked(
    object_prefix: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    object_server.put(f"{object_prefix}/out/config.json", b"the user's own")
    url = f"{object_prefix}/out"
    with pytest.raises(dcpx.OptionError, match=r"out/config\.json' is there"):
        dcpx.export(model_of(1), url, config=tmp_path, no_dist=True)
    assert names_at(object_server, url) == {"config.json"}
    object_server.put(f"{object_prefix}/out/config.json", b"{}")
    dcpx.export(model_of(1), url, config=tmp_path, no_dist=True)
