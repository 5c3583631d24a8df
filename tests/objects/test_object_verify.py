"""What `verify` finds in a store: as of files, by key and range, and by how many requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from object_outcomes import LOST, REFUSED, Store, objects_at, put_objects, retries
from safetensors.torch import save as safetensors_of
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer
from support.verified import covers

import torch_dcpx as dcpx
from torch_dcpx import DcpxError, UnsupportedError, WriteOptions
from torch_dcpx.metadata.file import decode_metadata, encode_metadata

MIB = 1 << 20
END_BYTES = 256 << 10  # of an object, looked at first


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Store:
    return Store(object_server, object_proxy, object_prefix)


def state_of(seed: int = 0, numel: int = 700_000) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(numel, generator=g), "b": torch.randn(30, generator=g), "step": seed}


def saved(store: Store, seed: int = 0, **options: Any) -> dict[str, bytes]:
    """Saves a state there, and returns its objects."""
    dcpx.save(state_of(seed), store.url, options=WriteOptions(**options))
    return objects_at(store.server, store.url)


def data_names(objects: Mapping[str, bytes]) -> list[str]:
    return sorted(name for name in objects if name.endswith(".distcp"))


def kinds(report: dcpx.VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.file) for finding in report.findings]


def put_stocks(store: Store, folder: Path, numel: int = 300_000) -> dict[str, bytes]:
    """Puts there what stock's writer has written to a directory."""
    dcp.save(state_of(1, numel), checkpoint_id=folder, no_dist=True)
    objects = {path.name: path.read_bytes() for path in folder.iterdir()}
    put_objects(store.server, store.url, objects)
    return objects


# ---- Whole checkpoints --------------------------------------------------------------------------


@s3_alone  # the requests are counted
@pytest.mark.parametrize("files", [1, 3])
def test_whole_checkpoint_is_summed_by_the_requests_that_are_foreseen(
    store: Store, files: int
) -> None:
    objects = saved(store, files_per_rank=files, host_memory_bytes=40 * MIB)
    store.proxy.clear()
    report = dcpx.verify(store.url, host_memory_bytes=4 * MIB)
    assert report.ok and not report.findings, str(report)
    assert report.path == store.url and report.files == files and report.items == 3
    assert report.checked_bytes > 700_000 * 4
    assert sorted(one.kind for one in store.proxy.requests()) == [
        *["get_object"] * (store.proxy.count() - 1),
        "list",
    ]
    data = [one for one in store.proxy.requests("get_object") if one.key.endswith(".distcp")]
    looks = [one for one in data if one.range == f"bytes=-{END_BYTES}"]
    assert len(looks) == files and store.proxy.count("get_object", ".metadata") == 1
    sums = [one for one in data if one not in looks]
    assert sums and all(one.if_match for one in sums)
    # Slots of 2 MiB, each once, but for what came with the end.
    needed = sum(len(objects[name]) for name in data_names(objects))
    assert sum(one.received_bytes for one in sums) <= needed
    assert max(one.received_bytes for one in sums) <= 2 * MIB


def test_progress_ends_with_all_bytes(store: Store) -> None:
    saved(store)
    seen: list[tuple[int, int]] = []
    assert dcpx.verify(store.url, workers=1, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] > 0


def test_ranks_own_checkpoints_are_whole_and_one_without_metadata_is_a_fault(store: Store) -> None:
    for rank in range(2):
        dcpx.save(state_of(rank), f"{store.url}/{rank}")
        for name, data in objects_at(store.server, f"{store.url}/{rank}").items():
            own = name.replace("__0", f"__{rank}") if name != ".metadata" else f"__{rank}.metadata"
            store.server.put(f"{store.url}/{own}", data)
    report = dcpx.verify(store.url)
    assert "missing" in {kind for kind, _ in kinds(report)}  # __1_0 is named __0_0 by its metadata
    store.server.delete(f"{store.url}/__1.metadata")
    report = dcpx.verify(store.url)
    assert [kind for kind, name in kinds(report) if name.startswith("__1_0")] == ["uncommitted"]


@s3_alone
def test_what_stocks_writers_have_put_is_whole_and_its_damage_is_named(
    store: Store, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = {name: torch.randn(n) for name, n in [("a", 300_000), ("b", 200), ("c", 90_000)]}
    dcp.save(state, storage_writer=FsspecWriter(store.url), no_dist=True)
    store.proxy.clear()
    report = dcpx.verify(store.url)
    assert report.ok and report.checked_bytes > 390_000 * 4, str(report)
    (name,) = data_names(objects_at(store.server, store.url))
    assert store.proxy.count() <= 3 + 2 * 3 + 3  # list, metadata, end; ends of items; slots
    data = bytearray(store.server.get(f"{store.url}/{name}"))
    at = data.index(state["c"].numpy().tobytes()[:64]) + 5000
    data[at] ^= 1
    store.server.put(f"{store.url}/{name}", bytes(data))
    (finding,) = dcpx.verify(store.url).findings
    assert finding.kind == "data" and covers(finding, name, at) and finding.fqns == ("c",)


# ---- Damage -------------------------------------------------------------------------------------


def test_every_damaged_byte_is_named_by_object_range_and_item(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    objects = saved(store, files_per_rank=2, host_memory_bytes=40 * MIB)
    for name in data_names(objects):
        for _ in range(6):
            at = rng.randrange(len(objects[name]))
            damaged = bytearray(objects[name])
            damaged[at] ^= 0x40
            store.server.put(f"{store.url}/{name}", bytes(damaged))
            report = dcpx.verify(store.url)
            assert any(covers(one, name, at) for one in report.findings), f"{at}: {report}"
            assert {finding.file for finding in report.findings} == {name}
            data = [one for one in report.findings if one.kind == "data"]
            assert all(f"'{store.url}/{name}'" in one.message for one in report.findings)
            assert all(one.expected != one.found for one in data)
        store.server.put(f"{store.url}/{name}", objects[name])


def _truncated(store: Store, objects: dict[str, bytes], name: str) -> None:
    store.server.put(f"{store.url}/{name}", objects[name][:-4096])


def _missing(store: Store, objects: dict[str, bytes], name: str) -> None:
    store.server.delete(f"{store.url}/{name}")


def _of_another_save(store: Store, objects: dict[str, bytes], name: str) -> None:
    other = Store(store.server, store.proxy, f"{store.url}/other")
    (data,) = (data for key, data in saved(other, 7).items() if key.endswith(".distcp"))
    store.server.put(f"{store.url}/{name}", data)


def _empty(store: Store, objects: dict[str, bytes], name: str) -> None:
    store.server.put(f"{store.url}/{name}", b"")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_truncated, {"size", "tail"}),
        (_missing, {"missing"}),
        (_of_another_save, {"generation"}),
        (_empty, {"size", "tail"}),
    ],
)
def test_object_that_is_not_the_one_that_was_put_is_a_fault(
    store: Store, damage: Callable[..., None], expected: set[str]
) -> None:
    objects = saved(store)
    (name,) = data_names(objects)
    damage(store, objects, name)
    report = dcpx.verify(store.url)
    assert {kind for kind, file in kinds(report) if file == name} >= expected, str(report)
    assert not report.ok


def test_damaged_metadata_and_leftovers_are_named(store: Store) -> None:
    objects = saved(store)
    store.server.put(f"{store.url}/__3_0.0123456789ab.distcp", b"left")
    store.server.put(f"{store.url}/__4_0.distcp", b"")  # stock's, of a rank without items
    store.server.put(f"{store.url}/notes.txt", b"mine")
    report = dcpx.verify(store.url)
    assert report.ok and kinds(report) == [("leftover", "__3_0.0123456789ab.distcp")]
    store.server.put(f"{store.url}/.metadata", objects[".metadata"][:-9])
    report = dcpx.verify(store.url)
    assert ("metadata", ".metadata") in kinds(report)
    store.server.delete(f"{store.url}/.metadata")
    report = dcpx.verify(store.url)
    assert ("uncommitted", ".metadata") in kinds(report)
    assert f"dcpx repair {store.url}" in str(report)


@pytest.mark.parametrize(
    "path", ["../other/__0_0.distcp", "/etc/passwd", "a//b", "./x", "x\0y", "\ud800", "%2e%2e/x"]
)
def test_hostile_names_ask_for_nothing_outside(store: Store, path: str) -> None:
    objects = saved(store)
    (name,) = data_names(objects)
    found = decode_metadata(objects[".metadata"], "m")
    for place in found.metadata.storage_data.values():
        place.relative_path = path
    files = [entry._replace(path=path) for entry in (found.files or {}).values()]
    try:
        hostile = bytes(encode_metadata(found.metadata, files, found.save_id))
    except (DcpxError, ValueError):
        return  # no save writes it
    store.server.put(f"{store.url}/.metadata", hostile)
    store.proxy.clear()
    report = dcpx.verify(store.url)
    assert not report.ok
    prefix = store.url.partition("://")[2].partition("/")[2] + "/"
    assert all(one.key.startswith(prefix) for one in store.proxy.requests()), path
    assert not any(".." in one.key for one in store.proxy.requests())
    assert ("leftover", name) in kinds(report) or "metadata" in dict(kinds(report))


# ---- Changes and faults while it runs -----------------------------------------------------------


def test_object_that_is_replaced_while_it_is_summed_is_one_fault(store: Store) -> None:
    objects = saved(store)
    (name,) = data_names(objects)

    def replace(_request: object) -> None:
        store.server.put(f"{store.url}/{name}", bytes(len(objects[name])))

    store.proxy.clear()
    store.proxy.hook(
        2 + store.server.looks, replace
    )  # list, metadata, the end; then the first slot
    (finding,) = dcpx.verify(store.url, workers=1).findings
    assert (finding.kind, finding.file) == ("unreadable", name)
    assert "was replaced while it was checked" in finding.message
    assert finding.fqns


def test_object_that_goes_while_it_is_summed_is_one_fault_and_others_are_summed(
    store: Store,
) -> None:
    objects = saved(store, files_per_rank=3, host_memory_bytes=40 * MIB)
    largest = max(data_names(objects), key=lambda name: len(objects[name]))
    store.proxy.clear()
    store.proxy.hook(
        2 + 3 * store.server.looks, lambda _request: store.server.delete(f"{store.url}/{largest}")
    )
    report = dcpx.verify(store.url)
    assert kinds(report) in ([("unreadable", largest)], [("missing", largest)])
    told = {"s3": "No such file or directory", "az": "was replaced while"}[store.server.scheme]
    assert told in str(report)  # Azurite answers 412 for what is gone, where a tag is asked for
    assert report.checked_bytes > len(objects[".metadata"])


def _requests(store: Store) -> int:
    store.proxy.heal()
    store.proxy.clear()
    assert dcpx.verify(store.url, workers=1).ok
    return store.proxy.count()


@pytest.mark.parametrize("tries", [0, 3])
@pytest.mark.parametrize("written", ["ours", "stock's"])
def test_fault_of_any_request_is_a_finding_an_error_or_not_noticed(
    store: Store, tmp_path: Path, written: str, tries: int
) -> None:
    saved(store) if written == "ours" else put_stocks(store, tmp_path)
    for number in range(_requests(store)):
        for how in (*LOST, *REFUSED):
            store.proxy.heal()
            store.proxy.clear()
            store.proxy.fail(number, how)
            with retries(tries):
                try:
                    report = dcpx.verify(store.url, workers=1)
                    text, is_fine = str(report), report.ok
                except DcpxError as error:  # without a list there is nothing to report
                    text, is_fine = str(error), False
                    assert store.proxy.requests()[number].kind == "list", text
            hit = store.proxy.requests()[number]
            assert hit.fault == how
            where = f"{how} of {hit}, {tries} tries: {text}"
            assert not is_fine if tries == 0 else is_fine or how not in LOST, where
            assert "Signature" not in text and "Credential=" not in text, where


def test_store_that_is_gone_ends_with_findings_of_each_object(store: Store) -> None:
    saved(store, files_per_rank=2, host_memory_bytes=40 * MIB)
    store.proxy.clear()
    store.proxy.fail("any", "500", skip=4)  # list, metadata, two ends
    with retries(0):
        report = dcpx.verify(store.url)
    assert {kind for kind, _ in kinds(report)} == {"unreadable"}
    assert len(report.findings) <= 2 and not report.ok


# ---- Files of safetensors -----------------------------------------------------------------------


def test_safetensors_in_a_store_are_compared_and_loaded(store: Store) -> None:
    tensors = {"weight": torch.randn(200, 300), "bias": torch.randn(200)}
    index = '{"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}'
    objects = {
        "one/model.safetensors": safetensors_of(tensors),
        "two/model.safetensors.index.json": index.encode(),
        "two/a.safetensors": safetensors_of({"weight": tensors["weight"]}),
        "two/b.safetensors": safetensors_of({"bias": tensors["bias"]}),
    }
    put_objects(store.server, store.url, objects)
    for path in ("one", "one/model.safetensors", "two", "two/model.safetensors.index.json"):
        url = f"{store.url}/{path}"
        report = dcpx.verify(url)
        assert report.ok and report.path == url and report.items == 2
        assert {kind for kind, _ in kinds(report)} == {"unchecked"}
        model = torch.nn.Linear(300, 200, device="meta")
        dcpx.load_pretrained(model, url)
        assert torch.equal(model.weight, tensors["weight"])
        loaded = dcpx.load_tensors(url)
        assert torch.equal(loaded["bias"], tensors["bias"])
        with dcpx.open_checkpoint(url) as opened:
            assert torch.equal(opened["weight"][7:9, 3], tensors["weight"][7:9, 3])
    store.server.put(f"{store.url}/two/b.safetensors", objects["two/a.safetensors"])
    assert not dcpx.verify(f"{store.url}/two").ok
    store.server.put(f"{store.url}/one/model.safetensors", objects["one/model.safetensors"][:-4])
    assert not dcpx.verify(f"{store.url}/one").ok


def test_files_of_torch_save_in_a_store_are_refused_by_name(store: Store, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    store.server.put(f"{store.url}/x.pt", (tmp_path / "x.pt").read_bytes())
    url = f"{store.url}/x.pt"
    for call in (dcpx.verify, dcpx.load_tensors):
        with pytest.raises(UnsupportedError, match="copy it to one, or export") as caught:
            call(url)
        assert url in str(caught.value)
