"""`verify` compares the form of stock's data files with the metadata, and says what it proved."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import chunked, grid
from support.rows import check_rows

import torch_dcpx as dcpx

BOTH = "bytes against recorded checksums and form (names, shapes, dtypes, sizes)"
STOCK = "bytes against recorded checksums and form (shapes, dtypes, sizes)"  # its items lack names


def stock(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        (torch.ones(4, 6), torch.ones(6, 4), "[6, 4], the metadata [4, 6]"),
        (torch.ones(4, 6), torch.ones(24), "[24], the metadata [4, 6]"),
        (torch.ones(4), torch.ones(4, dtype=torch.int32), "int32, the metadata torch.float32"),
        (torch.ones(4, 2), torch.ones(2, 2).double(), "[2, 2], the metadata [4, 2]"),
    ],
)
def test_data_file_of_another_save_of_other_form_is_a_fault_by_name(
    tmp_path: Path, mine: torch.Tensor, other: torch.Tensor, said: str
) -> None:
    state = {"a": torch.ones(3), "w": mine}
    path = stock(state, tmp_path / "mine")
    from_other = stock({**state, "w": other}, tmp_path / "other")
    assert dcpx.verify(path).ok
    shutil.copy(from_other / "__0_0.distcp", path / "__0_0.distcp")
    report = dcpx.verify(path)
    if (path / "__0_0.distcp").stat().st_size == (from_other / "__0_0.distcp").stat().st_size:
        assert [(fault.kind, fault.fqns) for fault in report.faults] == [("item", ("w",))]
        assert said in str(report)
    assert not report.ok


def test_stock_checkpoints_of_all_kinds_of_items_are_whole(tmp_path: Path) -> None:
    state = {
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.ones(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "complex": torch.ones(3, dtype=torch.complex64),
        "bool": torch.ones(3, dtype=torch.bool),
        "step": 7,
        "nested": {"list": [torch.ones(2), "text"]},
    }
    report = dcpx.verify(stock(state, tmp_path / "c"))
    assert report.ok and not report.findings
    assert f"proved: {STOCK}" in str(report)


def place(metadata: Any, fqn: str) -> Any:
    return next(one for one in metadata.storage_data if one.fqn == fqn)


def swap_with_an_object(metadata: Any) -> None:
    a, b = place(metadata, "a"), place(metadata, "step")
    stored = metadata.storage_data
    stored[a], stored[b] = stored[b], stored[a]


def empty(fqn: str) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.storage_data[place(metadata, fqn)]).update(length=0)


def other_chunk(metadata: Any) -> None:
    index = place(metadata, "a")
    stored = metadata.storage_data
    stored[replace(index, offset=torch.Size([7]))] = stored[index]


def other_sizes_of_conj(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["conj"]
    entry.size = entry.chunks[0].sizes = torch.Size([3])


def other_dtype_of_conj(metadata: Any) -> None:
    metadata.state_dict_metadata["conj"].properties.dtype = torch.complex128


CHANGES: dict[str, Callable[[Any], object]] = {  # by what is said of them
    "'a' in '__0_0.distcp' is of another form: the file says int": swap_with_an_object,
    "'a' takes 0 B": empty("a"),
    "'step' takes 0 B": empty("step"),
    "where 'a' at offset [0] is stored, but names no such": (
        lambda metadata: metadata.state_dict_metadata.pop("a")
    ),
    "where 'a' at offset [7] is stored, but names no such": other_chunk,
    "the file says [2], the metadata [3]": other_sizes_of_conj,
    "the file says torch.complex64, the metadata torch.complex128": other_dtype_of_conj,
}


def test_metadata_that_the_file_does_not_hold_is_a_fault(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "step": 7, "conj": torch.tensor([1 + 2j, 3]).conj()}
    path = stock(state, tmp_path / "c") / ".metadata"
    whole = path.read_bytes()
    report = dcpx.verify(tmp_path / "c")
    assert report.ok and report.proved == STOCK and not report.notes

    def check(said: str) -> None:
        metadata = pickle.loads(whole)
        CHANGES[said](metadata)
        path.write_bytes(pickle.dumps(metadata))
        report = dcpx.verify(tmp_path / "c")
        assert not report.ok and said in str(report)

    check_rows({said: said for said in CHANGES}, check)


def test_report_says_what_it_proved(tmp_path: Path) -> None:
    dcpx.save({"w": torch.ones(3)}, tmp_path / "ours", no_dist=True)
    assert dcpx.verify(tmp_path / "ours").proved == BOTH
    dcpx.export({"w": torch.ones(3)}, tmp_path / "out", no_dist=True)
    form = dcpx.verify(tmp_path / "out")
    assert form.proved == "form (names, shapes, dtypes, sizes), no bytes"
    assert "  proved: form" in str(form)
    torch.save({"w": torch.ones(3)}, tmp_path / "y.pt")
    assert dcpx.verify(tmp_path / "y.pt").proved == BOTH
    (tmp_path / "ours/.metadata").unlink()
    lost = dcpx.verify(tmp_path / "ours")
    assert lost.proved == "bytes against recorded checksums, no form"
    assert "  compared: bytes" in str(lost)
    (tmp_path / "empty").mkdir()
    assert dcpx.verify(tmp_path / "empty").proved == "neither bytes nor form"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_form_that_torch_alone_decodes_is_said_to_be_left(tmp_path: Path) -> None:
    odd = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    report = dcpx.verify(stock({"w": torch.ones(3), "odd": odd}, tmp_path))
    assert report.ok and [note.kind for note in report.notes] == ["unchecked"]
    assert report.proved == f"{STOCK}, form not of all: see the notes"


def test_items_are_names_and_parts_what_they_are_stored_in(tmp_path: Path) -> None:
    boxes = grid((4, 6), (2, 3))
    state = {"w": chunked(boxes, [torch.ones(box.sizes) for box in boxes], (4, 6)), "step": 3}
    dcpx.save(state, tmp_path / "a", no_dist=True)
    report = dcpx.verify(tmp_path / "a")
    assert (report.items, report.parts) == (2, 7) and "7 parts in 1 file" in str(report)
    (listed,) = dcpx.ls(tmp_path).checkpoints
    assert listed.items == len(dcpx.inspect(tmp_path / "a").items) == 2
    (tmp_path / "a/.metadata").unlink()
    (made,) = dcpx.repair(tmp_path / "a", accept_assumptions=True).repaired
    assert (made.items, made.parts) == (2, 7)
