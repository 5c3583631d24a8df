"""What an export that was killed leaves behind: the next one to the same names removes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_artifact

import torch_dcpx as dcpx
from torch_dcpx.artifacts import files as export_files
from torch_dcpx.storage.save_lock import machine

TWO = {"a": torch.ones(9), "b": torch.ones(5)}


def kill_export(path: Path, when: str, **kwargs: Any) -> None:
    """Exports in a child that is killed where it calls a method of ArtifactFiles."""
    pid = os.fork()
    if pid == 0:
        try:
            setattr(export_files.ArtifactFiles, when, lambda *_: os.kill(os.getpid(), 9))
            dcpx.export(
                {name: torch.zeros_like(one) for name, one in TWO.items()},
                path,
                no_dist=True,
                overwrite=True,
                **kwargs,
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("when", "kind", "shard"),
    [("publish", "safetensors", 1), ("_sync", "safetensors", 1), ("_sync", "torch", 1 << 30)],
)
def test_next_export_removes_what_a_killed_one_left(
    tmp_path: Path, when: str, kind: str, shard: int
) -> None:
    out = tmp_path / "out"
    if kind == "safetensors":
        dcpx.export(TWO, out, max_shard_bytes=shard)
    kill_export(out, when, format=kind, max_shard_bytes=shard)
    left = [name for name in os.listdir(out) if name.endswith(".tmp")]
    assert left
    (out / ".mine.tmp").write_text("mine")
    if kind == "safetensors":
        dcpx.export(TWO, out, max_shard_bytes=shard, overwrite=True)
        (out / ".mine.tmp").unlink()
        assert_artifact(out, TWO)
    else:
        dcpx.export(TWO, out, format="torch")
        assert sorted(os.listdir(out)) == [".mine.tmp", "pytorch_model.bin"]


def test_only_own_names_of_this_machine_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"{machine()}-0123456789ab"
    gone = [
        f".model.safetensors.{own}.tmp",
        f".model.safetensors.index.json.{own}.tmp",
        f".model-00001-of-00002.safetensors.{own}.tmp",
        f".model-0123456789ab-00001-of-00002.safetensors.{own}.tmp",
    ]
    kept = [
        ".model.safetensors.deadbeef-0123456789ab.tmp",  # another machine's, or before a reboot
        f".other.safetensors.{own}.tmp",
        f".model.safetensors.{own[:-1]}.tmp",
        f".model.safetensors.{own}.tmp.txt",
        f"model.safetensors.{own}.tmp",
        f".pytorch_model.bin.{own}.tmp",
    ]
    for name in gone + kept:
        (tmp_path / name).write_text("x")
    link, kept_dir = tmp_path / gone[0], tmp_path / gone[1]
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")  # nobody's file: left alone, as a directory is
    kept_dir.unlink()
    kept_dir.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "boot_id", lambda: export_files.UNKNOWN_BOOT)
        dcpx.export(TWO, tmp_path)
        assert set(gone + kept) < set(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "_lock", lambda _: False)  # a file system without locks
        dcpx.export(TWO, tmp_path, overwrite=True)
        assert set(gone + kept) < set(os.listdir(tmp_path))
    dcpx.export(TWO, tmp_path, overwrite=True)
    assert set(os.listdir(tmp_path)) == {"model.safetensors", *kept, gone[0], gone[1]}
