"""Files of torch.save as a source: what `export` writes, what torch writes, and hostile ones."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import mixed_state
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import CorruptionError, ReadOptions, UnsafePickleError, UnsupportedError
from torch_dcpx.reader import torch_file
from torch_dcpx.reader.torch_file import read_torch_file


class Own:
    """A class that no allow-list has."""

    made = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).made += 1
        vars(self).update(state)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 30))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def rewritten(source: Path, target: Path, change: Any) -> None:
    """Copies a zip record by record; `change` gets names and bytes, and returns both or None."""
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(target, "w") as new,
        warnings.catch_warnings(),  # two records of one name
    ):
        warnings.simplefilter("ignore")
        for name in old.namelist():
            row = change(name, old.read(name))
            if row is not None:
                new.writestr(*row)


# ---- What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["y.pth", "out"])
def test_model_on_meta_gets_what_export_wrote_for_torch_load(tmp_path: Path, target: str) -> None:
    source = model()
    path = tmp_path / target
    dcpx.export(source, path, format="torch", no_dist=True)
    assert path.is_dir() == (target == "out")
    with torch.device("meta"):
        loaded = model()
    report = dcpx.load_pretrained(loaded, path)
    assert report.is_whole
    assert_same(loaded.state_dict(), source.state_dict())


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_model_gets_what_torch_save_wrote_with_and_without_parts(
    tmp_path: Path, is_wrapped: bool
) -> None:
    source = model()
    state: Any = source.state_dict()
    state["0.weight"] = nn.Parameter(torch.randn(30, 40).T, requires_grad=True)
    torch.save(
        {"model": state, "step": 3, "opt": [1, {}]} if is_wrapped else state, tmp_path / "y.pt"
    )
    loaded = model()
    dcpx.load_pretrained(loaded, tmp_path / "y.pt")
    assert_same(loaded.state_dict(), state)


def test_views_strides_dtypes_and_tied_tensors_are_those_of_torch_load(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    state = {
        "turned": base.T,
        "tied": base.T,
        "part": torch.arange(100)[40:60:2],
        "fp8": torch.randn(8, 8).to(torch.float8_e5m2),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nest": {"bool": torch.rand(9) > 0.5, "list": [torch.ones(2), 4]},
    }
    torch.save(state, tmp_path / "y.pt")
    flat = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    flat |= {"nest.bool": state["nest"]["bool"], "nest.list.0": torch.ones(2)}  # type: ignore[index]
    assert_same(dcpx.load_tensors(tmp_path / "y.pt"), flat)
    with dcpx.open_checkpoint(tmp_path / "y.pt") as held:
        assert torch.equal(held["turned"][3:5, ::7], base.T[3:5, ::7])


def test_file_of_a_big_endian_machine_gives_the_same_values(tmp_path: Path) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    torch.save({"w": tensor}, tmp_path / "y.pt")

    def swapped(name: str, data: bytes) -> tuple[str, bytes]:
        if name.endswith("byteorder"):
            return name, b"big"
        if name.endswith("data/0"):
            data = tensor.numpy().astype(">i4").tobytes()
        return name, data

    rewritten(tmp_path / "y.pt", tmp_path / "z.pt", swapped)
    assert torch.equal(dcpx.load_tensors(tmp_path / "z.pt")["w"], tensor)


def test_file_becomes_safetensors_and_back(tmp_path: Path) -> None:
    torch.save(mixed_state(), tmp_path / "y.pt")
    dcpx.export(tmp_path / "y.pt", tmp_path / "z.safetensors", no_dist=True)
    dcpx.export(tmp_path / "z.safetensors", tmp_path / "w.pt", no_dist=True)
    assert_same(torch.load(tmp_path / "w.pt", weights_only=True), mixed_state())


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [ReadOptions(), ReadOptions(trusted=True)])
def test_class_in_the_pickle_is_refused_and_nothing_is_executed(
    tmp_path: Path, options: ReadOptions
) -> None:
    Own.made = 0
    torch.save({"w": torch.ones(3), "own": Own()}, tmp_path / "y.pt")
    with pytest.raises(UnsafePickleError, match="Own"):
        dcpx.load_tensors(tmp_path / "y.pt", options=options)
    assert Own.made == 0
    allowed = ReadOptions(safe_globals=(Own,))
    assert list(dcpx.load_tensors(tmp_path / "y.pt", options=allowed)) == ["w"]


def test_call_in_the_pickle_is_not_made(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"w": torch.ones(3), "evil": Evil()}, tmp_path / "y.pt")
    with pytest.raises(UnsafePickleError, match="mkdir"):
        dcpx.load_pretrained(nn.Linear(1, 1), tmp_path / "y.pt")
    assert not (tmp_path / "made").exists()


def test_values_that_are_no_dict_of_plain_tensors_are_refused(tmp_path: Path) -> None:
    base, conjugate = torch.randn(10), torch.randn(3, dtype=torch.complex64).conj()
    values: list[tuple[Any, str]] = [
        ([torch.ones(2)], "a list, not a dict"),
        (torch.ones(2), "a Tensor, not a dict"),
        ({"c": conjugate}, "'c' .* conjugate"),
        ({"whole": base, "part": base[2:4]}, "'part' and 'whole' .* share a part"),
    ]
    for value, text in values:
        torch.save(value, tmp_path / "y.pt")
        with pytest.raises(UnsupportedError, match=text):
            dcpx.load_tensors(tmp_path / "y.pt")


def test_old_files_and_torchscript_are_refused_by_name(tmp_path: Path) -> None:
    old, script = tmp_path / "old.pt", tmp_path / "script.pt"
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"no zip of torch\.save"):
        dcpx.load_tensors(old)
    torch.save({"w": torch.ones(2)}, tmp_path / "y.pt")
    rewritten(tmp_path / "y.pt", script, lambda name, data: (name, data))
    with zipfile.ZipFile(script, "a") as held:
        held.writestr("y/constants.pkl", b"")
    with pytest.raises(UnsafePickleError, match="TorchScript"):
        dcpx.load_tensors(script)


DAMAGES = {
    "cut": "its directory is damaged",
    "no storage": "lacks the record 'data/0'",
    "short storage": "of 4000 B in a record of 3996 B",
    "moved": "does not lie where its directory says",
    "twice": "two of its records have one name",
    "order": "its byte order is b'middle'",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_typed_error(tmp_path: Path, damage: str) -> None:
    source, path = tmp_path / "source.pt", tmp_path / "y.pt"
    torch.save({"w": torch.ones(1000)}, source)
    if damage == "cut":
        path.write_bytes(source.read_bytes()[:-40])
    elif damage == "moved":
        data = bytearray(source.read_bytes())
        at = data.index(b"PK\x01\x02", data.index(b"data/0"))
        at = data.rindex(b"PK\x01\x02", 0, data.index(b"data/0", at))
        data[at + 42 : at + 46] = (8).to_bytes(4, "little")  # where its header begins
        path.write_bytes(data)
    else:
        changes: dict[str, Any] = {
            "no storage": lambda n, d: None if n.endswith("data/0") else (n, d),
            "short storage": lambda n, d: (n, d[:-4] if n.endswith("data/0") else d),
            "twice": lambda n, d: (n.replace("version", "data.pkl"), d),
            "order": lambda n, d: (n, b"middle" if n.endswith("byteorder") else d),
        }
        rewritten(source, path, changes[damage])
    with pytest.raises(CorruptionError, match=DAMAGES[damage]) as caught:
        dcpx.load_tensors(path)
    assert caught.value.path == str(path)


def test_compressed_and_too_large_records_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "y.pt")
    with (
        zipfile.ZipFile(tmp_path / "y.pt") as old,
        zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedError, match="compressed"):
        read_torch_file(tmp_path, "z.pt")
    monkeypatch.setattr(torch_file, "_MAX_PICKLE_BYTES", 10)
    with pytest.raises(UnsupportedError, match="more than 10"):
        read_torch_file(tmp_path, "y.pt")
    monkeypatch.setattr(torch_file, "_MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(CorruptionError, match="more than 100"):
        read_torch_file(tmp_path, "y.pt")


def test_more_tensors_than_a_load_can_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({str(i): torch.ones(1) for i in range(5)}, tmp_path / "y.pt")
    assert len(read_torch_file(tmp_path, "y.pt").places) == 5
    monkeypatch.setattr(torch_file, "MAX_FILE_TENSORS", 4)
    with pytest.raises(UnsupportedError, match="more than 4 tensors"):
        read_torch_file(tmp_path, "y.pt")


def test_link_is_refused_and_a_missing_file_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "y.pt")
    (tmp_path / "link.pt").symlink_to("y.pt")
    with pytest.raises(UnsupportedError, match="is a link"):
        dcpx.load_tensors(tmp_path / "link.pt")
    with pytest.raises(dcpx.StorageError, match=r"nope\.pt"):
        dcpx.load_tensors(tmp_path / "nope.pt")


def test_pickle_that_claims_a_huge_storage_takes_no_memory(tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    torch.save({"w": torch.ones(2)}, source)

    def swollen(name: str, data: bytes) -> tuple[str, bytes]:
        if name.endswith("data.pkl"):
            small = pickle.dumps(2, 2)[2:-1]
            assert small in data
            data = data.replace(small, pickle.dumps(1 << 40, 2)[2:-1])
        return name, data

    rewritten(source, tmp_path / "y.pt", swollen)
    with pytest.raises(CorruptionError, match="in a record of 8 B"):
        dcpx.load_tensors(tmp_path / "y.pt")
