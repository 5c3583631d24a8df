"""What a checkpoint promises wherever it lies: a directory, two clients' mounts of one, a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.place_fixture import Place
from support.states import assert_same, blank_like, mixed_state
from support.verified import covers

import torch_dcpx as dcpx
from torch_dcpx import (
    CorruptionError,
    DcpxLoadPlanner,
    DcpxReader,
    DcpxSavePlanner,
    DcpxWriter,
    NotCommittedError,
    OptionError,
    RepairError,
    WriteOptions,
)


def _by_async_save(state: dict[str, Any], url: str) -> None:
    assert dcpx.async_save(state, url).result().checkpoint_id == url


def _by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.save(state, storage_writer=DcpxWriter(url), planner=DcpxSavePlanner(), no_dist=True)


def _by_stocks_planner(state: dict[str, Any], url: str) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=DcpxWriter("unused"), no_dist=True)


SAVES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "save": dcpx.save,
    "async_save": _by_async_save,
    "dcp.save": _by_dcp,
    "checkpoint_id": _by_stocks_planner,
}


def state_of(seed: int = 0) -> dict[str, Any]:
    """Returns tensors of all paths: packed, in place, gathered, and objects."""
    g = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(600_001, generator=g),
        "gathered": torch.randn(300, 400, generator=g).t(),
        "middle": {str(i): torch.randn(9000 + i, generator=g) for i in range(6)},
        "text": "x" * 30_000,
        **mixed_state(seed),
    }


def loaded(state: dict[str, Any], url: str) -> dict[str, Any]:
    target: dict[str, Any] = blank_like(state)
    dcpx.load(target, url)
    return target


# ---- Saves and loads ----------------------------------------------------------------------------


@pytest.mark.parametrize("by", SAVES)
def test_state_comes_back_bit_for_bit_and_again_after_a_second_save(place: Place, by: str) -> None:
    for seed in range(2):
        state = state_of(seed)
        SAVES[by](state, place.url)
        place.forget()
        assert_same(state, loaded(state, place.seen))
    target = blank_like(state)
    reader = DcpxReader(place.seen)
    dcp.load(target, storage_reader=reader, planner=DcpxLoadPlanner(), no_dist=True)
    assert_same(state, target)
    assert place.names() == {".metadata", place.data()}  # those of the first save are gone


def test_client_that_sees_late_gets_the_old_or_the_new_checkpoint_whole(place: Place) -> None:
    old, new = state_of(1), state_of(2)
    dcpx.save(old, place.url)
    place.forget()
    assert_same(old, loaded(old, place.seen))
    dcpx.save(new, place.url)
    found = loaded(old, place.seen)
    assert_same(old if torch.equal(found["large"], old["large"]) else new, found)
    place.forget()
    assert_same(new, loaded(new, place.seen))


def test_nothing_is_there_before_the_first_save(place: Place) -> None:
    for call in (
        lambda: loaded({"w": torch.zeros(1)}, place.seen),
        lambda: dcpx.repair(place.seen),
    ):
        with pytest.raises((NotCommittedError, RepairError)):
            call()


def test_tensors_objects_and_weights_are_read_by_name(place: Place) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 200)
    dcpx.save({**model.state_dict(), "step": 7}, f"{place.url}/a")
    url = f"{place.seen}/a"
    assert_same({"bias": model.bias.detach()}, dcpx.load_tensors(url, "bias"))
    with dcpx.open_checkpoint(url) as opened:
        assert torch.equal(opened["weight"][5:9, ::3], model.weight[5:9, ::3])
        assert (opened.objects["step"], opened.path) == (7, url)
    blank = torch.nn.Linear(300, 200, device="meta")
    dcpx.load_pretrained(blank, url)
    assert_same(model.state_dict(), blank.state_dict())


def test_overwrite_false_keeps_what_is_there(place: Place) -> None:
    dcpx.save(state_of(1), place.url)
    before = place.names()
    with pytest.raises(RuntimeError, match="already exists"):
        dcpx.save(state_of(2), storage_writer=DcpxWriter(place.url, overwrite=False))
    assert place.names() == before
    assert_same(state_of(1), loaded(state_of(1), place.seen))


@pytest.mark.parametrize("before", ["none", "old"])
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when all is stored"])
def test_save_that_fails_leaves_what_was_there_and_nothing_else(
    place: Place, before: str, is_late: bool
) -> None:
    if before == "old":
        dcpx.save(state_of(1), place.url)
    names = place.names()

    def report(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes or (done_bytes and not is_late):
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        dcpx.save(state_of(2), place.url, options=WriteOptions(progress=report))
    assert place.names() == names
    if before == "old":
        assert_same(state_of(1), loaded(state_of(1), place.seen))
    dcpx.save(state_of(3), place.url)
    place.forget()
    assert_same(state_of(3), loaded(state_of(3), place.seen))


def test_progress_ends_with_what_is_stored(place: Place) -> None:
    told: list[tuple[int, int]] = []
    options = WriteOptions(progress=lambda done, total: told.append((done, total)))
    dcpx.save(state_of(), place.url, options=options)
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0
    assert told == sorted(told) and len({done for done, _ in told}) == len(told)
    told.clear()
    assert dcpx.verify(place.seen, workers=1, progress=lambda *at: told.append(at)).ok
    assert told[-1][0] == told[-1][1] > 0


# ---- Damage -------------------------------------------------------------------------------------


def kinds(report: dcpx.VerifyReport) -> set[tuple[str, str]]:
    return {(finding.kind, finding.file) for finding in report.findings}


def test_flipped_bit_names_tensor_file_and_range(place: Place) -> None:
    state = {"a": torch.arange(1 << 17), "b": torch.arange(1 << 15)}
    dcpx.save(state, place.url)
    name = place.data()
    data = bytearray(place.get(name))
    at = data.index((1000).to_bytes(8, "little"), 100)
    data[at] ^= 1
    place.put(name, bytes(data))
    with pytest.raises(CorruptionError) as caught:
        loaded(state, place.seen)
    error = caught.value
    assert error.fqn in ("a", "b") and error.path == f"{place.seen}/{name}"
    assert error.offset is not None and error.offset <= at < error.offset + (error.nbytes or 0)
    (finding,) = dcpx.verify(place.seen).findings
    assert finding.kind == "data" and finding.fqns == (error.fqn,) and covers(finding, name, at)
    assert f"'{place.seen}/{name}'" in finding.message and finding.expected != finding.found


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("truncated", {"size", "tail"}),
        ("missing", {"missing"}),
        ("of another save", {"generation"}),
        ("empty", {"size", "tail"}),
    ],
)
def test_file_that_is_not_the_one_that_was_written_is_a_fault(
    place: Place, damage: str, expected: set[str]
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        dcpx.save(state_of(seed), f"{place.url}/{name}")
    name = place.data("a")
    data = {
        "truncated": place.get(name)[:-4096],
        "of another save": place.get(place.data("b")),
        "empty": b"",
    }
    place.put(name, data[damage]) if damage in data else place.delete(name)
    report = dcpx.verify(f"{place.seen}/a")
    assert not report.ok
    assert {kind for kind, file in kinds(report) if f"a/{file}" == name} >= expected, str(report)
    assert dcpx.verify(f"{place.seen}/b").ok


def test_leftovers_and_damaged_or_lost_metadata_are_named(place: Place) -> None:
    dcpx.save(state_of(), place.url)
    metadata, left = place.get(".metadata"), "__3_0.0123456789ab.distcp"
    place.put(left, b"left")
    place.put("__4_0.distcp", b"")  # stock's, of a rank without items
    place.put("notes.txt", b"mine")
    report = dcpx.verify(place.seen)
    assert report.ok and kinds(report) == {("leftover", left)}
    place.put(".metadata", metadata[:-9])
    assert ("metadata", ".metadata") in kinds(dcpx.verify(place.seen))
    place.delete(".metadata")
    report = dcpx.verify(place.seen)
    assert ("uncommitted", ".metadata") in kinds(report)
    assert place.is_shared or f"dcpx repair {place.seen}" in str(report)


# ---- Repair and exports -------------------------------------------------------------------------


def test_repair_makes_lost_metadata_from_the_data_where_assumptions_are_accepted(
    place: Place,
) -> None:
    state = {"model": {"w": torch.arange(600.0).view(20, 30)}, "step": 3}
    dcpx.save(state, place.url)
    place.delete(".metadata")
    before = place.names()
    # Elsewhere on a shared file system, what is not seen may be hidden.
    named: dict[str, Any] = {"files": [place.data()]} if place.is_shared else {}
    with pytest.raises(RepairError, match="--accept-assumptions"):
        dcpx.repair(place.url, **named)
    assert place.names() == before
    report = dcpx.repair(place.url, accept_assumptions=True, **named)
    assert report.repaired[0].source == "footers"
    place.forget()
    assert_same(state, loaded(state, place.seen))
    assert dcpx.verify(place.seen).ok


def test_repair_mends_damaged_metadata_to_the_same_bytes_and_leaves_good_ones(place: Place) -> None:
    dcpx.save({"model": {"w": torch.arange(600.0)}, "step": 3}, place.url)
    whole = place.get(".metadata")
    with pytest.raises(RepairError, match="it is good") as caught:
        dcpx.repair(place.url)
    assert caught.value.is_good and place.get(".metadata") == whole
    at = whole.index(b"model")  # in the pickle
    place.put(".metadata", whole[:at] + b"MODEL" + whole[at + 5 :])
    report = dcpx.repair(place.url)
    assert report.repaired[0].source == "columns" and not report.assumptions
    assert place.get(".metadata") == whole


def test_export_is_loaded_by_the_other_client_and_replaced_only_if_asked_for(place: Place) -> None:
    torch.manual_seed(2)
    models = [torch.nn.Linear(300, 200) for _ in range(2)]
    dcpx.save({"model": models[0].state_dict(), "step": 3}, f"{place.url}/ckpt")
    place.put("out/README.md", b"the user's own")
    report = dcpx.export(f"{place.seen}/ckpt", f"{place.url}/out", no_dist=True)
    assert (report.tensors, report.skipped) == (2, ("step",))
    assert place.names("out") == {"model.safetensors", "README.md"}
    with pytest.raises(OptionError, match="is there; name another"):
        dcpx.export(models[1], f"{place.url}/out", no_dist=True)
    for model, more in ((models[0], {}), (models[1], {"max_shard_bytes": 150_000})):
        if more:
            dcpx.export(model, f"{place.url}/out", no_dist=True, overwrite=True, **more)
            place.forget()
        blank = torch.nn.Linear(300, 200, device="meta")
        dcpx.load_pretrained(blank, f"{place.seen}/out")
        assert_same(model.state_dict(), blank.state_dict())
    assert "model.safetensors" not in place.names("out")
    assert "README.md" in place.names("out")
