"""Damaged, missing or misplaced `.metadata`, and damaged checkpoints that stock DCP wrote."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import assert_loads, flipped, load, raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import (
    CorruptionError,
    DcpxReader,
    NotCommittedError,
    ShortReadError,
    StorageError,
    UnsupportedError,
)

TAIL = struct.Struct("<8sIIQQQI16sI")  # docs/reference/format.md, ".metadata"


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(40, 30, generator=g),
        "large": torch.randn(70_000, generator=g),
        "transposed": torch.randn(20, 10, generator=g).t(),
        "numbers": [seed, 2.5],
        "text": f"déjà vu {seed}",
    }


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    save(state_of(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def parts(path: Path) -> tuple[int, int]:
    """Returns the sizes of pickle and columns of a `.metadata` file of ours."""
    fields = TAIL.unpack(path.read_bytes()[-TAIL.size :])
    return fields[3], fields[4]


def test_flipped_byte_of_metadata_is_a_corruption_error_of_that_part(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    pickle_bytes, body_bytes = parts(path)
    tail_at = pickle_bytes + body_bytes
    for offset in (pickle_bytes // 2, pickle_bytes + body_bytes // 2, tail_at, tail_at + 20):
        with flipped(path, offset), raises_one(CorruptionError) as raised:
            load(state_of(), ckpt)
        assert raised.error.path == str(path), offset
        assert raised.error.offset <= offset < raised.error.offset + raised.error.nbytes
    assert_same(state_of(), load(state_of(), ckpt))


def test_metadata_of_any_other_length_is_noticed(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    whole, (pickle_bytes, body_bytes) = path.read_bytes(), parts(path)
    tail_at = pickle_bytes + body_bytes
    for nbytes in (0, 1, 2, 63, 64, pickle_bytes - 1, pickle_bytes + 1, tail_at - 1, tail_at,
                   tail_at + 8, len(whole) - 1, len(whole) + 1, len(whole) + 64):  # fmt: skip
        path.write_bytes(whole[:nbytes].ljust(nbytes, b"\0"))
        with raises_one(CorruptionError) as raised:
            load(state_of(), ckpt)
        assert raised.error.path == str(path), nbytes


def test_metadata_cut_behind_its_pickle_is_a_stock_file_with_the_same_values(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    path.write_bytes(path.read_bytes()[: parts(path)[0]])
    assert_loads(state_of(), ckpt)


def test_metadata_that_names_files_of_another_directory_is_no_match(
    ckpt: Path, tmp_path: Path
) -> None:
    save(state_of(1), ckpt)  # a re-save: its file has a name of its own
    save(state_of(2), tmp_path / "other")
    (ckpt / ".metadata").write_bytes((tmp_path / "other" / ".metadata").read_bytes())
    with raises_one(StorageError) as raised:
        load(state_of(), ckpt)
    assert raised.error.path == str(ckpt / "__0_0.distcp")


def test_directory_without_metadata_is_not_committed_and_says_what_it_holds(ckpt: Path) -> None:
    (ckpt / ".metadata").unlink()
    with raises_one(NotCommittedError) as raised:
        load(state_of(), ckpt)
    assert raised.error.errno == 2
    assert "1 data file of an unfinished save" in str(raised.error)


def test_what_is_no_directory_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link to nothing").symlink_to("nowhere")
    for name in ("missing", "file", "link to nothing"):
        with raises_one(NotCommittedError) as raised:
            load(state_of(), tmp_path / name)
        assert raised.error.path == str(tmp_path / name)


def test_link_to_a_checkpoint_directory_is_followed(ckpt: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("ckpt")
    assert_loads(state_of(), tmp_path / "latest")


# ---- No fall-back to rank-local files -----------------------------------------------------------


def test_damaged_metadata_never_falls_back_to_a_rank_local_checkpoint(ckpt: Path) -> None:
    local = dcp.FileSystemWriter(ckpt)
    dcp.save(state_of(9), storage_writer=local, no_dist=True, use_collectives=False)
    path = ckpt / ".metadata"
    assert (ckpt / "__0.metadata").exists()
    whole = path.read_bytes()
    flipped_once = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    for damaged in (flipped_once, b"", b"\x80\x02cos\ngetcwd\n(tR."):
        path.write_bytes(damaged)
        assert_is_corrupt(ckpt, path)
    path.unlink()
    path.mkdir()
    assert_is_corrupt(ckpt, path)


def assert_is_corrupt(directory: Path, path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        load(state_of(), directory)
    error = caught.value.failures[0][0]
    assert isinstance(error, CorruptionError), repr(error)
    assert error.path == str(path)


def test_damaged_rank_local_metadata_says_so_itself(tmp_path: Path) -> None:
    local = dcp.FileSystemWriter(tmp_path)
    dcp.save(state_of(), storage_writer=local, no_dist=True, use_collectives=False)
    (tmp_path / "__0.metadata").write_bytes(b"")
    assert_is_corrupt(tmp_path, tmp_path / "__0.metadata")


@pytest.mark.usefixtures("no_leaks")
def test_failed_load_leaves_the_reader_usable(ckpt: Path, tmp_path: Path) -> None:
    reader = DcpxReader(tmp_path / "nothing")
    state = state_of()
    with raises_one(NotCommittedError):
        dcp.load({"weight": torch.zeros(40, 30)}, storage_reader=reader, no_dist=True)
    target = {"weight": torch.zeros(40, 30)}
    dcp.load(target, checkpoint_id=ckpt, storage_reader=reader, no_dist=True)
    assert_same(state["weight"], target["weight"])


# ---- Stock's checkpoints ------------------------------------------------------------------------


def test_stock_checkpoint_cut_anywhere_gives_typed_errors(tmp_path: Path) -> None:
    state = state_of()
    save(state, tmp_path, "stock")
    for name in ("__0_0.distcp", ".metadata"):
        path = tmp_path / name
        whole = path.read_bytes()
        step = max(1, len(whole) // 20)
        for nbytes in [*range(0, len(whole), step), len(whole) - 1]:
            path.write_bytes(whole[:nbytes])
            with pytest.raises(CheckpointException) as caught:
                load(state, tmp_path)
            error = caught.value.failures[0][0]
            kind = ShortReadError if name == "__0_0.distcp" else CorruptionError
            assert type(error) is kind, (nbytes, repr(error))
            assert error.path == str(path)
        path.write_bytes(whole)
    assert_same(state, load(state, tmp_path))
    (tmp_path / "__0_0.distcp").unlink()
    with raises_one(StorageError) as raised:
        load(state, tmp_path)
    assert raised.error.path == str(tmp_path / "__0_0.distcp")


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(200), torch.randn(9, dtype=torch.complex64).conj()],
    ids=["plain", "only torch reads it"],
)
def test_flipped_byte_of_stock_framing_is_a_typed_error_or_harmless(
    tmp_path: Path, tensor: torch.Tensor, seed: int
) -> None:
    """Stock's files hold no checksum of all: what loads may differ, what fails is typed."""
    save({"t": tensor}, tmp_path, "stock")
    path = tmp_path / "__0_0.distcp"
    failed = 0
    for offset in range(seed % 17, path.stat().st_size, 17):
        mask = (0x01, 0x80)[offset % 2]  # the high bit: names of records that are no UTF-8
        with flipped(path, offset, mask):
            try:
                load({"t": tensor}, tmp_path)
            except CheckpointException as failure:
                error = failure.failures[0][0]
                failed += 1
                assert type(error) in (CorruptionError, UnsupportedError), (offset, repr(error))
                assert error.path == str(path), repr(error)
    assert failed > 15


def test_metadata_that_is_another_object_is_corruption(ckpt: Path) -> None:
    (ckpt / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with raises_one(CorruptionError):
        load(state_of(), ckpt)
