"""A monitor's script on a root in a directory that is saved to, retained and damaged."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import dcpx, json_of
from support.held_saves import under_way
from support.machine import seconds
from support.saves import change, data_files, save
from support.warm import warm_parent

import torch_dcpx
from torch_dcpx.errors import StorageError
from torch_dcpx.integrity import states

STATE = {"w": torch.arange(4000.0), "step": 3}
VERBS = ("ls", "verify", "gc")


def checkpoint_check(path: Path) -> tuple[str, str]:
    (found,) = (row for row in json_of("doctor", path) if row["name"] == "checkpoint")
    return found["state"], found["text"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with torch_dcpx.CheckpointManager(tmp_path / "run", no_dist=True, keep_last=3) as manager:
        for step in range(1, 6):
            manager.save(step, state={"w": torch.ones(30)})
        manager.wait()
    return tmp_path / "run"


def test_healthy_root_with_a_save_under_way_and_a_removed_one_is_sound(root: Path) -> None:
    (root / "step-3/.metadata").rename(root / "step-3/.dcpx.deleted")
    places = (root / "step-4", root / "step-6")  # over another one, and a new one
    with under_way(places[0], STATE), under_way(places[1], STATE):
        listed = json_of("ls", root)
        assert [row["state"] for row in listed] == ["removed", "committed", "committed", "saving"]
        assert f"pid={os.getpid()}" in listed[1]["saving"]
        verified = json_of("verify", root)
        assert [row["state"] for row in verified] == [row["state"] for row in listed]
        assert [row["step"] for row in verified] == [3, 4, 5, 6]
        waiting, *_ = json_of("gc", root)
        assert waiting["state"] == "waiting"
        assert checkpoint_check(root) == (
            "fine", "root of 2 checkpoints, 1 removed, 1 being saved",
        )  # fmt: skip
        shown = "".join(dcpx(verb, root).output for verb in VERBS)
        assert "dcpx repair" not in shown and "did not end" not in shown
        for step in (3, 6):
            assert "error" in json_of("repair", root / f"step-{step}", code=2)
        json_of("verify", root / "step-6", code=2)  # it is no checkpoint yet
        (root / "step-6/__7_0.distcp").touch()
        for line in ("inspect", "cat", "stats"):
            error = json_of(line, root / "step-6", *["step"] * (line == "cat"), code=2)["error"]
            assert f"a save is under way (host={socket.gethostname()} pid=" in error["message"]
        (root / "step-6/__7_0.distcp").unlink()
        names = {path: data_files(path) for path in places}
        json_of("gc", root, "--delete")
        assert names == {path: data_files(path) for path in places}
    assert json_of("ls", root, "--newest")["step"] == 6
    assert [row["state"] for row in json_of("ls", root)] == ["removed"] + ["committed"] * 3


def test_every_command_reads_the_same_of_a_save_that_did_not_end(root: Path) -> None:
    (root / "step-5/.metadata").unlink()
    (root / "step-6").mkdir()
    (root / "step-6/__0_0.distcp").write_bytes(b"a part")
    listed = json_of("ls", root, code=1)
    assert [row["state"] for row in listed] == ["committed"] * 2 + ["unfinished"] * 2
    assert "dcpx repair --accept-assumptions" in listed[2]["problem"]
    assert "no repair can help: `dcpx gc --delete" in listed[3]["problem"]
    json_of("verify", root, code=1)
    assert checkpoint_check(root)[0] == "warning"
    assert [row["state"] for row in json_of("gc", root)] == ["left", "left"]
    for row, args in ((listed[2], ()), (listed[3], ())):  # the advice, as it is written
        line = row["problem"].split("`")[1].split()
        assert line[0] == "dcpx"
        json_of(*line[1:], *args)
    assert [row["state"] for row in json_of("ls", root)] == ["committed"] * 3
    json_of("verify", root)


def test_damage_is_one_storages_errors_are_two_and_damage_beats_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = states.open_place

    def refuse(path: Any) -> Any:  # tests may run as root, whom no mode refuses
        if path.name in ("step-4", "lost+found", "private"):
            text = f"open directory '{path}': Permission denied"
            raise StorageError(text, errno=13, path=str(path))
        return opened(path)

    monkeypatch.setattr(states, "open_place", refuse)
    for name in ("lost+found", "private"):
        (root / name).mkdir()
    for verb in VERBS:
        assert len(json_of(verb, root, code=2)) >= 1
        shown = dcpx(verb, root).output
        assert "lost+found" in shown and "step-4" in shown and "Permission denied" in shown
    change(root / "step-5/__0_0.distcp", 100, b"\xff\xff")
    json_of("verify", root, code=1)
    (root / "step-5/.metadata").write_bytes(b"nonsense")
    for verb in VERBS:
        json_of(verb, root, code=1)
    for name in ("step-4", "step-5"):
        for path in (root / name).iterdir():
            path.unlink()
        (root / name).rmdir()
    for verb in VERBS:  # what is left is sound, and two notes
        json_of(verb, root)


def test_trainers_output_is_shown_two_levels_down(tmp_path: Path) -> None:
    for step in (500, 1000):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            save(STATE, tmp_path / f"checkpoint-{step}" / part, "stock")
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    (tmp_path / "runs/deep/er").mkdir(parents=True)
    wanted = [
        (f"checkpoint-{step}/{part}", step, "committed")
        for step in (500, 1000)
        for part in ("optimizer_0", "pytorch_model_fsdp_0")
    ]
    assert [(row["name"], row["step"], row["state"]) for row in json_of("ls", tmp_path)] == wanted
    assert [row["step"] for row in json_of("verify", tmp_path)] == [500, 500, 1000, 1000]
    assert checkpoint_check(tmp_path) == ("fine", "root of 4 checkpoints")
    assert json_of("gc", tmp_path) == []


JOB = """
import sys, torch, torch_dcpx
from pathlib import Path
with torch_dcpx.CheckpointManager(sys.argv[1], no_dist=True, keep_last=2) as manager:
    step = 0
    while not Path(sys.argv[2]).exists():
        step += 1
        manager.save(step, state={"w": torch.ones(3000)})
"""


def test_verify_beside_retention_never_calls_what_it_removes_damaged(tmp_path: Path) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    out = sys.__stderr__
    job = warm_parent().start(["-c", JOB, str(run), str(end)], out, out, env=os.environ)
    try:
        while not (run / "step-3").exists():
            assert job.poll() is None
        for _ in range(6):
            for verb in VERBS:
                result = dcpx(verb, run)
                assert result.exit_code == 0, result.output
        end.touch()
        assert job.wait(seconds(60)) == 0
    finally:
        job.kill()
    assert json_of("ls", run, "--newest")["step"] > 3


def test_doctor_sees_damage_as_ls_does(root: Path) -> None:
    (root / "step-4/__0_0.distcp").write_bytes(b"x")
    os.truncate(root / "step-5/.metadata", 900)
    state, text = checkpoint_check(root / "step-4")
    assert state == "warning" and "a committed one, 1 data file, 1 of 1 short: '__0_0" in text
    assert f"`dcpx verify {root / 'step-4'}`" in text
    state, text = checkpoint_check(root / "step-5")
    assert state == "warning" and "unreadable: CorruptionError" in text and "dcpx repair" in text
    state, text = checkpoint_check(root)
    assert (state, text) == (
        "warning", f"root of 1 checkpoint, 2 damaged (see `dcpx ls {root}`)",
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["doctor", "ls"])
def test_look_at_a_root_imports_no_torch(root: Path, verb: str) -> None:
    code = (
        "import sys, torch_dcpx.cli as cli, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['dcpx', {verb!r}, {str(root)!r}]\n"
        "cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ("root of 3 checkpoints" if verb == "doctor" else "whole") in result.stdout
    assert result.stderr.splitlines()[-1] == "False"
