"""dcpx.export by one rank: the real safetensors package opens it and finds the same bits."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as st
import torch
import torch.distributed.checkpoint as dcp
from export_cases import assert_artifact, mixed_state, read_artifact
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import _C, KeyMap, Merge, Split, Transpose, WriteOptions
from torch_dcpx.storage.directory import Directory

SMALL = WriteOptions(host_memory_bytes=1 << 20, slot_bytes=256 << 10)


@pytest.mark.parametrize("source", ["state", "ours", "stock", "artifact"])
@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small"])
def test_artifact_holds_the_sources_bits(
    tmp_path: Path, source: str, options: WriteOptions | None
) -> None:
    state = mixed_state()
    given: Any = state
    if source == "ours":
        dcpx.save(state, tmp_path / "ckpt")
    elif source == "stock":
        dcp.save(dict(state), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    elif source == "artifact":
        (tmp_path / "ckpt").mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
        st.save_file(contiguous, tmp_path / "ckpt" / "model.safetensors")
    if source != "state":
        given = tmp_path / "ckpt"
    report = dcpx.export(given, tmp_path / "out", options=options)
    assert_artifact(tmp_path / "out", state)
    assert report.files == ("model.safetensors",)
    assert report.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as held:
        assert held.metadata() == {"format": "pt"}


@pytest.mark.parametrize("max_shard_bytes", [1, 50_000, "100KB", "1GiB"])
def test_shards_have_hugging_faces_names_and_index(
    tmp_path: Path, max_shard_bytes: int | str
) -> None:
    state = mixed_state()
    report = dcpx.export(state, tmp_path, max_shard_bytes=max_shard_bytes)
    assert_artifact(tmp_path, state)
    if max_shard_bytes == "1GiB":
        assert report.files == ("model.safetensors",)
        return
    count = len(report.files)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert list(report.files) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert index["metadata"] == {"total_size": total}


def test_export_replaces_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors.txt").write_text("mine")
    (tmp_path / "config.json").write_text("mine")
    first, second = (
        {"a": torch.ones(9), "b": torch.ones(5)},
        {"a": torch.zeros(9), "c": torch.ones(4)},
    )
    for state, shard in ((first, 1), (second, 1), (first, "5GB"), (second, "5GB"), (first, 1)):
        dcpx.export(state, tmp_path, max_shard_bytes=shard, overwrite=True)
        assert_artifact(tmp_path, state)
        count = len(list(tmp_path.iterdir())) - 2
        assert count == (3 if shard == 1 else 1)
    assert (tmp_path / "config.json").read_text() == "mine"


def test_tied_weights_are_kept_once_as_save_model_does(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 4)
            self.head = nn.Linear(4, 20, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    report = dcpx.export(model, tmp_path)
    assert report.aliases == (("head.weight", "embed.weight"),)
    assert list(read_artifact(tmp_path)) == ["embed.weight"]
    assert st.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.head.weight)
    third = Tied().to("meta")
    third.head.weight = third.embed.weight
    dcpx.load_pretrained(third, tmp_path)
    assert torch.equal(third.head.weight, model.head.weight)


def test_only_the_model_of_a_checkpoint_with_parts_unless_told_otherwise(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "optim": {"m": torch.ones(3)}, "step": 4}
    dcpx.save(state, tmp_path / "ckpt")
    for source in (state, tmp_path / "ckpt"):
        report = dcpx.export(source, tmp_path / "a", overwrite=True)
        assert list(read_artifact(tmp_path / "a")) == ["w"]
        assert report.skipped == ("optim.m", "step")
        dcpx.export(source, tmp_path / "b", keys=["model.*", "optim.*"], overwrite=True)
        assert sorted(read_artifact(tmp_path / "b")) == ["model.w", "optim.m"]
        with pytest.raises(dcpx.UnsupportedError, match=r"1 object: 'step'"):
            dcpx.export(source, tmp_path / "c", keys="*")
        with pytest.raises(dcpx.PlanError, match="nothing is named 'none"):
            dcpx.export(source, tmp_path / "c", keys=["none*"])
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("is_stored", [False, True])
def test_key_map_renames_splits_merges_and_transposes_on_the_way(
    tmp_path: Path, is_stored: bool
) -> None:
    qkv, a, b, w = torch.randn(6, 4), torch.randn(2, 3), torch.randn(5, 3), torch.randn(4, 9)
    state: Any = {"module.qkv": qkv, "e.0": a, "e.1": b, "_orig_mod.w": w}
    if is_stored:
        dcpx.save(state, tmp_path / "ckpt")
        state = tmp_path / "ckpt"
    rules = KeyMap(
        Split("qkv", ["q", "k", "v"], dim=0), Merge(r"e\.(\d)", "e", dim=0), Transpose("w"),
        (r"^w$", "head.weight"),
    ).rules  # fmt: skip
    with pytest.raises(dcpx.PlanError, match="no stored name: 'qkv'; wrappers=True in the KeyMap"):
        dcpx.export(state, tmp_path / "out", key_map=KeyMap(*rules))
    dcpx.export(state, tmp_path / "out", key_map=KeyMap(*rules, wrappers=True))
    q, k, v = qkv.chunk(3)
    expected = {"q": q, "k": k, "v": v, "e": torch.cat([a, b]), "head.weight": w.T}
    assert_artifact(tmp_path / "out", expected)


def test_what_the_format_cannot_hold_is_refused_with_all_names(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "c": torch.ones(2).to(torch.complex128), "d": torch.ones(2)}
    with pytest.raises(dcpx.UnsupportedError, match=r"1 tensor: 'c' \(complex128\)"):
        dcpx.export(state, tmp_path / "out")
    with pytest.raises(dcpx.UnsupportedError, match="sparse"):
        dcpx.export({"s": torch.ones(2, 2).to_sparse()}, tmp_path / "out")
    with pytest.raises(dcpx.OptionError):
        dcpx.export(5, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("shard", [1000, "5GB"], ids=["index", "single"])
def test_any_system_call_that_fails_leaves_the_artifact_that_was_there(
    tmp_path: Path, no_leaks: object, shard: int | str
) -> None:
    old, new = {"a": torch.ones(900)}, {"a": torch.zeros(900), "b": torch.ones(700)}
    _C.arm_fault(0, errno.ENOSPC, "pwrite")
    with pytest.raises(dcpx.StorageError, match="No space left"):
        dcpx.export(old, tmp_path, max_shard_bytes=shard)
    _C.disarm_fault()
    assert not list(tmp_path.iterdir())
    dcpx.export(old, tmp_path, max_shard_bytes=shard)
    failures = 0
    for nth in range(60):
        _C.arm_fault(nth, errno.EIO)
        try:
            dcpx.export(new, tmp_path, max_shard_bytes=shard, overwrite=True)
        except dcpx.StorageError:
            failures += 1
            assert_artifact(tmp_path, old)
        else:
            break
        finally:
            _C.disarm_fault()
    assert failures >= 4
    assert_artifact(tmp_path, new)


@pytest.mark.parametrize("call", ["create", "rename", "sync"])
def test_commit_that_fails_halfway_leaves_the_artifact_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    old, new = {"a": torch.ones(9), "b": torch.ones(5)}, {"a": torch.zeros(9), "b": torch.zeros(5)}
    dcpx.export(old, tmp_path, max_shard_bytes=1)
    real = getattr(Directory, call)
    for nth in range({"create": 1, "rename": 3, "sync": 1}[call]):
        calls = itertools.count()

        def failing(*args: Any, nth: int = nth, calls: Any = calls, **kwargs: Any) -> Any:
            if next(calls) == nth:
                raise dcpx.StorageError("it fails here", errno=errno.EIO)
            return real(*args, **kwargs)

        monkeypatch.setattr(Directory, call, failing)
        with pytest.raises(dcpx.StorageError, match="it fails here"):
            dcpx.export(new, tmp_path, max_shard_bytes=1, overwrite=True)
        assert_artifact(tmp_path, old)
        assert len(list(tmp_path.iterdir())) == 3


def test_hole_in_a_checkpoint_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    dcpx.save({"w": torch.ones(8, 2)}, tmp_path / "ckpt")
    from torch_dcpx.artifacts.sources import Offer
    from torch_dcpx.artifacts.stored_source import StoredSource

    offers = StoredSource.offers
    try:
        StoredSource.offers = lambda *_: [Offer("w", (((0, 0), (7, 2)),), "w")]  # type: ignore[method-assign, assignment]
        with pytest.raises(dcpx.CorruptionError, match=r"holds element \[7, 0\]"):
            dcpx.export(tmp_path / "ckpt", tmp_path / "out")
    finally:
        StoredSource.offers = offers  # type: ignore[method-assign]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # 4 s: 128 MiB
def test_memory_besides_the_state_stays_within_the_budget(tmp_path: Path) -> None:
    state = {"w": torch.ones(64 << 20, dtype=torch.uint8), "t": torch.ones(4096, 4096).T}
    dcpx.save(state, tmp_path / "ckpt")
    options = WriteOptions(host_memory_bytes=8 << 20, slot_bytes=1 << 20)
    for number, source in enumerate((state, tmp_path / "ckpt")):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        dcpx.export(source, tmp_path / f"out{number}", options=options)
        assert _status("VmHWM") - before < 24 << 20, number
    del source
    assert os.path.getsize(tmp_path / "out0" / "model.safetensors") > 128 << 20


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10
