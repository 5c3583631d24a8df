"""What is exported to a store, from anywhere, is bit for bit what is exported to a directory, is
loaded from there, and replaces nothing unasked.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from object_exports import (
    INDEX,
    KINDS,
    MEMORY_BYTES,
    SINGLE,
    assert_equal,
    export,
    exported,
    tensors_of,
)
from object_outcomes import LARGE_NUMEL, MIB, Store, save
from support.object_proxy import FaultProxy

import torch_dcpx as dcpx
from torch_dcpx import (
    KeyMap,
    Merge,
    NotCommittedError,
    OptionError,
    ReadOptions,
    Split,
    StorageError,
    Transpose,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.artifacts import object_files, writing
from torch_dcpx.artifacts.layout import ExportTensor, Layout, OutputPlan, Payload
from torch_dcpx.artifacts.sources import Offer
from torch_dcpx.artifacts.writing import _Streams
from torch_dcpx.storage.object_store import Bucket
from torch_dcpx.tensors.tiling import untiled

RULES = KeyMap(
    Split(r"columns", ("left", "right"), dim=1),
    Merge((r"expert\.(\d+)",), "experts", dim=1),
    Transpose(r"rows"),
)


def _state() -> dict[str, Any]:
    """Returns a model's state of many shapes, whose tensors take several windows and parts."""
    generator = torch.Generator().manual_seed(7)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    return {
        "rows": randn(1000, 1500),
        "columns": randn(400, 3000).bfloat16(),
        "expert.0": randn(300, 700).T,
        "expert.1": randn(700, 500),
        "long": torch.arange(LARGE_NUMEL // 2),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "conjugate": torch.randn(5, dtype=torch.complex64, generator=generator).conj(),
        "step": 3,
    }


@pytest.mark.parametrize("source", ["live", "directory", "store"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": torch.float16, "max_shard_bytes": "4MB"},
        {"key_map": RULES, "max_shard_bytes": "9MB"},
        {"keys": ["expert.*", "long"], "metadata": {"licence": "MIT"}},
    ],
    ids=["all", "dtype", "key_map", "keys"],
)
def test_artifact_in_a_store_has_the_bytes_of_one_in_a_directory(
    store: Store, tmp_path: Path, source: str, arguments: dict[str, Any]
) -> None:
    given: Any = _state()
    if source != "live":
        given = str(tmp_path / "ckpt") if source == "directory" else f"{store.url}/ckpt"
        save(_state(), given)
    url = f"{store.url}/out"
    report = export(given, url, **arguments)
    here = export(given, str(tmp_path / "out"), **arguments)
    assert report.path == url
    assert (report.nbytes, report.tensors, report.skipped, report.written_bytes) == (
        here.nbytes, here.tensors, here.skipped, here.nbytes,
    )  # fmt: skip
    found, used = exported(store.server, url)
    assert store.names("out") == used
    assert used == ({SINGLE} if len(report.files) == 1 else {INDEX, *report.files})
    for name, other in zip(report.files, here.files, strict=True):
        assert store.get(f"out/{name}") == (tmp_path / "out" / other).read_bytes()
    assert ("experts" in found) == ("key_map" in arguments)


def test_checkpoint_in_a_store_becomes_a_torch_archive(store: Store, tmp_path: Path) -> None:
    state = tensors_of(1)
    dcpx.save({"model": state, "step": 3}, store.url)
    dcpx.export(store.url, tmp_path / "m.pt", keys=["*"], no_dist=True)
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["step"] == 3 and torch.equal(found["model.a"], state["a"])
    assert KeyMap().dry_run(store.url).dropped == ()


def test_failing_reads_leave_the_old_file(store: Store, proxy: FaultProxy, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    dcpx.export(tensors_of(3), file, no_dist=True)
    old = file.read_bytes()
    dcpx.save(tensors_of(4), store.url)
    proxy.fail("get_object", "truncate", key="distcp", times=None)
    with pytest.raises(StorageError, match=r"get .*distcp"):
        dcpx.export(store.url, file, no_dist=True, overwrite=True)
    assert [one.name for one in tmp_path.iterdir()] == ["m.safetensors"]
    assert file.read_bytes() == old
    proxy.heal()
    dcpx.export(store.url, file, no_dist=True, overwrite=True)
    assert_equal(dcpx.load_tensors(file), tensors_of(4))


def test_tied_weights_are_noted_once(store: Store) -> None:
    weight = torch.randn(30, 20)
    report = export({"b": weight, "a": weight, "c": weight[:5]}, f"{store.url}/m.safetensors")
    assert report.aliases and store.names() == {"m.safetensors"}
    head = store.get("m.safetensors")[:400]
    assert b'"a":"b"' in head or b'"b":"a"' in head


# ---- Memory -------------------------------------------------------------------------------------


def test_windows_under_way_stay_within_the_budget(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[int] = set()
    sizes: dict[int, int] = {}
    peaks = []

    class Counted(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            number = len(sizes)
            sizes[number] = len(self)
            held.add(number)
            peaks.append(sum(sizes[one] for one in held))
            weakref.finalize(self, held.discard, number)

    monkeypatch.setattr(writing.mmap, "mmap", Counted)
    proxy.fail("upload_part", "delay", times=None, seconds=0.3)
    export(tensors_of(1, 4 * LARGE_NUMEL), store.url)
    monkeypatch.undo()
    assert sum(sizes.values()) > 48 * MIB and not held
    # A quarter of the budget is for reads.
    assert 8 * MIB < max(peaks) <= MEMORY_BYTES * 3 // 4, max(peaks) / MIB


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10


@pytest.mark.slow  # 10 s
@pytest.mark.parametrize("source", ["live", "directory"])
def test_memory_besides_the_state_stays_within_the_budget(
    store: Store, tmp_path: Path, source: str
) -> None:
    state = {"w": torch.ones(40 * MIB, dtype=torch.uint8), "t": torch.ones(2048, 2048).T}
    given: Any = state
    if source != "live":
        given = str(tmp_path / "ckpt")
        save(state, given)
    export(tensors_of(1), f"{store.url}/warm")
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    export(given, f"{store.url}/out")
    assert _status("VmHWM") - before < 3 * MEMORY_BYTES // 2


# ---- What is there ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_meanwhile_is_not_replaced_unasked(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, shard_bytes = KINDS[kind]
    name, others = INDEX if kind == "shards" else SINGLE, b"another export's"
    # Before the PUT; of an upload by parts, before its first one.
    where, what = (_Streams, "_filled") if kind == "parts" else (Bucket, "put_if")
    real: Any = getattr(where, what)

    def meanwhile(*args: Any) -> Any:
        store.put(name, others)
        return real(*args)

    options = WriteOptions(host_memory_bytes=MEMORY_BYTES)
    given: Any = {"max_shard_bytes": shard_bytes, "options": options, "no_dist": True}
    with monkeypatch.context() as patch:
        patch.setattr(where, what, meanwhile)
        with pytest.raises(OptionError, match=f"{name}' is there; name another file"):
            dcpx.export(tensors_of(1, numel), store.url, **given)
    assert store.objects() == {name: others}
    store.delete(name)
    dcpx.export(tensors_of(1, numel), store.url, **given)
    assert_equal(exported(store.server, store.url)[0], tensors_of(1, numel))


def test_files_beside_that_are_there_are_not_replaced_unasked(store: Store, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store.put("config.json", b"the user's own")
    with pytest.raises(OptionError, match=r"config\.json' is there"):
        dcpx.export(tensors_of(1), store.url, config=tmp_path, no_dist=True)
    assert store.names() == {"config.json"}
    store.put("config.json", b"{}")
    dcpx.export(tensors_of(1), store.url, config=tmp_path, no_dist=True)


def test_file_that_is_named_replaces_the_shards_beside_it(store: Store) -> None:
    store.put("README.md", b"the user's own")
    export(tensors_of(1), store.url, "shards")
    export(tensors_of(2), f"{store.url}/{SINGLE}")
    assert store.names() == {SINGLE, "README.md"}
    assert_equal(exported(store.server, store.url)[0], tensors_of(2))
    new = tensors_of(3, LARGE_NUMEL)
    export(new, store.url, "parts")  # over it, by an upload
    assert_equal(exported(store.server, store.url)[0], new)
    assert store.has_no_upload()


def test_checkpoint_is_not_exported_over(store: Store) -> None:
    save(tensors_of(1), store.url)
    before = store.objects()
    with pytest.raises(OptionError, match="holds a checkpoint"):
        export(store.url, store.url)
    options = WriteOptions(host_memory_bytes=19 * MIB)
    with pytest.raises(OptionError, match="20971520 or more for an export to a store"):
        export(tensors_of(1), f"{store.url}/out", options=options)
    with pytest.raises(UnsupportedError, match="torch archive"):
        export(tensors_of(1), f"{store.url}/m.pt")
    assert store.objects() == before
    export(store.url, f"{store.url}/m.safetensors")  # a file beside it has a name of its own
    assert store.names() == {*before, "m.safetensors"}


def test_files_of_many_tensors_are_given_to_ranks_by_one_look_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 2_000
    tensors = [ExportTensor(f"w{n}", "float32", (2,)) for n in range(count)]
    offers = [Offer(one.name, (((0,), (2,)),), one.name) for one in tensors]
    layout = Layout((OutputPlan("f", 8 * count, b""),), (Payload(0, 0, 8),) * count)
    looks = []
    monkeypatch.setattr(object_files, "untiled", lambda rows: looks.append(1) or untiled(rows))
    files = object_files.ObjectFiles.__new__(object_files.ObjectFiles)
    assert files.assigned(layout, tensors, [offers, offers], 2) == [(0,), ()]
    assert len(looks) == 2


# ---- Loads --------------------------------------------------------------------------------------


def test_model_comes_back_from_its_artifact_by_the_endpoint_of_the_options(
    store: Store, object_endpoint: str
) -> None:
    options = WriteOptions(endpoint=object_endpoint, host_memory_bytes=MEMORY_BYTES)
    read = ReadOptions(endpoint=object_endpoint)
    model = torch.nn.Sequential(torch.nn.Linear(500, 700), torch.nn.Linear(700, 500, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().T.clone())
    wanted = model.state_dict()
    for most, files in (("5GB", 1), ("1MB", 3)):
        report = export(model, store.url, max_shard_bytes=most, options=options)
        assert len(report.files) == files
        with torch.device("meta"):
            target = torch.nn.Sequential(
                torch.nn.Linear(500, 700), torch.nn.Linear(700, 500, bias=False)
            )
        dcpx.load_pretrained(target, store.url, no_dist=True, options=read)
        assert_equal(target.state_dict(), wanted)
        with dcpx.open_checkpoint(store.url, read) as opened:
            assert opened.keys() == wanted.keys()
            assert torch.equal(opened["0.weight"][3:9], wanted["0.weight"][3:9])
        assert_equal(exported(store.server, store.url)[0], wanted)


def test_artifact_is_exported_again_from_one_url_to_another(store: Store) -> None:
    new = tensors_of(3, 2 * MIB)
    export(new, f"{store.url}/a", "shards")
    export(f"{store.url}/a", f"{store.url}/b.safetensors", dtype=torch.bfloat16)
    found = dcpx.load_tensors(f"{store.url}/b.safetensors")
    assert_equal(found, {name: one.bfloat16() for name, one in new.items()})


def test_artifact_that_is_replaced_while_it_is_open_is_an_error(store: Store) -> None:
    for kind in ("single", "shards"):
        url = f"{store.url}/{kind}"
        export(tensors_of(1), url, kind)
        with dcpx.open_checkpoint(url) as opened:
            export(tensors_of(2), url, kind)
            with pytest.raises(StorageError):
                opened["a"][...]
    store.delete(f"single/{SINGLE}")
    with pytest.raises(NotCommittedError):
        dcpx.load_tensors(f"{store.url}/single")
