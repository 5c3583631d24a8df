"""`dcpx.inspect` returns what a checkpoint holds, and shows it in few lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app

STATE: dict[str, Any] = {
    "model": {"w": torch.ones(20, 30), "b": torch.ones(5, dtype=torch.int64)},
    "optimizer": {"exp_avg": torch.ones(20, 30)},
    "step": 3,
}


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_it_holds_items_parts_files_and_sums(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path, writer)
    found = dcpx.inspect(tmp_path)
    items = {item.fqn: item for item in found.items}
    assert sorted(items) == ["model.b", "model.w", "optimizer.exp_avg", "step"]
    item = items["model.w"]
    assert (item.kind, item.dtype, item.shape) == ("tensor", "float32", (20, 30))
    (part,) = item.parts
    assert part.sizes == (20, 30) and part.nbytes == item.nbytes >= 2400
    assert part.file in data_files(tmp_path)
    assert found.parameters == 605 and found.faults == []
    assert found.dtypes == {"float32": 2, "int64": 1}
    assert found.stored_nbytes == sum(one.nbytes for one in found.items)
    assert len(str(found).splitlines()) == 6 and "605 parameters" in str(found)
    assert found._repr_html_().count("<tr>") == 5 and len(repr(found)) < 600


def test_keys_are_names_first_then_globs_and_are_summed_alone(tmp_path: Path) -> None:
    save({"w[0]": torch.ones(2), "w0": torch.ones(3), "v": torch.ones(4)}, tmp_path)
    assert [item.fqn for item in dcpx.inspect(tmp_path, "w[0]").items] == ["w[0]"]
    found = dcpx.inspect(tmp_path, ["v", "w[01]"])
    assert [item.fqn for item in found.items] == ["w0", "v"] and found.parameters == 7
    assert found.stored_nbytes == sum(item.nbytes for item in found.items)
    with pytest.raises(dcpx.UnknownNameError, match="did you mean 'w0'") as raised:
        dcpx.inspect(tmp_path, "w00")
    assert (raised.value.path, raised.value.fqn) == (str(tmp_path), "w00")
    with pytest.raises(dcpx.OptionError, match="keys"):
        dcpx.inspect(tmp_path, [3])  # type: ignore[list-item]


def test_it_has_each_ranks_own_metadata(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path, rank)
    found = dcpx.inspect(tmp_path, "step")
    assert [each.metadata_file for each in found.saves] == ["__0.metadata", "__1.metadata"]
    assert len(found.items) == 2 and "each of 2 ranks saved its own" in found.head()
    assert [row[0] for row in found.table().rows] == ["__0.metadata", "__1.metadata"]
    shown = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).stdout)
    assert [each["metadata_file"] for each in shown] == ["__0.metadata", "__1.metadata"]


def test_what_is_no_checkpoint_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(dcpx.NotCommittedError) as raised:
        dcpx.inspect(tmp_path)
    assert not raised.value.files
    save(STATE, tmp_path)
    (name,) = data_files(tmp_path)
    (tmp_path / name).rename(tmp_path / "away")
    assert dcpx.inspect(tmp_path).faults == [f"'{name}' is missing"]
    (tmp_path / "away").rename(tmp_path / name)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(dcpx.NotCommittedError) as raised:
        dcpx.inspect(tmp_path)
    assert raised.value.files == 1


FACTS = ("step", "saved_at", "ranks", "pinned", "state", "save_id")


def told(*args: object) -> dict[str, Any]:
    """Returns what a command says of one checkpoint in JSON."""
    found = json.loads(CliRunner().invoke(app, [*map(str, args), "--json"]).stdout)
    one: dict[str, Any] = found[0] if isinstance(found, list) else found
    return {name: one[name] for name in FACTS}


def test_a_monitor_reads_the_same_of_inspect_ls_and_verify(tmp_path: Path) -> None:
    with dcpx.CheckpointManager(tmp_path) as manager:
        manager.save("best", model=torch.nn.Linear(2, 2), step=31)
        manager.wait()
        manager.pin("best")
    path = tmp_path / "best"
    found = dcpx.inspect(path)
    facts = {name: getattr(found, name) for name in FACTS}
    assert told("inspect", path) == told("ls", path) == told("verify", path) == facts
    assert (found.step, found.ranks, found.pinned, found.state) == (31, 1, True, "committed")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.saved_at or "")
    assert f", step 31, saved {found.saved_at}; " in found.head()
    (name,) = data_files(path)
    (path / name).unlink()
    states = {told(command, path)["state"] for command in ("inspect", "ls", "verify")}
    assert states == {"committed"}
    assert dcpx.ls(path).checkpoints[0].found == "1 of 1 missing" and dcpx.inspect(path).faults


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_a_name_says_the_step_of_what_no_manager_saved(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path / "step-7", writer)
    found = told("inspect", tmp_path / "step-7")
    assert found == told("ls", tmp_path / "step-7") == told("verify", tmp_path / "step-7")
    assert (found["step"], found["ranks"], found["state"]) == (7, 1, "committed")


def test_facts_of_each_ranks_own_and_of_an_export(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path / "a", rank)
    assert told("inspect", tmp_path / "a") == told("ls", tmp_path / "a")
    assert dcpx.inspect(tmp_path / "a").ranks == 2
    out = tmp_path / "checkpoint-500" / "m.safetensors"
    out.parent.mkdir()
    dcpx.export(STATE["model"], out, no_dist=True)
    found = told("inspect", out)
    assert found == told("verify", out) and found["saved_at"] is not None
    assert found == {**found, "step": 500, "state": "committed", "ranks": None, "save_id": ""}
    verified = json.loads(CliRunner().invoke(app, ["verify", str(out), "--json"]).stdout)
    assert "no bytes" in verified["proved"]


def test_a_rank_whose_own_save_did_not_end_is_damage(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path, rank)
    (tmp_path / "__1.metadata").unlink()
    assert dcpx.inspect(tmp_path).state == told("ls", tmp_path)["state"] == "committed"
    (one,) = dcpx.ls(tmp_path).checkpoints
    assert (one.whole, one.found) == (False, "a rank's metadata missing")
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 1
