"""Readers with a `read_data` of their own: what the entries of `storage_data` say is theirs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.futures import Future

import torch_dcpx
from torch_dcpx import CorruptionError, DcpxReader, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_leaks")

STATE = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(5, dtype=torch.int32)}


@dataclasses.dataclass
class Url:
    """An entry that no field of stock's describes."""

    url: str


def blank() -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in STATE.items()}


def load(reader: DcpxReader, loads: str) -> dict[str, Any]:
    target = blank()
    if loads == "stock":
        dcp.load(target, storage_reader=reader, no_dist=True)
    else:
        torch_dcpx.load(target, reader.path, storage_reader=reader, no_dist=True)
    return target


class Fetching(DcpxReader):
    """Reads tensors from elsewhere; the checkpoint beside it says what there is."""

    def __init__(self, path: Path, entry: Any) -> None:
        super().__init__(path)
        self.entry = entry
        self.asked: list[Any] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = super().read_metadata(*args, **kwargs)
        entries = {index: self.entry(index.fqn) for index in metadata.storage_data}
        return dataclasses.replace(metadata, storage_data=entries)


class OwnReading(Fetching):
    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        for item in plan.items:
            self.asked.append(self.storage_data[item.storage_index])
            target = planner.resolve_tensor(item)
            target.copy_(STATE[item.storage_index.fqn])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


ENTRIES: dict[str, Any] = {
    "foreign": lambda fqn: Url(f"https://host/{fqn}"),
    "text": lambda fqn: f"https://host/{fqn}",
    "url": lambda fqn: _StorageInfo(f"https://host/{fqn}", 0, 100),
    "no DCP file": lambda _: _StorageInfo("notes.txt", 0, 5),
    "a directory": lambda _: _StorageInfo("folder", 0, 5),
    "no text": lambda _: _StorageInfo(7, 0, 5),  # type: ignore[arg-type]
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(STATE, tmp_path / "step")
    (tmp_path / "step" / "notes.txt").write_text("hello")
    (tmp_path / "step" / "folder").mkdir()
    return tmp_path / "step"


@pytest.mark.parametrize("loads", ["stock", "ours"])
def test_entries_of_any_kind_are_left_to_a_read_data_of_its_own(
    checkpoint: Path, loads: str
) -> None:
    for entry, made in ENTRIES.items():
        reader = OwnReading(checkpoint, made)
        assert_same(STATE, load(reader, loads), entry)
        assert sorted(map(str, reader.asked)) == sorted(str(made(key)) for key in STATE)


@pytest.mark.parametrize("loads", ["stock", "ours"])
def test_entries_that_our_read_data_cannot_read_are_refused_by_name(
    checkpoint: Path, loads: str
) -> None:
    for entry in ("foreign", "text", "no text"):
        with pytest.raises((UnsupportedError, CheckpointException)) as info:
            load(Fetching(checkpoint, ENTRIES[entry]), loads)
        error: BaseException = info.value
        if isinstance(error, CheckpointException):
            ((error, _),) = error.failures.values()
        assert isinstance(error, UnsupportedError)
        for text in (type(ENTRIES[entry]("w")).__name__, "read_data", str(checkpoint)):
            assert text in str(error)
        assert "'w'" in str(error) or "'b'" in str(error)


def test_own_read_data_that_hands_on_to_ours_gets_the_error_of_the_search(
    checkpoint: Path,
) -> None:
    class Watching(Fetching):
        def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
            self.asked.append(len(plan.items))
            return super().read_data(plan, planner)

    reader = Watching(checkpoint, ENTRIES["no DCP file"])
    with raises_one(CorruptionError) as raised:
        load(reader, "stock")
    assert "notes.txt" in str(raised.error) and reader.asked == [2]


@pytest.mark.parametrize("loads", ["stock", "ours"])
@pytest.mark.parametrize("threads", [1, 2])
def test_torchs_reader_of_hugging_face_files_works_over_ours(
    tmp_path: Path, threads: int, loads: str
) -> None:
    files = pytest.importorskip("safetensors.torch")
    for number, key in enumerate(STATE):
        files.save_file({key: STATE[key]}, tmp_path / f"model-{number}.safetensors")
    own = dict(vars(HuggingFaceStorageReader))
    names = ("_process_read_request", "_read_files_from_queue", "read_data", "read_metadata")
    made: Any = type("OverOurs", (DcpxReader,), {name: own[name] for name in names if name in own})
    reader = made(str(tmp_path))
    reader.thread_count = threads
    assert_same(STATE, load(reader, loads))
