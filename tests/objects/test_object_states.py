"""A monitor's script on a root in a store that is saved to, retained and damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from object_outcomes import Store
from support.small_managers import manager_of, save_steps

import torch_dcpx
import torch_dcpx.integrity.repair  # whose `publish` no test below replaces
from torch_dcpx.cli.app import app
from torch_dcpx.integrity import states
from torch_dcpx.storage.holder import Holder

HOUR = 3600.0
DATA = "__0_0.0123456789ab.distcp"


def dcpx(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def monitor(url: str, code: int = 0) -> dict[str, str]:
    """Runs what cron does; returns the states by name. All commands agree."""
    listed = {row["name"]: row["state"] for row in dcpx("ls", url, code=code)}
    verified = {
        row["path"].rpartition("/")[2]: row["state"] for row in dcpx("verify", url, code=code)
    }
    assert verified == listed
    (found,) = (row for row in dcpx("doctor", url) if row["name"] == "checkpoint")
    assert found["state"] == ("warning" if "unfinished" in listed.values() else "fine"), found
    text = "".join(CliRunner().invoke(app, [verb, url]).output for verb in ("ls", "verify", "gc"))
    assert ("dcpx repair" in text) == (code == 1), text
    return listed


def test_root_that_is_retained_is_sound(store: Store) -> None:
    manager = manager_of(store.url, keep_last=1)
    save_steps(manager, 1, 2, 3)
    wanted = {"step-1": "removed", "step-2": "removed", "step-3": "committed"}
    assert monitor(store.url) == wanted
    removed = dcpx("ls", store.url)[0]["problem"]
    assert "its manager has removed it (20" in removed and "stay until 20" in removed
    before = store.names()
    rows = dcpx("gc", store.url)
    assert [row["state"] for row in rows] == ["waiting", "waiting"]
    dcpx("gc", store.url, "--delete")
    assert store.names() == before  # loads under way may need them
    assert dcpx("repair", f"{store.url}/step-1", code=2)["error"]["type"] == "RepairError"
    assert dcpx("ls", store.url, "--newest", "--max-age", "1h")["step"] == 3
    rows = dcpx("gc", store.url, "--delete", "--grace", "0")
    assert [row["state"] for row in rows] == ["removed", "removed"]
    assert monitor(store.url) == {"step-3": "committed"}


def test_save_of_a_manager_under_way_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(store.url, keep_last=1)
    save_steps(manager, 1)
    seen: list[dict[str, str]] = []
    real = torch_dcpx.writer.commit.publish  # type: ignore[attr-defined]

    def publish(*args: Any, **kwargs: Any) -> None:
        seen.append(monitor(store.url))
        with pytest.raises(torch_dcpx.ConcurrentSaveError, match="a save is under way"):
            torch_dcpx.repair(f"{store.url}/step-2", dry_run=True)
        real(*args, **kwargs)

    monkeypatch.setattr("torch_dcpx.writer.commit.publish", publish)
    save_steps(manager, 2)
    assert seen == [{"step-1": "committed", "step-2": "saving"}]


def test_mark_of_a_manager_that_has_gone_is_of_no_save(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(store.url)
    save_steps(manager, 1)
    for name in (".dcpx.lock", DATA):
        store.put(f"step-2/{name}", b"")
    assert monitor(store.url)["step-2"] == "saving"
    with monkeypatch.context() as patch:
        patch.setattr(Holder, "fate", lambda *_: "gone")
        patch.setattr(states, "_YOUNG_S", 0.0)
        assert dcpx("ls", store.url, code=1)[1]["state"] == "unfinished"
    manager.close()
    monkeypatch.setattr(states, "_YOUNG_S", 0.0)
    (row,) = dcpx("ls", f"{store.url}/step-2", code=1)
    assert row["state"] == "unfinished" and "dcpx gc --delete" in row["problem"]


def test_lost_metadata_are_told_at_once(store: Store) -> None:
    save_steps(manager_of(store.url), 1, 2)
    store.delete("step-1/.metadata")
    assert monitor(store.url, 1) == {"step-1": "unfinished", "step-2": "committed"}
    (row, _) = dcpx("ls", store.url, code=1)
    command = f"dcpx repair --accept-assumptions {store.url}/step-1"
    assert command in row["problem"]
    dcpx(*command.split()[1:])
    assert monitor(store.url) == {"step-1": "committed", "step-2": "committed"}


def test_plain_save_under_way_shows_by_its_young_objects(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_dcpx.save({"w": torch.ones(9)}, f"{store.url}/step-1", no_dist=True)
    store.put(f"step-2/{DATA}", b"the begin")
    assert [row["state"] for row in dcpx("ls", store.url)] == ["committed", "saving"]
    assert [row["state"] for row in dcpx("verify", store.url)] == ["committed", "saving"]
    (row,) = dcpx("gc", store.url, "--delete")
    assert row["state"] == "saving" and "young" in row["problem"]
    assert store.kinds("step-2") == {"data"}
    monkeypatch.setattr(states, "_YOUNG_S", 0.0)
    found = dcpx("ls", store.url, code=1)
    assert [row["state"] for row in found] == ["committed", "unfinished"]


def test_storages_errors_are_two_and_damage_beats_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(manager_of(store.url), 1, 2, 3)
    opened = states.open_place

    def refuse(path: Any) -> Any:
        if path.name == "step-2":
            raise torch_dcpx.StorageError(f"list '{path}': refused", errno=13, path=str(path))
        return opened(path)

    monkeypatch.setattr(states, "open_place", refuse)
    for verb in ("ls", "verify", "gc"):
        rows = dcpx(verb, store.url, code=2)
        assert any("refused" in str(row) for row in rows), verb
    assert [row["state"] for row in dcpx("ls", store.url, code=2)] == [
        "committed", "unreadable", "committed",
    ]  # fmt: skip
    store.put("step-3/.metadata", b"nonsense")
    for verb in ("ls", "verify", "gc"):
        dcpx(verb, store.url, code=1)
