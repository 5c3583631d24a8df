"""A lost or damaged `.metadata` made anew: what was saved comes back bit for bit, or a refusal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.rank_saves import save_ranks, sharded
from support.saves import (
    assert_loads,
    change,
    committed_ids,
    data_files,
    files_in,
    load,
    note_save,
    read_footer,
    save,
    save_ids,
    save_rank_local,
)
from support.states import assert_same
from torch.distributed.checkpoint._extension import ZStandard

import torch_dcpx as dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    NotCommittedError,
    OptionError,
    RepairError,
    RepairReport,
    WriteOptions,
)
from torch_dcpx.metadata.parts import TAIL
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import SaveLock
from torch_dcpx.writer.locks import SaveLocks


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "m": torch.randn(10, 3, generator=g),
        "half": torch.randn(7, 4, generator=g).bfloat16(),
        "nested": {
            "list": [torch.randn(5, generator=g), "text", seed],
            "scalar": torch.tensor(2.5),
        },
        "empty": torch.zeros(0, 3),
        "odd": torch.randn(9, dtype=torch.complex64, generator=g).conj(),
        "grad": torch.randn(4, generator=g).requires_grad_(),
        "déjà vu": torch.arange(3),
    }


def flat_of(seed: int = 0) -> dict[str, Any]:
    state = state_of(seed)
    nested = state.pop("nested")
    return {**state, "vector": nested["list"][0], "text": "text", "step": seed}


def save_several(state: dict[str, Any], path: Path) -> None:
    save(state, path, options=WriteOptions(files_per_rank=3))


def save_again(state: dict[str, Any], path: Path) -> None:
    save(state_of(7), path)
    save(state, path)


# Of these a pickle does not say which file it names.
NAMELESS = {("pickle", "one file"), ("pickle", "several files")}
SAVES = {"one file": save, "several files": save_several, "saved again": save_again}


def damages(whole: bytes) -> dict[str, bytes | None]:
    """Returns what may be left of a `.metadata`, by what it is made anew of."""
    *_, pickle_bytes, body_bytes, _, _, _, _ = TAIL.unpack(whole[-TAIL.size :])
    middle = pickle_bytes + body_bytes // 2

    def flip(at: int) -> bytes:
        return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]

    return {
        "lost: footers": None,
        "empty: footers": b"",
        "flipped pickle: columns": flip(pickle_bytes // 2),
        "flipped columns: pickle": flip(middle),
        "flipped tail: footers": flip(len(whole) - 20),
        "cut in the pickle: footers": whole[: pickle_bytes // 2],
        "cut behind the pickle: pickle": whole[:pickle_bytes],
        "cut in the columns: footers": whole[:middle],
        "zeros: footers": bytes(len(whole)),
    }


def repaired(directory: Path, **kwargs: Any) -> RepairReport:
    """Repairs what there is, whatever must be assumed."""
    return dcpx.repair(directory, accept_assumptions=True, **kwargs)


def leave(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def stored(directory: Path) -> tuple[Any, ...]:
    """Returns what stock reads of the metadata, without ids and the order of chunks."""
    found = dcp.FileSystemReader(directory).read_metadata()
    entries = {
        fqn: (
            type(entry),
            getattr(entry, "properties", None),
            getattr(entry, "size", None),
            sorted((tuple(c.offsets), tuple(c.sizes)) for c in getattr(entry, "chunks", ())),
        )
        for fqn, entry in found.state_dict_metadata.items()
    }
    return entries, found.storage_data, found.planner_data, found.version


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind != "one file" else []) for kind in SAVES],
)
def test_repaired_metadata_loads_bit_for_bit_what_was_saved(tmp_path: Path, kind: str) -> None:
    state = state_of()
    SAVES[kind](state, tmp_path)
    path = tmp_path / ".metadata"
    whole, before = path.read_bytes(), stored(tmp_path)
    for damage, content in damages(whole).items():
        leave(path, content)
        files = files_in(tmp_path)
        said = dcpx.repair(tmp_path, dry_run=True)
        assert files_in(tmp_path) == files and said.is_dry_run
        (made,) = dcpx.repair(tmp_path, accept_assumptions=bool(said.assumptions)).repaired
        (would,) = said.repaired
        assert (made.source, made.files, made.items) == (would.source, would.files, would.items)
        assert made.source == damage.rpartition(" ")[2], damage
        assert stored(tmp_path) == before, damage
        assert committed_ids(tmp_path) == {made.save_id} == set(save_ids(tmp_path).values())
        assert bool(made.assumed) is (made.source == "footers" or (made.source, kind) in NAMELESS)
        if made.source == "columns":
            assert path.read_bytes() == whole
        assert dcpx.verify(tmp_path).findings == ()
    assert_loads(state, tmp_path)
    save(state_of(3), tmp_path)  # over it, as over any other
    assert_loads(state_of(3), tmp_path)
    assert dcpx.verify(tmp_path).findings == ()


@pytest.mark.slow
def test_shards_of_ranks_are_put_together_again(tmp_path: Path) -> None:
    state = flat_of()
    save_ranks(sharded(state, 3), tmp_path)
    before = stored(tmp_path)
    for damage, content in damages((tmp_path / ".metadata").read_bytes()).items():
        leave(tmp_path / ".metadata", content)
        (made,) = repaired(tmp_path).repaired
        assert (len(made.files), stored(tmp_path)) == (3, before), damage
        assert_loads(state, tmp_path)
        assert dcpx.verify(tmp_path).ok


def test_rank_local_metadata_is_made_anew_for_each_rank(tmp_path: Path) -> None:
    for rank in range(3):
        save_rank_local(state_of(rank), tmp_path, rank)
    good = (tmp_path / "__1.metadata").read_bytes()
    (tmp_path / "__0.metadata").unlink()
    change(tmp_path / "__2.metadata", 50, b"\xff")
    report = repaired(tmp_path)
    assert [one.name for one in report.repaired] == ["__0.metadata", "__2.metadata"]
    assert [one.source for one in report.repaired] == ["footers", "columns"]
    assert (tmp_path / "__1.metadata").read_bytes() == good
    assert dcpx.verify(tmp_path).findings == ()
    assert_same(state_of(0), load(state_of(0), tmp_path))  # as rank 0 loads
    with pytest.raises(RepairError, match="all ranks"):
        dcpx.repair(tmp_path)


# ---- Refusals: nothing changes ------------------------------------------------------------------


def refused(directory: Path, match: str, kind: type[Exception] = RepairError, **kwargs: Any) -> Any:
    """Asserts that a repair is refused and that no file has changed; returns the error."""
    before = files_in(directory)
    for dry_run in (True, False):
        with pytest.raises(kind, match=match) as caught:
            dcpx.repair(directory, dry_run=dry_run, **kwargs)
        assert files_in(directory) == before
    return caught.value


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_good_metadata_is_never_touched(tmp_path: Path, writer: str) -> None:
    save(state_of(), tmp_path, writer)
    error = refused(tmp_path, "it is good")
    assert error.path == str(tmp_path / ".metadata")
    (tmp_path / "__0_0.distcp").unlink()  # good, and its file is gone
    refused(tmp_path, "it is good")


def test_lost_shards_are_noticed(tmp_path: Path) -> None:
    save_ranks(sharded(flat_of(), 3), tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    for lost, why in ((0, "others are lost"), (1, "others are lost"), (2, "do not hold all of")):
        path = tmp_path / f"__{lost}_0.distcp"
        content = path.read_bytes()
        path.unlink()
        leave(tmp_path / ".metadata", None)
        refused(tmp_path, why)
        (tmp_path / ".metadata").write_bytes(damages(metadata)["flipped pickle: columns"] or b"")
        assert path.name in refused(tmp_path, "No such file").candidates
        (tmp_path / ".metadata").write_bytes(damages(metadata)["flipped columns: pickle"] or b"")
        refused(tmp_path, "No such file")
        path.write_bytes(content)
    leave(tmp_path / ".metadata", None)
    repaired(tmp_path)
    assert_loads(flat_of(), tmp_path)


def test_lost_file_between_those_of_a_rank_is_noticed(tmp_path: Path) -> None:
    save_several(state_of(), tmp_path)
    leave(tmp_path / ".metadata", None)
    (tmp_path / "__0_1.distcp").unlink()
    refused(tmp_path, "one between them is lost")


@pytest.mark.usefixtures("no_leaks")
def test_of_two_generations_none_is_guessed_but_the_named_one_taken(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    first = (tmp_path / "__0_0.distcp").read_bytes()
    save(state_of(2), tmp_path)
    (own,) = data_files(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(first)
    leave(tmp_path / ".metadata", None)
    error = refused(tmp_path, "the files are of 2 saves")
    assert set(error.candidates) == {own, "__0_0.distcp"}
    for names, seed in (([own], 2), (["__0_0.distcp"], 1)):
        repaired(tmp_path, files=names)
        assert_loads(state_of(seed), tmp_path)
        leave(tmp_path / ".metadata", None)
    for name in (own, "__0_0.distcp"):
        note_save(tmp_path / name)
    error = refused(tmp_path, "may be file 0 of rank 0")
    assert set(error.candidates) == {own, "__0_0.distcp"}
    refused(tmp_path, "a list of names", OptionError, files=own)
    refused(tmp_path, "No such file", files=["__4_0.distcp"])
    for rank_local in (False, True):
        refused(tmp_path, "no data file that it could name", files=[], rank_local=rank_local)


def test_ranks_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    save_ranks(sharded(flat_of(1), 2), tmp_path)
    first = (tmp_path / "__1_0.distcp").read_bytes()
    save_ranks(sharded(flat_of(2), 2), tmp_path)
    (second,) = tmp_path.glob("__1_0.*.distcp")
    second.unlink()
    (tmp_path / "__1_0.distcp").write_bytes(first)
    leave(tmp_path / ".metadata", None)
    refused(tmp_path, "the files are of 2 saves")
    for name in data_files(tmp_path):
        note_save(tmp_path / name)
    refused(tmp_path, "with and without an id")


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "footer"),
        (lambda path: change(path, read_footer(path).index_offset + 20, b"\xff"), "index checksum"),
        (lambda path: path.rename(path.with_name("__0_0.0123456789ab.distcp")), "it was renamed"),
        (replace_by_link, "link"),
        (Path.unlink, "no data file"),
    ],
    ids=["cut", "flipped", "renamed", "link", "gone"],
)
def test_damaged_footers_prove_nothing(
    tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    save(state_of(), tmp_path)
    leave(tmp_path / ".metadata", None)
    damage(tmp_path / "__0_0.distcp")
    refused(tmp_path, why)


def test_files_of_stock_and_of_extensions_are_refused(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "stock", "stock")
    leave(tmp_path / "stock/.metadata", None)
    refused(tmp_path / "stock", "footer")
    save({"t": torch.ones(3), "n": 1}, tmp_path / "zstd", _extensions=[ZStandard()])
    whole = (tmp_path / "zstd/.metadata").read_bytes()
    leave(tmp_path / "zstd/.metadata", None)
    refused(tmp_path / "zstd", "no footer says|only the lost metadata said")
    (tmp_path / "zstd/.metadata").write_bytes(damages(whole)["flipped pickle: columns"] or b"")
    dcpx.repair(tmp_path / "zstd")  # the columns say which extension
    assert (tmp_path / "zstd/.metadata").read_bytes() == whole
    assert_same({"t": torch.ones(3), "n": 1}, load({"t": torch.ones(3), "n": 1}, tmp_path / "zstd"))


def test_what_is_no_metadata_file_or_no_directory_is_refused(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "ckpt")
    (tmp_path / "ckpt/.metadata").unlink()
    (tmp_path / "ckpt/.metadata").symlink_to("/etc/passwd")
    with pytest.raises(RepairError, match="link; move it away, and `dcpx repair"):
        dcpx.repair(tmp_path / "ckpt")
    with pytest.raises(NotCommittedError):
        dcpx.repair(tmp_path / "nothing")


def test_repair_waits_for_no_save_and_disturbs_none(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    leave(tmp_path / ".metadata", None)
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)

    class Owner:
        """Whoever saves."""

    owner = Owner()
    running = RunningSave(owner)
    running.is_under_way = lambda: True  # type: ignore[method-assign]
    with Directory(other) as directory:
        lock = SaveLock(directory, ".dcpx.lock", running)
        with pytest.raises(ConcurrentSaveError):
            dcpx.repair(other)
        lock.release()
    repaired(other)
    assert_loads(state_of(), other)


def test_repair_forgets_no_save_that_did_not_end(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    for line in ("host=a pid=1 boot=elsewhere\n", ""):
        leave(tmp_path / ".metadata", None)
        (tmp_path / ".dcpx.lock").write_text(line)
        repaired(tmp_path)
        assert (tmp_path / ".dcpx.lock").read_text().endswith(line)
        assert bool((tmp_path / ".dcpx.lock").read_text()) is bool(line)


def test_metadata_that_is_committed_before_the_lock_is_taken_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(), tmp_path)
    good = (tmp_path / ".metadata").read_bytes()
    leave(tmp_path / ".metadata", None)
    take = SaveLocks.take

    def commit_first(*args: Any) -> None:
        (tmp_path / ".metadata").write_bytes(good)
        take(*args)

    monkeypatch.setattr(SaveLocks, "take", commit_first)
    with pytest.raises(RepairError, match="it is good"):
        dcpx.repair(tmp_path)
    assert (tmp_path / ".metadata").read_bytes() == good
