"""`dcpx gc` removes what failed saves have left, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.saves import assert_loads, assert_whole, data_files, save

from torch_dcpx.cli.app import app
from torch_dcpx.storage import save_lock
from torch_dcpx.storage.names import LOCK_NAME

STATE = {"w": torch.arange(40.0), "step": 3}
FOREIGN = (
    "notes.txt", "__my_notes.distcp", "__00_0.distcp", "__0_0.distcp.bak", ".metadata.old",
    ".metadata.0123456789ab", "__0_0.0123456789AB.distcp", "__a.metadata",
)  # fmt: skip
LEFT = ("__0_7.distcp", "__3_0.0123456789ab.distcp", ".metadata.0123456789ab.tmp")


def gc(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["gc", *map(str, args), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def litter(folder: Path) -> None:
    for name in (*LEFT, *FOREIGN):
        (folder / name).write_bytes(b"12345")
    (folder / "__5_0.distcp").symlink_to(folder / "notes.txt")
    (folder / "__6_0.distcp").mkdir()


def test_gc_lists_and_with_delete_removes_what_no_metadata_names(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    own = set(data_files(tmp_path))
    litter(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    (found,) = gc(tmp_path)
    assert (found["state"], set(found["files"]), found["nbytes"]) == ("left", set(LEFT), 15)
    assert {path.name for path in tmp_path.iterdir()} == before
    text = CliRunner().invoke(app, ["gc", str(tmp_path)]).stdout
    assert "3 files left by saves that did not end: --delete removes them" in text
    (found,) = gc(tmp_path, "--delete")
    assert (found["state"], set(found["files"])) == ("removed", set(LEFT))
    assert {path.name for path in tmp_path.iterdir()} == before - set(LEFT)
    assert own <= before - set(LEFT)
    assert_loads(STATE, tmp_path)
    assert gc(tmp_path, "--delete") == []


def test_gc_touches_a_directory_without_metadata_only_by_its_name(tmp_path: Path) -> None:
    save(STATE, tmp_path / "step-1")
    save(STATE, tmp_path / "step-2")
    (tmp_path / "step-2/.metadata").unlink()
    names = {path.name for path in (tmp_path / "step-2").iterdir()}
    (found,) = gc(tmp_path, "--delete")
    assert found["state"] == "left" and "dcpx repair" in found["problem"]
    assert {path.name for path in (tmp_path / "step-2").iterdir()} == names
    (found,) = gc(tmp_path / "step-2")
    assert found["state"] == "left" and "dcpx repair" in found["problem"]
    (found,) = gc(tmp_path / "step-2", "--delete")
    assert found["state"] == "removed"
    assert data_files(tmp_path / "step-2") == []
    assert_whole(STATE, tmp_path / "step-1")


def test_gc_takes_no_file_beside_metadata_that_it_cannot_read(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    before = sorted(path.name for path in tmp_path.iterdir())
    (found,) = gc(tmp_path, "--delete", code=1)
    assert found["state"] == "unknown" and "dcpx repair" in found["problem"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_gc_waits_for_no_save_and_removes_nothing_of_it(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    litter(tmp_path)
    with (tmp_path / LOCK_NAME).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a rank-local save
        (found,) = gc(tmp_path, "--delete", code=2)
    assert found["state"] == "unknown" and "another save is writing" in found["problem"]
    assert all((tmp_path / name).exists() for name in LEFT)


def test_gc_leaves_files_where_no_lock_keeps_a_save_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path)
    litter(tmp_path)

    def refuse(fd: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(save_lock.fcntl, "flock", refuse)
    (found,) = gc(tmp_path, "--delete", code=2)
    assert "there are no locks" in found["problem"]
    assert all((tmp_path / name).exists() for name in LEFT)


def test_gc_leaves_files_of_another_machines_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path)
    litter(tmp_path)
    record = "host=far pid=1 boot=11111111-2222\n"
    (tmp_path / LOCK_NAME).write_text(record)
    (found,) = gc(tmp_path, "--delete", code=2)
    assert "another machine" in found["problem"]
    assert all((tmp_path / name).exists() for name in LEFT)
    assert (tmp_path / LOCK_NAME).read_text() == record  # the next save must know it, too
    monkeypatch.setattr(save_lock, "boot_id", lambda: "11111111-2222")
    assert gc(tmp_path, "--delete")[0]["state"] == "removed"


def test_gc_keeps_what_the_metadata_of_any_rank_names(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    import torch_dcpx

    writer = torch_dcpx.DcpxWriter(tmp_path)
    dcp.save(STATE, storage_writer=writer, no_dist=True, use_collectives=False)
    part = (tmp_path / data_files(tmp_path)[0]).read_bytes()[:200]  # of a rank that was killed
    (tmp_path / "__1_0.distcp").write_bytes(part)
    (found,) = gc(tmp_path, "--delete")
    assert set(found["files"]) == {"__1_0.distcp"}
    assert torch_dcpx.verify(tmp_path).ok
