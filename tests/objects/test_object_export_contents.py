"""What is exported to a store, from anywhere, is bit for bit what is exported to a directory."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from object_exports import (
    INDEX,
    MEMORY_BYTES,
    SINGLE,
    export,
    exported,
    names_at,
    tensors_of,
)
from object_outcomes import LARGE_NUMEL, MIB, save
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Merge, OptionError, Split, Transpose, UnsupportedError
from torch_dcpx.artifacts import object_files, writing
from torch_dcpx.artifacts.layout import ExportTensor, Layout, OutputPlan, Payload
from torch_dcpx.artifacts.sources import Offer
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
    object_server: ObjectServer,
    object_prefix: str,
    tmp_path: Path,
    source: str,
    arguments: dict[str, Any],
) -> None:
    given: Any = _state()
    if source != "live":
        given = str(tmp_path / "ckpt") if source == "directory" else f"{object_prefix}-ckpt"
        save(_state(), given)
    report = export(given, object_prefix, **arguments)
    here = export(given, str(tmp_path / "out"), **arguments)
    assert (report.nbytes, report.tensors, report.skipped, report.written_bytes) == (
        here.nbytes, here.tensors, here.skipped, here.nbytes,
    )  # fmt: skip
    found, used = exported(object_server, object_prefix)
    assert names_at(object_server, object_prefix) == used
    assert used == ({SINGLE} if len(report.files) == 1 else {INDEX, *report.files})
    for name, other in zip(report.files, here.files, strict=True):
        assert (
            object_server.get(f"{object_prefix}/{name}") == (tmp_path / "out" / other).read_bytes()
        )
    assert ("experts" in found) == ("key_map" in arguments)


def test_tied_weights_are_noted_once(object_server: ObjectServer, object_prefix: str) -> None:
    weight = torch.randn(30, 20)
    report = export({"b": weight, "a": weight, "c": weight[:5]}, f"{object_prefix}/m.safetensors")
    assert report.aliases and names_at(object_server, object_prefix) == {"m.safetensors"}
    head = object_server.get(f"{object_prefix}/m.safetensors")[:400]
    assert b'"a":"b"' in head or b'"b":"a"' in head


def test_windows_under_way_stay_within_the_budget(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
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
    object_proxy.fail("upload_part", "delay", times=None, seconds=0.3)
    new = tensors_of(1, 4 * LARGE_NUMEL)
    export(new, object_prefix)
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
    object_server: ObjectServer, object_prefix: str, tmp_path: Path, source: str
) -> None:
    state = {"w": torch.ones(40 * MIB, dtype=torch.uint8), "t": torch.ones(2048, 2048).T}
    given: Any = state
    if source != "live":
        given = str(tmp_path / "ckpt")
        save(state, given)
    export(tensors_of(1), f"{object_prefix}-warm")
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    export(given, object_prefix)
    assert _status("VmHWM") - before < 3 * MEMORY_BYTES // 2


# ---- Refused ------------------------------------------------------------------------------------


def test_checkpoint_is_not_exported_over(object_server: ObjectServer, object_prefix: str) -> None:
    save(tensors_of(1), object_prefix)
    before = object_server.sizes(object_prefix)
    with pytest.raises(OptionError, match="holds a checkpoint"):
        export(object_prefix, object_prefix)
    options = dcpx.WriteOptions(host_memory_bytes=19 * MIB)
    with pytest.raises(OptionError, match="20971520 or more for an export to a store"):
        export(tensors_of(1), f"{object_prefix}/out", options=options)
    with pytest.raises(UnsupportedError, match="torch archive"):
        export(tensors_of(1), f"{object_prefix}/m.pt")
    assert object_server.sizes(object_prefix) == before
    # A file beside it has a name of its own.
    export(object_prefix, f"{object_prefix}/m.safetensors")
    assert names_at(object_server, object_prefix) == {
        *(one.rpartition("/")[2] for one in before),
        "m.safetensors",
    }


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
