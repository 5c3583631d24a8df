"""What `verify` finds: all of it, by file, range and name; of ours and of stock's."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.foreign import Piece, write_foreign
from support.rank_saves import save_ranks, sharded
from support.saves import change, data_files, flipped, read_footer, save, save_rank_local
from support.zip_samples import saved
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx as dcpx
from torch_dcpx import NotCommittedError, OptionError, WriteOptions
from torch_dcpx.integrity import compare
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.parts import TAIL

BLOCK_BYTES = 64 << 10


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    large = torch.randn(400, 500, generator=g)
    odd = torch.randn(9, dtype=torch.complex64, generator=g).conj()
    return {"m": torch.randn(10, 3, generator=g), "large": large, "odd": odd, "text": f"é {seed}"}


def kinds(report: dcpx.VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.file) for finding in report.findings]


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    save(state_of(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


# ---- Whole checkpoints --------------------------------------------------------------------------


def test_whole_checkpoints_have_no_finding_and_every_byte_is_counted(tmp_path: Path) -> None:
    state = state_of()
    save(state, tmp_path / "one")
    save(state, tmp_path / "several", options=WriteOptions(files_per_rank=3))
    save(state, tmp_path / "stock", "stock")
    save_ranks(sharded(state, 3), tmp_path / "ranks")
    for rank in range(2):
        save_rank_local(state, tmp_path / "own", rank)
    for writer in ("ours", "stock"):
        save({}, tmp_path / "empty", writer)
        assert dcpx.verify(tmp_path / "empty").findings == ()
        shutil.rmtree(tmp_path / "empty")
    for path in sorted(tmp_path.iterdir()):
        report = dcpx.verify(path)
        assert report.ok and not kinds(report), str(report)
        assert report.files == len(data_files(path))
        payload = sum(tensor.nbytes for tensor in (state["m"], state["large"]))
        assert report.checked_bytes > payload
        assert str(path) in str(report) and "is whole" in str(report)


def test_what_is_no_directory_and_no_worker_are_errors(ckpt: Path) -> None:
    with pytest.raises(OptionError):
        dcpx.verify(ckpt, workers=0)
    for path in (ckpt / "nothing", ckpt / ".metadata"):
        with pytest.raises(NotCommittedError):
            dcpx.verify(path)


# ---- Data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "memory"), [(1, 2 << 20), (4, 64 << 20)])
def test_bad_blocks_are_those_that_zlib_finds(
    tmp_path: Path, seed: int, workers: int, memory: int
) -> None:
    rng = random.Random(seed)
    state = {name: torch.randint(0, 256, (1_300_001,), dtype=torch.uint8) for name in "abc"}
    save(state, tmp_path)
    path = tmp_path / data_files(tmp_path)[0]
    whole, footer = path.read_bytes(), read_footer(path)
    damaged = bytearray(whole)
    for _ in range(rng.choice([1, 7, 30])):
        begin = rng.randrange(footer.data_bytes)
        length = rng.choice([1, 1, 5, 70_000, 300_000])
        for at in range(begin, min(begin + length, footer.data_bytes), 997):
            damaged[at] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    bad = {
        at
        for at in range(0, footer.data_bytes, BLOCK_BYTES)
        if zlib.crc32(damaged[at : min(at + BLOCK_BYTES, footer.data_bytes)])
        != zlib.crc32(whole[at : min(at + BLOCK_BYTES, footer.data_bytes)])
    }
    report = dcpx.verify(tmp_path, workers=workers, host_memory_bytes=memory)
    found = set()
    for finding in report.findings:
        assert (finding.kind, finding.file) == ("data", path.name)
        assert finding.offset is not None and finding.nbytes is not None
        found |= set(range(finding.offset, finding.offset + finding.nbytes, BLOCK_BYTES))
        assert set(finding.fqns) == {
            row.fqn
            for row in footer.rows
            if row.item_offset < finding.offset + finding.nbytes
            and finding.offset < row.item_offset + row.item_bytes
        }
    assert found == bad


def test_bad_blocks_of_two_files_are_findings_of_each_file(tmp_path: Path) -> None:
    state = {name: torch.zeros(300_000, dtype=torch.uint8) for name in "ab"}
    save(state, tmp_path, options=WriteOptions(files_per_rank=2))
    first, second = (tmp_path / name for name in data_files(tmp_path))
    change(first, BLOCK_BYTES + 5, b"\x55")
    change(second, 2 * BLOCK_BYTES + 5, b"\x55")  # where a run of the first would go on
    found = [(each.file, each.offset, each.nbytes) for each in dcpx.verify(tmp_path).faults]
    assert found == [
        (first.name, BLOCK_BYTES, BLOCK_BYTES), (second.name, 2 * BLOCK_BYTES, BLOCK_BYTES),
    ]  # fmt: skip


def test_file_that_is_replaced_before_its_bytes_are_checked_is_named(
    ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compare.add_file

    def then_replace(job: Any, name: str) -> Any:
        facts = real(job, name)
        shutil.copy(ckpt / name, ckpt.parent / "copy")
        (ckpt.parent / "copy").rename(ckpt / name)  # of one size and one content
        return facts

    monkeypatch.setattr(compare, "add_file", then_replace)
    report = dcpx.verify(ckpt)
    assert kinds(report) == [("unreadable", "__0_0.distcp")]
    assert "the file was replaced while it was checked" in report.faults[0].message


@pytest.mark.usefixtures("no_leaks")
def test_all_findings_of_all_files_are_in_one_report(tmp_path: Path) -> None:
    save_ranks(sharded(state_of(), 3), tmp_path)
    first, second, third = (tmp_path / name for name in data_files(tmp_path))
    footer = read_footer(first)
    large = footer.row("large")
    change(first, large.payload_offset, b"\x55")
    change(first, large.payload_offset + 3 * BLOCK_BYTES, b"\x55")
    change(first, footer.index_offset - 1, b"\x55")
    second.unlink()
    third.write_bytes(third.read_bytes()[:-4096])
    (tmp_path / "__7_0.distcp").write_bytes(b"left behind")
    report = dcpx.verify(tmp_path)
    assert kinds(report) == [
        *[("data", first.name)] * 2, ("missing", second.name), ("tail", third.name),
        ("size", third.name), ("padding", first.name), ("leftover", "__7_0.distcp"),
    ]  # fmt: skip
    assert not report.ok and len(report.faults) == 5
    assert "large" in report.faults[0].fqns
    assert all(finding.message for finding in report.findings)


@pytest.mark.usefixtures("no_leaks")
def test_what_is_no_regular_file_is_a_finding_and_waited_for_by_nobody(ckpt: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        path = ckpt / name
        path.rename(ckpt / "elsewhere")
        for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")):
            make(path)
            report = dcpx.verify(ckpt)
            assert [at for at in kinds(report) if at[1] == name] == [("file", name)]
            assert not report.ok
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (ckpt / "elsewhere").rename(path)
    assert dcpx.verify(ckpt).ok


# ---- Metadata -----------------------------------------------------------------------------------


def test_both_damaged_parts_of_metadata_are_named(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    pickle_bytes, body_bytes = TAIL.unpack(path.read_bytes()[-TAIL.size :])[3:5]
    change(path, 100, b"\xff")
    change(path, pickle_bytes + body_bytes - 9, b"\xff")
    faults = dcpx.verify(ckpt).faults
    assert [(f.kind, f.offset, f.nbytes) for f in faults] == [
        ("metadata", 0, pickle_bytes),
        ("metadata", pickle_bytes, body_bytes),
    ]


def rewritten(ckpt: Path, edit: Any, **entry: Any) -> None:
    """Writes the metadata anew, as `edit` has changed its Metadata, and `entry` the FileEntry of
    each file; every checksum is right.
    """
    path = ckpt / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    assert found.files is not None
    edit(found.metadata)
    files = [each._replace(**entry) for each in found.files.values()]
    path.write_bytes(encode_metadata(found.metadata, files, found.save_id))


def test_pickle_and_columns_that_disagree_are_named(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    ours = path.read_bytes()

    def shift(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "m")
        metadata.storage_data[index].offset += 64
        metadata.planner_data["m"] = ("other",)

    rewritten(ckpt, shift)
    other = path.read_bytes()
    fields, others = (list(TAIL.unpack(data[-TAIL.size :])) for data in (ours, other))
    mixed = other[: others[3]] + ours[fields[3] : -TAIL.size]
    fields[2:4] = others[2:4]  # CRC and bytes of the pickle
    tail = TAIL.pack(*fields)[:-4]
    path.write_bytes(mixed + tail + zlib.crc32(tail).to_bytes(4, "little"))
    report = dcpx.verify(ckpt)
    assert kinds(report) == [("disagreement", ".metadata")] * 2
    assert report.faults[0].fqns == ("m",)


def test_items_that_the_file_lacks_or_that_overlap_are_named(ckpt: Path) -> None:
    def shift(metadata: Any) -> None:
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        places["m"].offset, places["m"].length = places["text"].offset, places["text"].length

    rewritten(ckpt, shift)
    report = dcpx.verify(ckpt)
    assert sorted(kinds(report)) == [("item", "__0_0.distcp"), ("overlap", "__0_0.distcp")]
    (overlap,) = (finding for finding in report.faults if finding.kind == "overlap")
    assert set(overlap.fqns) == {"m", "text"}


@pytest.mark.parametrize("entry", [{"footer_crc": 7}, {"file_id": bytes(16)}])
def test_footer_that_the_file_table_does_not_vouch_for_is_a_finding(
    ckpt: Path, entry: dict[str, Any]
) -> None:
    rewritten(ckpt, lambda _: None, **entry)
    with pytest.raises(CheckpointException, match="belongs to another save"):
        dcp.load(state_of(), storage_reader=dcpx.DcpxReader(ckpt), no_dist=True)
    assert kinds(dcpx.verify(ckpt)) == [("generation", "__0_0.distcp")]


def test_holes_and_items_stored_nowhere_are_named(ckpt: Path) -> None:
    def forget(metadata: Any) -> None:
        metadata.state_dict_metadata["m"].chunks.clear()
        del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "large")]

    rewritten(ckpt, forget)
    found = {(finding.kind, finding.fqns) for finding in dcpx.verify(ckpt).faults}
    assert found == {("hole", ("m",)), ("item", ("m",)), ("item", ("large",))}


def test_metadata_cut_behind_its_pickle_is_a_fault_though_it_loads(ckpt: Path) -> None:
    path = ckpt / ".metadata"
    path.write_bytes(path.read_bytes()[: TAIL.unpack(path.read_bytes()[-TAIL.size :])[3]])
    assert kinds(dcpx.verify(ckpt)) == [("metadata", ".metadata")]


def test_names_that_lead_out_of_the_directory_are_findings(ckpt: Path) -> None:
    whole = (ckpt / ".metadata").read_bytes()
    name = ""

    def lead_out(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    for name in ("../out", "/etc/passwd", "a\0b", "sub/../../x", "\udcff"):
        (ckpt / ".metadata").write_bytes(whole)
        rewritten(ckpt, lead_out)
        faults = {finding.kind for finding in dcpx.verify(ckpt).faults if finding.file == name}
        assert "file" in faults and faults <= {"file", "disagreement", "overlap"}, name


# ---- Nothing, or the wrong things, committed ----------------------------------------------------


def test_uncommitted_files_are_a_fault_and_still_looked_at(ckpt: Path) -> None:
    (ckpt / ".metadata").unlink()
    (ckpt / ".metadata.0123456789ab.tmp").write_bytes(b"half")
    with flipped(ckpt / "__0_0.distcp", 5000):
        report = dcpx.verify(ckpt)
    assert ("uncommitted", ".metadata") in kinds(report)
    assert ("data", "__0_0.distcp") in kinds(report)


def test_rank_without_metadata_of_its_own_is_a_fault(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(state_of(), tmp_path, rank)
    (tmp_path / "__1.metadata").unlink()
    (finding,) = dcpx.verify(tmp_path).findings
    assert finding.kind == "uncommitted" and finding.file.startswith("__1_0.")


def test_what_a_global_checkpoint_replaced_is_a_note(ckpt: Path, tmp_path: Path) -> None:
    save_rank_local(state_of(), tmp_path / "own", 0)
    (ckpt / "__0.metadata").write_bytes((tmp_path / "own/__0.metadata").read_bytes())
    report = dcpx.verify(ckpt)
    assert report.ok and kinds(report) == [("leftover", "__0.metadata")]


# ---- Stock's checkpoints ------------------------------------------------------------------------


def test_flipped_byte_of_a_stock_payload_is_found_by_its_zip_checksum(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    state = state_of()
    save(state, tmp_path, "stock")
    path = tmp_path / "__0_0.distcp"
    infos = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    for index, info in infos.items():
        for _ in range(3):
            # The payload of a tensor is most of its item; it begins within the first KiB.
            low = 1024 if info.length > 4096 else info.length // 3
            at = info.offset + rng.randrange(low, max(low + 1, info.length - 1024))
            with flipped(path, at):
                report = dcpx.verify(tmp_path)
            hits = [finding for finding in report.findings if index.fqn in finding.fqns]
            if info.length > 4096:
                (finding,) = hits
                assert finding.kind == "data" and finding.expected != finding.found
                assert finding.offset <= at < finding.offset + finding.nbytes


def test_stock_files_that_are_short_or_gone_are_named(tmp_path: Path) -> None:
    save(state_of(), tmp_path, "stock")
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    for end in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        report = dcpx.verify(tmp_path)
        assert {finding.file for finding in report.faults} == {path.name}
        assert {finding.kind for finding in report.faults} <= {"item", "data"}
    path.unlink()
    assert kinds(dcpx.verify(tmp_path)) == [("missing", path.name)]


def test_overlapping_items_of_stock_are_read_once(tmp_path: Path) -> None:
    """Metadata that names one range a thousand times costs no more than one."""
    names = [f"t{i}" for i in range(50)]
    data = saved(torch.arange(100_000))

    def pile_up(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset = 0

    pieces = [Piece(name, data, torch.arange(100_000)) for name in names]
    write_foreign(tmp_path, pieces, change=pile_up)
    report = dcpx.verify(tmp_path)
    assert kinds(report) == [("overlap", "__0_0.distcp")] * 49
    assert report.checked_bytes < len(data)
