"""Checkpoints of other torches: golden ones of stock and of ours load under the torch that runs."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from golden.make_golden import DTYPES as NAMES
from golden.make_golden import golden_state, ramp
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions
from torch_dcpx._compat import DTYPES, HAS_STRIDES
from torch_dcpx.errors import DcpxError, UnsafePickleError, UnsupportedError
from torch_dcpx.metadata import decode as metadata_decode
from torch_dcpx.metadata.stock_classes import METADATA

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

# Name of the archive -> dtypes that its torch did not have yet.
OURS: dict[str, set[str]] = {"ours-2.9.0": set(), "ours-2.13.0": set(), "ours-2.15.0": set()}
STOCK: dict[str, set[str]] = {
    "stock-2.6.0": {"float8_e8m0fnu"},
    "stock-2.9.0": set(),
    "stock-2.13.0": set(),
    "stock-2.15.0": set(),
}
ANY = pytest.mark.parametrize("name", [*OURS, *STOCK])


def unpack(name: str, directory: Path) -> Path:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        for entry in archive:
            assert entry.isfile() and "/" not in entry.name
            (directory / entry.name).write_bytes(archive.extractfile(entry).read())  # type: ignore[union-attr]
    return directory


def expected_state(name: str) -> dict[str, Any]:
    """Returns what the archive holds, in whole tensors."""
    state = golden_state(lambda full, _dim: full)
    assert list(state["dtypes"]) == list(NAMES), "the torch that runs lacks a dtype"
    for dtype in {**OURS, **STOCK}[name]:
        del state["dtypes"][dtype]
    return state


def load(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    target = blank_like(state)
    dcp.load(target, storage_reader=reader, no_dist=True)
    return target


def properties_of(metadata: Any) -> dict[str, TensorProperties]:
    """Returns fqn -> properties of every tensor."""
    entries = metadata.state_dict_metadata.items()
    return {k: v.properties for k, v in entries if isinstance(v, TensorStorageMetadata)}


def test_every_golden_checkpoint_is_loaded_by_a_test() -> None:
    roots = {"manager-0.1.0"}  # by tests/manager/test_golden_roots.py
    found = {p.name for p in GOLDEN.glob("*.xz")}
    assert found == {f"{name}.tar.xz" for name in {*OURS, *STOCK, *roots}}


@ANY
@pytest.mark.parametrize("trusted", [False, True])
def test_checkpoint_of_any_torch_loads_bit_for_bit(
    tmp_path: Path, name: str, trusted: bool
) -> None:
    reader = DcpxReader(unpack(name, tmp_path), options=ReadOptions(trusted=trusted))
    expected = expected_state(name)
    assert_same(expected, load(expected, reader))
    assert reader.last_report is not None
    assert reader.last_report.torch_items == 0, "a shape that the native parser does not know"
    is_ours = name in OURS
    assert (reader.last_report.verified_bytes > 0) is is_ours
    metadata = reader.read_metadata()
    assert len(metadata.state_dict_metadata) == len(metadata.planner_data)
    found = properties_of(metadata)  # with the fields of the torch that runs
    assert {type(properties) for properties in found.values()} == {TensorProperties}
    fields = set(vars(TensorProperties()))
    assert {frozenset(vars(properties)) for properties in found.values()} == {frozenset(fields)}
    knows_strides = HAS_STRIDES and name.endswith("2.15.0")
    strides = getattr(found["layouts.transposed"], "strides", None)
    assert strides == ((1, 7) if knows_strides else None)
    assert found["parameters.trained"].requires_grad is True
    assert found["dtypes.bfloat16"].dtype is torch.bfloat16


@pytest.mark.parametrize("name", OURS)
def test_checkpoint_of_ours_loads_with_the_stock_reader_of_any_torch(
    tmp_path: Path, name: str
) -> None:
    expected = expected_state(name)
    assert_same(expected, load(expected, dcp.FileSystemReader(unpack(name, tmp_path))))


@pytest.mark.parametrize(
    ("writer", "error"),
    [(DcpxWriter, UnsupportedError), (dcp.FileSystemWriter, UnsafePickleError)],
)
def test_dtype_of_another_torch_is_said_to_be_lacking_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any, error: type[DcpxError]
) -> None:
    """Our file's checksums are right; stock's may as well be damaged."""
    dcp.save({"new": ramp(3, dtype=torch.uint16)}, storage_writer=writer(tmp_path), no_dist=True)
    monkeypatch.delitem(DTYPES, "uint16")
    monkeypatch.delitem(METADATA, ("torch", "uint16"))
    monkeypatch.delattr(torch, "uint16")
    monkeypatch.setattr(metadata_decode, "TORCH_VERSION", "2.99.0")
    with pytest.raises(error, match=r"uint16'.* torch \S+( lacks)?[:;] .*torch (\S+ )?wrote it"):
        DcpxReader(tmp_path).read_metadata()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"new": torch.zeros(3)}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert type(caught.value.failures[0][0]) is error


@pytest.mark.parametrize("planner_data", ["columns", "pickle"])
def test_save_pickles_five_properties_and_returns_all(tmp_path: Path, planner_data: str) -> None:
    """Six are what torch 2.15 has, and what older ones fail at: too many values to unpack."""

    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            if planner_data == "pickle":
                metadata.planner_data = [metadata.planner_data]
            return plans, metadata

    state = {"a": torch.ones(4, 3).t(), "b": torch.ones(2, dtype=torch.int8), "c": "text"}
    writer = DcpxWriter(tmp_path)
    returned = dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    expected = {"a": (1, 3), "b": (1,)} if HAS_STRIDES else {"a": None, "b": None}
    for metadata in (returned, DcpxReader(tmp_path).read_metadata()):
        found = properties_of(metadata)
        assert {fqn: getattr(p, "strides", None) for fqn, p in found.items()} == expected
    assert states_of_properties((tmp_path / ".metadata").read_bytes()) == [5, 5]


def states_of_properties(data: bytes) -> list[int]:
    """Returns how many fields each pickled TensorProperties sets."""
    counts: list[int] = []

    class Recorded:
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            counts.append(len(state))

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            return Recorded if name == "TensorProperties" else super().find_class(module, name)

    Unpickler(io.BytesIO(data)).load()
    return counts
