"""`dcpx` on `s3://` URLs: what it prints, by how many requests, and what it leaves there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from object_outcomes import Store, retries
from safetensors.torch import save as safetensors_of
from support.saves import save, save_rank_local
from support.states import assert_same, blank_like

import torch_dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    OutcomeUnknownError,
    RepairError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_store

pytestmark = pytest.mark.usefixtures("proxy")

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(5)},
    "step": 3,
}


def dcpx(*args: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in args], prog_name="dcpx")


def printed(*args: object, code: int = 0) -> Any:
    """What a command says with --json."""
    result = dcpx(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def saved(store: Store, name: str = "a", state: dict[str, Any] = STATE) -> str:
    url = f"{store.url}/{name}"
    torch_dcpx.save(state, url)
    store.proxy.clear()
    return url


def asked(store: Store) -> list[tuple[str, str]]:
    """Returns (kind, last name of the key) of all requests."""
    found = [(one.kind, one.key.rstrip("/").rpartition("/")[2]) for one in store.proxy.requests()]
    store.proxy.clear()
    return found


# ---- ls, inspect --------------------------------------------------------------------------------


def test_ls_and_inspect_of_a_checkpoint_cost_a_listing_and_its_metadata(store: Store) -> None:
    url = saved(store)
    (row,) = printed("ls", url)
    assert (row["name"], row["state"], row["items"], row["files"]) == ("a", "committed", 3, 1)
    assert sorted(asked(store)) == [("get_object", ".metadata"), ("list", "a")]
    (found,) = printed("inspect", url, "--parts")
    assert sorted(asked(store)) == [("get_object", ".metadata"), ("list", "a")]
    assert found["path"] == url and not found["faults"]
    assert [item["fqn"] for item in found["items"]] == ["model.w", "model.b", "step"]
    sizes = {name: len(data) for name, data in store.objects("a").items()}
    assert {n: one["found"] for n, one in found["files"].items()}.items() <= sizes.items()
    assert f"{url}/.metadata: written by torch-dcpx" in dcpx("inspect", url).stdout


def test_pages_ask_as_the_commands_and_that_of_inspect_for_values_of_objects(
    store: Store, tmp_path: Path
) -> None:
    urls = [saved(store, "a"), saved(store, "b", {**STATE, "step": 4})]
    for command, paths, code in (("inspect", urls[:1], 0), ("diff", urls, 1)):
        assert dcpx(command, *paths).exit_code == code
        wanted = sorted(asked(store))
        page = tmp_path / f"{command}.html"
        assert dcpx(command, *paths, "--html", page).exit_code == code
        more = Counter(asked(store)) - Counter(wanted)
        assert more.total() <= (8 if command == "inspect" else 0), more
        assert urls[0] in page.read_text()
    assert '"rank":[0]' in (tmp_path / "inspect.html").read_text()


def test_ls_lists_the_prefixes_beneath_as_directories(store: Store, tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-3", "step-4"):
        saved(store, name)
    save(STATE, tmp_path, "stock")
    store.put_folder(tmp_path, "step-5")
    store.put("notes/readme", b"x")
    store.put("top", b"y")
    assert {row["state"] for row in printed("ls", f"{store.url}/")} == {"committed"}
    kinds = [kind for kind, _ in asked(store)]
    assert kinds.count("list") == 1 + 6 and kinds.count("get_object") == 5 == len(kinds) - 7
    lost = store.data("step-2")
    store.delete(lost, "step-3/.metadata")
    store.put("step-4/.metadata", b"nonsense")
    store.proxy.clear()
    rows = printed("ls", f"{store.url}/", code=1)
    assert {row["name"]: row["state"] for row in rows} == {
        "step-1": "committed",
        "step-2": "committed",
        "step-3": "unfinished",
        "step-4": "unreadable",
        "step-5": "committed",
    }
    assert f"'{lost.partition('/')[2]}' is missing" in str(rows)
    assert {row["written_by"] for row in rows if row["name"] == "step-5"} == {"stock"}
    assert len(asked(store)) <= 40  # what is wrong is looked at again, and for its way out
    assert printed("ls", store.url, "--all", code=1)[0]["name"] == "notes"
    assert "committed" in dcpx("ls", store.url).stdout


def test_url_without_anything_beneath_is_said(store: Store) -> None:
    error = printed("ls", store.url, code=2)["error"]
    assert error["type"] == "StorageError" and "nothing beneath it" in error["message"]
    assert printed("inspect", store.url, code=2)["error"]["type"] == "NotCommittedError"
    for verb in ("verify", "gc", "repair"):
        assert "error" in printed(verb, store.url, code=2)


def test_export_and_gc_take_urls(store: Store, tmp_path: Path) -> None:
    source, url = saved(store), f"{store.url}/out"
    printed("export", source, url)
    assert store.names("out") == {"model.safetensors"}
    assert printed("export", source, url, code=2)["error"]["type"] == "OptionError"
    printed("export", source, url, "--overwrite")
    printed("export", url, tmp_path / "back", "--format", "dcp")
    assert printed("verify", tmp_path / "back")["ok"]
    assert printed("gc", source) == []
    store.put("a/__7_0.0123456789ab.distcp", b"left")
    (row,) = printed("gc", source)
    assert (row["state"], row["nbytes"]) == ("left", 4)
    (row,) = printed("gc", source, "--delete")
    assert "younger than 86400 s" in row["problem"]
    (row,) = printed("gc", source, "--delete", "--grace", "0")
    assert row["state"] == "removed" and printed("gc", source) == []


# ---- verify, cat, diff --------------------------------------------------------------------------


def test_verify_names_the_damaged_of_all_beneath(store: Store) -> None:
    urls = [saved(store, name) for name in "ab"]
    assert printed("verify", urls[0])["ok"]
    name = store.data("b")
    data = bytearray(store.get(name))
    data[data.index(torch.arange(600.0).numpy().tobytes()[400:480])] ^= 8
    store.put(name, bytes(data))
    reports = printed("verify", store.url, code=1)
    assert [report["ok"] for report in reports] == [True, False]
    text = dcpx("verify", store.url).stdout
    assert f"{store.url}/{name}" in text and "'model.w'" in text
    assert "2 checkpoints, 1 with faults" in text


def test_cat_prints_rows_and_objects(store: Store) -> None:
    url = saved(store)
    found = printed("cat", url, "model.w[3:5, 0]", "step", "model.b")
    assert [each["value"] for each in found] == [[90.0, 120.0], 3, [1.0] * 5]
    assert "step: 3" in dcpx("cat", url, "step").stdout


def test_diff_compares_stores_and_disks_by_checksums(store: Store, tmp_path: Path) -> None:
    url = saved(store)
    torch_dcpx.save(STATE, tmp_path / "a")
    for more, read_bytes in ((["--quick"], 0), ([], 2 * (2400 + 20))):
        same = printed("diff", url, tmp_path / "a", *more)
        assert (same["equal"], same["read_bytes"], same["differences"]) == (3, read_bytes, [])
    other = {"model": {"w": STATE["model"]["w"] + 1, "b": torch.ones(5)}, "more": 1}
    found = printed("diff", url, saved(store, "b", other), "--quick", code=1)
    assert found["read_bytes"] == 0 and found["equal"] == 1
    assert [(each["name"], each["what"]) for each in found["differences"]] == [
        ("model.w", "values"),
        ("step", "only in A"),
        ("more", "only in B"),
    ]


def test_exports_in_a_store_are_shown_and_compared(store: Store) -> None:
    tensors = {"w": torch.arange(6.0), "b": torch.ones(2)}
    store.put("model.safetensors", safetensors_of(tensors))
    for url in (store.url, f"{store.url}/model.safetensors"):
        (found,) = printed("inspect", url)
        assert found["written_by"] == "safetensors" and not found["faults"]
        assert sorted(item["fqn"] for item in found["items"]) == ["b", "w"]
        assert printed("cat", url, "w[2:4]")[0]["value"] == [2.0, 3.0]
        assert printed("verify", url)["items"] == 2
        assert printed("diff", url, url)["equal"] == 2


# ---- repair -------------------------------------------------------------------------------------


def restored(state: dict[str, Any], url: str) -> None:
    target = blank_like(state)
    torch_dcpx.load(target, url)
    assert_same(state, target)


def test_repair_makes_or_mends_metadata_by_one_conditional_put(store: Store) -> None:
    url = saved(store)
    before, whole = store.objects("a"), store.get("a/.metadata")
    store.delete("a/.metadata")
    result = dcpx("repair", url, "--dry-run")
    assert result.exit_code == 1 and "would make '.metadata'" in result.stdout
    assert not {kind for kind, _ in asked(store)} - {"list", "get_object", "head_object"}
    with pytest.raises(RepairError, match=r"repair --accept-assumptions \w+://"):
        torch_dcpx.repair(url)
    assert store.objects("a") == {n: d for n, d in before.items() if n != ".metadata"}
    store.proxy.clear()
    report = printed("repair", url, "--accept-assumptions")
    assert report["repaired"][0]["source"] == "footers" and report["path"] == url
    assert [one.if_none_match for one in _puts(store)] == ["*"]
    restored(STATE, url)
    again = dcpx("repair", url)
    assert again.exit_code == 0 and "nothing to do" in again.stdout
    at = whole.index(b"model")  # in the pickle
    store.put("a/.metadata", whole[:at] + b"MODEL" + whole[at + 5 :])
    store.proxy.clear()
    assert torch_dcpx.repair(url).repaired[0].source == "columns"
    assert store.get("a/.metadata") == whole
    assert [bool(one.if_match) for one in _puts(store)] == [True]


def _puts(store: Store) -> list[Any]:
    return [one for one in store.proxy.requests("put_object") if "probe" not in one.key]


def test_repair_never_replaces_what_is_put_meanwhile(store: Store) -> None:
    url = saved(store)
    store.put("a/.metadata", store.get("a/.metadata")[:-9])
    other = {"model": {"w": torch.zeros(2)}, "step": 9}

    def save_meanwhile(_request: object) -> None:
        torch_dcpx.save(other, f"{store.url}/other")
        for name, data in store.objects("other").items():
            store.put(f"a/{name}", data)

    store.proxy.hook("get_object", save_meanwhile, key=store.data("a"))
    with pytest.raises(ConcurrentSaveError, match="nothing of this one is published"):
        torch_dcpx.repair(url, accept_assumptions=True)
    restored(other, url)


def test_repair_of_ranks_own_metadata_works_in_a_store(store: Store, tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path, rank)
    store.put_folder(tmp_path)
    store.delete("__1.metadata")
    report = torch_dcpx.repair(store.url, accept_assumptions=True)
    assert [one.name for one in report.repaired] == ["__1.metadata"]
    assert torch_dcpx.verify(store.url).ok


@pytest.mark.parametrize("how", ["reset", "lost_answer", "412"])
def test_fault_of_any_request_of_a_repair_leaves_the_lost_or_the_whole(
    store: Store, how: str
) -> None:
    torch_dcpx.save(STATE, store.url)
    lost = {name: data for name, data in store.objects().items() if name != ".metadata"}
    number, is_past = 0, False
    while not is_past:
        store.reset(lost)
        store.proxy.fail(number, how)
        error = None
        with retries(0):
            try:
                torch_dcpx.repair(store.url, accept_assumptions=True)
            except (StorageError, RepairError, UnsupportedError, OutcomeUnknownError) as failed:
                error = failed
        is_past = store.proxy.count() <= number
        store.proxy.heal()
        found, where = store.objects(), f"{how} of {number}: {error!r}"
        assert {n: found[n] for n in lost} == lost, where
        if error is None:
            assert ".metadata" in found, where
        elif ".metadata" in found:
            assert isinstance(error, OutcomeUnknownError), where
        if ".metadata" in found:
            restored(STATE, store.url)
        number += 1
    assert error is None and number > 6


# ---- doctor -------------------------------------------------------------------------------------


def test_doctor_tries_the_store_and_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_buckets", {})
    found = {each["name"]: each for each in printed("doctor", store.url)}
    assert found["store"]["state"] == found["writing"]["state"] == "fine"
    assert found["checkpoint"]["text"] == "none here" and "file system" not in found
    assert store.objects() == {}
    monkeypatch.setattr(object_store, "_buckets", {})
    store.proxy.fail("put_object", "403", times=None)
    with retries(0):
        found = {each["name"]: each for each in printed("doctor", store.url)}
    assert found["writing"]["state"] == "warning" and "saves do not" in found["writing"]["text"]
    store.proxy.fail("list", "403", times=None)
    with retries(0):
        found = {each["name"]: each for each in printed("doctor", store.url, code=2)}
    assert found["store"]["state"] == "failure" and "writing" not in found


def test_a_missing_shard_is_damage_and_a_missing_file_no_answer(store: Store) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    store.put("model.safetensors.index.json", json.dumps(index).encode())
    shard = f"{store.url}/model-00001-of-00002.safetensors"
    for url, code in ((store.url, 1), (shard, 2)):
        for line in (("verify", url), ("inspect", url), ("cat", url, "*")):
            result = dcpx(*line)
            assert result.exit_code == code, (line, result.output)
