"""What `verify` finds in a store: as of files, by key and range, and by how many requests.

Damage of each kind is named as anywhere: tests/contracts/test_checkpoints.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from object_outcomes import LOST, REFUSED, Store, retries
from safetensors.torch import save as safetensors_of
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.verified import covers

import torch_dcpx as dcpx
from torch_dcpx import DcpxError, UnsupportedError, WriteOptions
from torch_dcpx.metadata.file import decode_metadata, encode_metadata

MIB = 1 << 20
END_BYTES = 256 << 10  # of an object, looked at first


def state_of(seed: int = 0, numel: int = 700_000) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(numel, generator=g), "b": torch.randn(30, generator=g), "step": seed}


def saved(store: Store, files: int = 1) -> dict[str, bytes]:
    """Saves a state there, and returns its objects."""
    options = WriteOptions(files_per_rank=files, host_memory_bytes=40 * MIB)
    dcpx.save(state_of(), store.url, options=options)
    return store.objects()


def kinds(report: dcpx.VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.file) for finding in report.findings]


@s3_alone  # the requests are counted
@pytest.mark.parametrize("files", [1, 3])
def test_whole_checkpoint_is_summed_by_the_requests_that_are_foreseen(
    store: Store, proxy: FaultProxy, files: int
) -> None:
    objects = saved(store, files)
    proxy.clear()
    report = dcpx.verify(store.url, host_memory_bytes=4 * MIB)
    assert report.ok and not report.findings, str(report)
    assert report.path == store.url and report.files == files and report.items == 3
    assert report.checked_bytes > 700_000 * 4
    gets = proxy.requests("get_object")
    assert proxy.count() == len(gets) + 1 and proxy.count("list") == 1
    data = [one for one in gets if one.key.endswith(".distcp")]
    looks = [one for one in data if one.range == f"bytes=-{END_BYTES}"]
    assert len(looks) == files and proxy.count("get_object", ".metadata") == 1
    sums = [one for one in data if one not in looks]
    assert sums and all(one.if_match for one in sums)
    # Slots of 2 MiB, each once, but for what came with the end.
    needed = sum(len(found) for name, found in objects.items() if name.endswith(".distcp"))
    assert sum(one.received_bytes for one in sums) <= needed
    assert max(one.received_bytes for one in sums) <= 2 * MIB


def test_ranks_own_checkpoints_are_whole_and_one_without_metadata_is_a_fault(store: Store) -> None:
    for rank in range(2):
        dcpx.save(state_of(rank), f"{store.url}/{rank}")
        for name, data in store.objects(str(rank)).items():
            own = name.replace("__0", f"__{rank}") if name != ".metadata" else f"__{rank}.metadata"
            store.put(own, data)
    report = dcpx.verify(store.url)
    assert "missing" in {kind for kind, _ in kinds(report)}  # __1_0 is named __0_0 by its metadata
    store.delete("__1.metadata")
    report = dcpx.verify(store.url)
    assert [kind for kind, name in kinds(report) if name.startswith("__1_0")] == ["uncommitted"]


@s3_alone
def test_what_stocks_writers_have_put_is_whole_and_its_damage_is_named(
    store: Store, proxy: FaultProxy
) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = {name: torch.randn(n) for name, n in [("a", 300_000), ("b", 200), ("c", 90_000)]}
    dcp.save(state, storage_writer=FsspecWriter(store.url), no_dist=True)
    proxy.clear()
    report = dcpx.verify(store.url)
    assert report.ok and report.checked_bytes > 390_000 * 4, str(report)
    assert proxy.count() <= 3 + 2 * 3 + 3  # list, metadata, end; ends of items; slots
    name = store.data()
    data = bytearray(store.get(name))
    at = data.index(state["c"].numpy().tobytes()[:64]) + 5000
    data[at] ^= 1
    store.put(name, bytes(data))
    (finding,) = dcpx.verify(store.url).findings
    assert finding.kind == "data" and covers(finding, name, at) and finding.fqns == ("c",)


def test_every_damaged_byte_is_named_by_object_range_and_item(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    objects = saved(store, 2)
    for name in (name for name in objects if name.endswith(".distcp")):
        for _ in range(6):
            at = rng.randrange(len(objects[name]))
            damaged = bytearray(objects[name])
            damaged[at] ^= 0x40
            store.put(name, bytes(damaged))
            report = dcpx.verify(store.url)
            assert any(covers(one, name, at) for one in report.findings), f"{at}: {report}"
            assert {finding.file for finding in report.findings} == {name}
        store.put(name, objects[name])


_HOSTILE = ("../other/__0_0.distcp", "/etc/passwd", "a//b", "./x", "x\0y", "\ud800", "%2e%2e/x")


def test_hostile_names_ask_for_nothing_outside(store: Store, proxy: FaultProxy) -> None:
    objects, asked = saved(store), 0
    for path in _HOSTILE:
        found = decode_metadata(objects[".metadata"], "m")
        for place in found.metadata.storage_data.values():
            place.relative_path = path
        files = [entry._replace(path=path) for entry in (found.files or {}).values()]
        try:
            hostile = bytes(encode_metadata(found.metadata, files, found.save_id))
        except (DcpxError, ValueError):
            continue  # no save writes it
        store.put(".metadata", hostile)
        proxy.clear()
        report = dcpx.verify(store.url)
        assert not report.ok, path
        assert all(one.key.startswith(store.key()) for one in proxy.requests()), path
        assert not any(".." in one.key for one in proxy.requests()), path
        assert ("leftover", store.data()) in kinds(report) or "metadata" in dict(kinds(report))
        asked += 1
    assert asked


# ---- Changes and faults while it runs -----------------------------------------------------------


def test_object_that_is_replaced_while_it_is_summed_is_one_fault(
    store: Store, proxy: FaultProxy
) -> None:
    objects = saved(store)
    name = store.data()
    proxy.clear()
    proxy.hook(
        2 + store.server.looks, lambda _: store.put(name, bytes(len(objects[name])))
    )  # list, metadata, the end; then the first slot
    (finding,) = dcpx.verify(store.url, workers=1).findings
    assert (finding.kind, finding.file) == ("unreadable", name)
    assert "was replaced while it was checked" in finding.message
    assert finding.fqns


def test_object_that_goes_while_it_is_summed_is_one_fault_and_others_are_summed(
    store: Store, proxy: FaultProxy
) -> None:
    objects = saved(store, 3)
    largest = max(objects, key=lambda name: len(objects[name]))
    proxy.clear()
    proxy.hook(2 + 3 * store.server.looks, lambda _: store.delete(largest))
    report = dcpx.verify(store.url)
    assert kinds(report) in ([("unreadable", largest)], [("missing", largest)])
    told = {"s3": "No such file or directory", "az": "was replaced while"}[store.server.scheme]
    assert told in str(report)  # Azurite answers 412 for what is gone, where a tag is asked for
    assert report.checked_bytes > len(objects[".metadata"])


@pytest.mark.parametrize("written", ["ours", "stock's"])
def test_fault_of_any_request_is_a_finding_an_error_or_not_noticed(
    store: Store,
    proxy: FaultProxy,
    tmp_path: Path,
    written: str,
    chosen: Callable[[Sequence[Any]], list[Any]],
) -> None:
    if written == "ours":
        saved(store)
    else:
        dcp.save(state_of(1, 300_000), checkpoint_id=tmp_path, no_dist=True)
        store.put_folder(tmp_path)
    proxy.clear()
    assert dcpx.verify(store.url, workers=1).ok
    count = proxy.count()
    points = [(number, how) for number in range(count) for how in (*LOST, *REFUSED)]
    for number, how, tries in [(*one, tries) for one in points for tries in chosen([0, 3])]:
        proxy.heal()
        proxy.clear()
        proxy.fail(number, how)
        with retries(tries):
            try:
                report = dcpx.verify(store.url, workers=1)
                text, is_fine = str(report), report.ok
            except DcpxError as error:  # without a list there is nothing to report
                text, is_fine = str(error), False
                assert proxy.requests()[number].kind == "list", text
        hit = proxy.requests()[number]
        assert hit.fault == how
        where = f"{how} of {hit}, {tries} tries: {text}"
        assert not is_fine if tries == 0 else is_fine or how not in LOST, where
        assert "Signature" not in text and "Credential=" not in text, where


def test_store_that_is_gone_ends_with_findings_of_each_object(
    store: Store, proxy: FaultProxy
) -> None:
    saved(store, 2)
    proxy.clear()
    proxy.fail("any", "500", skip=4)  # list, metadata, two ends
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
    store.put_all(objects)
    for path in ("one", "one/model.safetensors", "two", "two/model.safetensors.index.json"):
        url = f"{store.url}/{path}"
        report = dcpx.verify(url)
        assert report.ok and report.path == url and report.items == 2
        assert {kind for kind, _ in kinds(report)} == {"unchecked"}
        model = torch.nn.Linear(300, 200, device="meta")
        dcpx.load_pretrained(model, url)
        assert torch.equal(model.weight, tensors["weight"])
        assert torch.equal(dcpx.load_tensors(url)["bias"], tensors["bias"])
        with dcpx.open_checkpoint(url) as opened:
            assert torch.equal(opened["weight"][7:9, 3], tensors["weight"][7:9, 3])
    store.put("two/b.safetensors", objects["two/a.safetensors"])
    assert not dcpx.verify(f"{store.url}/two").ok
    store.put("one/model.safetensors", objects["one/model.safetensors"][:-4])
    assert not dcpx.verify(f"{store.url}/one").ok


def test_files_of_torch_save_in_a_store_are_refused_by_name(store: Store, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    store.put_folder(tmp_path)
    url = f"{store.url}/x.pt"
    for call in (dcpx.verify, dcpx.load_tensors):
        with pytest.raises(UnsupportedError, match="copy it to one, or export") as caught:
            call(url)
        assert url in str(caught.value)
